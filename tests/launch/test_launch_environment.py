"""Environments of workers: ours, torchrun's, Slurm's, half of one, and none."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.launch.environment import Worker, expand_counts, expand_hosts, without_worker, worker_environment

# As torchrun 2.13 sets them, of the third of four ranks on the second of two hosts.
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}

# As srun sets them in the second step of a job over three nodes.
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[01-02,07]",
}


def test_nobody_started_this_process() -> None:
    assert worker_environment({"HOME": "/", "WORLD_SIZE": "8", "MASTER_ADDR": "x"}) is None


def test_what_torchrun_says() -> None:
    worker = worker_environment(TORCHRUN)
    assert worker == Worker(3, 1, 4, 2, "node7", 29500, attempt=2, launcher="torchrun", hosts_store=False)


@pytest.mark.parametrize(("agent_hosts", "hosts"), [("True", False), ("False", True), (None, True)])
def test_rank_0_opens_the_store_unless_the_agent_has(agent_hosts: str | None, hosts: bool) -> None:
    environ = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    worker = worker_environment(environ | ({"TORCHELASTIC_USE_AGENT_STORE": agent_hosts} if agent_hosts else {}))
    assert worker is not None
    assert worker.hosts_store is hosts


def test_what_srun_says() -> None:
    worker = worker_environment(SLURM)
    assert worker is not None
    assert (worker.rank, worker.local_rank, worker.world_size, worker.local_world_size) == (9, 1, 11, 3)
    assert (worker.host, worker.launcher, worker.hosts_store) == ("node01", "srun", False)
    assert 15_000 <= worker.port < 30_000


def test_every_job_step_and_restart_of_slurm_has_its_own_port() -> None:
    environments = [
        SLURM | {"SLURM_JOB_ID": str(123456 + job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restart)}
        for job, step, restart in itertools.product(range(4), range(4), range(4))
    ]
    workers = [worker_environment(environ) for environ in environments]
    assert len({worker.port for worker in workers if worker is not None}) == 64


def test_the_address_of_the_store_may_be_given_under_slurm() -> None:
    worker = worker_environment(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert worker is not None
    assert (worker.host, worker.port) == ("10.0.0.1", 4321)


def test_a_batch_script_and_a_single_task_of_slurm_are_no_workers() -> None:
    assert worker_environment({k: v for k, v in SLURM.items() if "STEP" not in k}) is None
    single = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert worker_environment(SLURM | single | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}) is None


@pytest.mark.parametrize("launched_by", [TORCHRUN, SLURM])
def test_our_own_variables_go_first_and_say_everything(launched_by: dict[str, str]) -> None:
    worker = Worker(0, 0, 2, 2, "127.0.0.1", 1234, attempt=3, hosts_store=True, listen_fd=7, phases_s={"fork": 0.25})
    launched_by = launched_by | {"PHALANX_OF_ANOTHER_KIND": "1"}
    environ = launched_by | worker.to_environment()
    assert worker_environment(environ) == worker
    assert without_worker(environ) == launched_by


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_torchrun_would_have_set_is_missed_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: is not set.*torchrun"):
        worker_environment({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"])
def test_what_srun_would_have_set_is_missed_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*: is not set"):
        worker_environment({key: value for key, value in SLURM.items() if key != name})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "four"}, "RANK = 'four': is not a whole number"),
        ({"RANK": "-1"}, "RANK = '-1': is not a whole number"),
        ({"RANK": "4"}, "RANK = 4: there are only 4 ranks"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2: there are only 2 ranks on this host"),
        ({"LOCAL_WORLD_SIZE": "8"}, "more ranks on this host than the 4 of the job"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000: is not a port"),
    ],
)
def test_contradictions_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        worker_environment(TORCHRUN | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID = 3: there are only 3"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID = 3: there are only 3 nodes"),
        ({"SLURM_STEP_NODELIST": "node[01-"}, "SLURM_STEP_NODELIST = 'node[01-': is not a host list"),
        ({"SLURM_STEP_NODELIST": "node[a-b]"}, "SLURM_STEP_NODELIST = 'node[a-b]': is not a host list"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE = '4x2': is not a list of counts"),
    ],
)
def test_slurm_lists_that_cannot_be_read_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        worker_environment(SLURM | changed)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("gpu5", ["gpu5"]),
        ("a,b[8-10],c.example.org", ["a", "b8", "b9", "b10", "c.example.org"]),
        ("rack[1-2]n[08-09]-ib", ["rack1n08-ib", "rack1n09-ib", "rack2n08-ib", "rack2n09-ib"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,4}-?", fullmatch=True), st.integers(0, 90), st.integers(0, 9)), min_size=1
    )
)
def test_host_lists_expand_to_what_they_were_made_of(parts: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in parts)
    hosts = [f"{name}{number:03}" for name, first, more in parts for number in range(first, first + more + 1)]
    assert list(expand_hosts(text)) == hosts


@given(st.text("ab[]-,0123", max_size=12))
def test_any_text_is_a_host_list_or_refused(text: str) -> None:
    try:
        hosts = list(expand_hosts(text))
    except UserError:
        return
    assert hosts == [] or not any(set("[],") & set(host) for host in hosts)


def test_counts() -> None:
    assert expand_counts("4(x2),3") == [4, 4, 3]
    assert expand_counts("16") == [16]
