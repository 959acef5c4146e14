"""What the Slurm back end reads and writes, without Slurm."""

from __future__ import annotations

import asyncio
import math
import ssl
from pathlib import Path

import pytest
from driver_helpers import Town, running

from phalanx.core.errors import UserError
from phalanx.ipc.processes import Identity
from phalanx.run import messages
from phalanx.run.backends.slurm import commands, slurm_submit
from phalanx.run.backends.slurm.commands import (
    Allocation,
    read_allocation,
    read_left,
    read_options,
    read_steps,
    seconds_of,
    srun_environment,
)
from phalanx.run.backends.slurm.slurm_backend import NodeBackoff, Notes
from phalanx.run.backends.slurm.slurm_submit import job_file, sbatch_command, script
from phalanx.run.config import RunConfig, load_job
from phalanx.run.decide.policy import Job
from phalanx.run.secrets import client_context, ensure_certificate, server_context
from phalanx.run.wire.driver_address import address_towards


def job(**options: object) -> RunConfig:
    return RunConfig(script="train.py", hosts=2, spares=1, backend="slurm", backend_options=options)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4:50", 290.0),
        ("1:00:00", 3600.0),
        ("2-03:04:05", 183_845.0),
        ("UNLIMITED", math.inf),
        ("NOT_SET", math.inf),
        ("INVALID", 0.0),
    ],
)
def test_time_left_is_read(text: str, seconds: float) -> None:
    assert read_left(text) == seconds


def test_an_allocation_is_read_from_what_squeue_prints() -> None:
    assert read_allocation("RUNNING|4:30|n[1,3],x-07|None\n") == Allocation(
        "RUNNING", ("n1", "n3", "x-07"), 270, "None"
    )
    assert read_allocation("PENDING|5:00||Resources\n") == Allocation("PENDING", (), 300, "Resources")
    assert read_allocation("\n") is None


@pytest.mark.parametrize(
    ("state", "is_over"),
    [("PENDING", False), ("COMPLETING", False), ("REQUEUED", False), ("CANCELLED", True), ("NODE_FAIL", True)],
)
def test_whether_a_job_is_over(state: str, is_over: bool) -> None:
    assert Allocation(state, (), 0.0).is_over is is_over


def test_steps_are_read_by_name() -> None:
    assert read_steps("7.0|phalanx:train:n1\n7.batch|batch\n") == {"phalanx:train:n1": "7.0", "batch": "7.batch"}


def test_a_new_step_does_not_inherit_the_shape_of_the_one_it_is_started_from() -> None:
    shape = {"SLURM_NTASKS": "8", "SLURM_STEP_ID": "3", "SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_PER_TASK": "4"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/x", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": "/bin"}
    assert srun_environment({**shape, **kept}) == kept


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("1:30", 90), ("1:00:00", 3600), ("1-12", 129_600), ("1-0:0:1", 86_401)]
)
def test_wall_times_are_read_as_sbatch_reads_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"time": "soon"}, ("run.backend_options.time", "'soon'", "12:00:00")),
        ({"time": 2}, ("run.backend_options.time", "'2'", "stop_before_s")),
        ({"partitoin": "x"}, ("run.backend_options.partitoin", "partition")),
        ({"sbatch": ["--nodes=7"]}, ("run.backend_options.sbatch", "--nodes=7", "remove it")),
        ({"srun": ["--mem 5", "x"]}, ("run.backend_options.srun", "'x'", "one word")),
        ({"poll_s": 0}, ("run.backend_options.poll_s", "0")),
    ],
)
def test_a_wrong_option_is_told_with_its_name_value_and_cure(
    options: dict[str, object], parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as told:
        read_options(job(**options))
    assert all(part in str(told.value) for part in parts), told.value


def test_a_job_is_submitted_with_all_its_nodes_and_what_lets_it_survive_a_node(tmp_path: Path) -> None:
    config = job(partition="gpu", time="2-00", gpus_per_node=8, stop_before_s=300, sbatch=["--mem=0"])
    command = sbatch_command(config, read_options(config), tmp_path)
    wanted = {"--nodes=3", "--no-kill", "--requeue", "--open-mode=append", "--signal=B:USR1@300", "--partition=gpu"}
    assert wanted | {"--time=2-00", "--gpus-per-node=8", "--mem=0", "--exclusive"} <= set(command)
    assert str(tmp_path) in script(tmp_path) and script(tmp_path).startswith("#!/bin/sh\nexec ")


def test_the_job_file_that_is_submitted_is_the_same_job(tmp_path: Path) -> None:
    config = RunConfig(
        script="train.py",
        arguments=("--lr", "3e-4", 'a "b"\n'),
        hosts=3,
        environment={"A": "ü"},
        backend="slurm",
        backend_options={"time": "10", "srun": ["--x"]},
        policy={"when_missing": "shrink", "grace_s": 5.0},
        previous={"script": "old.py"},
    )
    path = tmp_path / "job.toml"
    path.write_text(job_file(config, tmp_path / "runs"))
    again = load_job(path).value.run
    assert again == config.model_copy(update={"folder": str(tmp_path / "runs")})


def test_names_of_hosts_are_given_once_and_notes_outlive_the_driver(tmp_path: Path) -> None:
    notes = Notes.read(tmp_path / "slurm.json")
    assert [notes.begin("n1"), notes.begin("n2")] == ["n1", "n2"]
    notes.hosts["n1"].srun, notes.hosts["n1"].machine = Identity(5, 6, "boot"), "here"
    del notes.hosts["n2"]
    notes.evicted["n3"] = "it is bad"
    notes.write()
    again = Notes.read(tmp_path / "slurm.json")
    assert again == notes and again.busy == {"n1"}
    assert again.begin("n2") == "n2.2"


def test_nodes_that_fail_rest_longer_each_time_and_come_after_others() -> None:
    backoff = NodeBackoff()
    backoff.add("n1", 100.0)
    assert backoff.ready(["n1", "n2"], 104.0) == ["n2"]
    assert backoff.ready(["n1", "n2"], 105.0) == ["n2", "n1"]
    backoff.add("n1", 105.0)
    assert backoff.ready(["n1"], 114.0) == [] and backoff.ready(["n1"], 115.0) == ["n1"]
    backoff.reset("n1")
    backoff.add("n1", 200.0)
    assert backoff.ready(["n1"], 205.0) == ["n1"]


def test_a_host_that_the_back_end_gives_up_is_told_to_end_if_it_lives_on(tmp_path: Path) -> None:
    town = Town(tmp_path, ["a", "b"], Job("j", 2))
    town.begin()
    town.until(running(1))
    town.driver.listener().gone("b", "Slurm has taken its node out of the job")
    assert [type(message) for message in town.hosts["b"].heard[-1:]] == [messages.End]
    town.connect("b")  # it was cut off, and has not heard it
    assert isinstance(town.hosts["b"].heard[-1], messages.End) and town.driver.state.hosts["b"].state == "gone"


# Where the driver listens


def test_on_one_machine_a_driver_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(slurm_submit, "_address_of", lambda node: "127.0.0.1")
    config = job()
    assert slurm_submit.settle(config) is config


def test_on_a_cluster_a_driver_listens_where_nodes_reach_it_with_a_certificate_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(slurm_submit, "_address_of", lambda node: "10.1.2.9")
    monkeypatch.setattr(slurm_submit, "address_towards", lambda target: "10.1.2.3")
    config = slurm_submit.settle(job().model_copy(update={"folder": str(tmp_path / "run")}))
    assert (config.listen, config.http) == ("10.1.2.3:0", "10.1.2.3:0")
    assert config.tls.files is not None and Path(config.tls.key).stat().st_mode & 0o077 == 0
    RunConfig.model_validate(config.model_dump())  # the addresses are allowed, with this certificate
    monkeypatch.delenv("SLURM_JOB_ID")
    assert slurm_submit.settle(job()).listen == "127.0.0.1:0"


def test_a_given_address_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    config = RunConfig(script="x.py", backend="slurm", listen="127.0.0.1:7000")
    assert slurm_submit.settle(config) is config


def test_both_sides_show_the_certificate_and_nobody_else_gets_in(tmp_path: Path) -> None:
    ours = ensure_certificate(tmp_path, ["127.0.0.1"])
    (tmp_path / "other").mkdir()
    others = ensure_certificate(tmp_path / "other", ["127.0.0.1"])

    async def says_hello(client: ssl.SSLContext) -> bytes:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server_context(ours))
        port = server.sockets[0].getsockname()[1]
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
            said = await reader.read()
            writer.close()
            return said
        finally:
            server.close()

    assert asyncio.run(says_hello(client_context(ours))) == b"hello"
    with pytest.raises(ssl.SSLError):
        asyncio.run(says_hello(client_context(others)))


def test_a_certificate_is_kept_while_it_serves(tmp_path: Path) -> None:
    files = ensure_certificate(tmp_path, ["10.0.0.1", "node-1"])
    assert files.certificate is not None
    first = files.certificate.read_bytes()
    ensure_certificate(tmp_path, ["10.0.0.1"])
    assert files.certificate.read_bytes() == first
    ensure_certificate(tmp_path, ["10.0.0.2"])
    assert files.certificate.read_bytes() != first


def test_without_slurm_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no srun here; run this where Slurm's commands are"):
        commands.require_programs("srun")
