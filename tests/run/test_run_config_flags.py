"""torchrun's flags: all of the installed torchrun are known, and mean here what they can."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.run.config import load_job
from phalanx.run.flags import Flags, read_flags

OURS = {"--hosts": True, "--spares": True, "--detach": False, "-d": False}


def read(line: str, **environ: str) -> Flags:
    return read_flags(line.split(), environ, OURS)


@pytest.fixture(scope="module")
def torchrun() -> argparse.ArgumentParser:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PET_")]:
            patch.delenv(name)
        from torch.distributed.run import get_args_parser

        return get_args_parser()


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("train.py", {"run.script": "train.py", "run.arguments": []}),
        ("--nnodes 4 t.py", {"run.hosts": 4}),
        ("--nnodes=1:4 t.py", {"run.hosts": 4, "run.allowed_hosts": [1, 2, 3], "run.policy.when_missing": "shrink"}),
        ("--nnodes 2:2 t.py", {"run.hosts": 2}),
        ("--nproc-per-node 8 t.py", {"run.workers_per_host": 8}),
        ("--nproc_per_node=gpu t.py", {"run.workers_per_host": "gpu"}),
        ("--nproc-per-node auto t.py", {"run.workers_per_host": "auto"}),
        ("--nproc_per_node cpu t.py", {"run.workers_per_host": "cpu"}),
        ("--nproc 2 t.py", {"run.workers_per_host": 2}),
        ("--standalone t.py", {"run.backend": "local", "run.hosts": 1}),
        ("--max-restarts 3 t.py", {"run.policy.max_restarts": 3}),
        ("--log_dir /logs t.py", {"run.logs.folder": "/logs"}),
        ("--shutdown-timeout 9 t.py", {"run.policy.grace_s": 9}),
        ("--rdzv-id llama/8b t.py", {"run.name": "llama-8b"}),
        ("--rdzv-id none t.py", {}),
        ("-m pkg.train --lr 1", {"run.module": True, "run.script": "pkg.train", "run.arguments": ["--lr", "1"]}),
        ("--module pkg.train", {"run.module": True, "run.script": "pkg.train"}),
        ("-- -m pkg train", {"run.module": True, "run.script": "pkg", "run.arguments": ["train"]}),
        ("t.py --nnodes 3 -- -x", {"run.script": "t.py", "run.arguments": ["--nnodes", "3", "--", "-x"]}),
        ("--nnodes 2 -- t.py -- x", {"run.hosts": 2, "run.script": "t.py", "run.arguments": ["--", "x"]}),
    ],
)
def test_flags_that_are_settings(line: str, changes: dict[str, Any]) -> None:
    found = read(line)
    script = {"run.script": "t.py", "run.arguments": []}
    assert found.changes == {**(script if "run.script" not in changes else {"run.arguments": []}), **changes}
    load_job(None, [], found.changes)


IDLE = [
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=host:29400",
    "--rdzv-conf=timeout=900",
    "--monitor-interval=5",
    "--start-method=fork",
    "--event-log-handler=null",
    "--role=trainer",
    "--run-path",
    "--redirects=3",
    "-r3",
    "--tee=3",
    "-t=3",
    "--local-ranks-filter=0,1",
    "--duplicate-stdout-filters=a,b",
    "--duplicate-stderr-filters=a",
    "--node-rank=0",
    "--master-addr=host",
    "--master-port=29500",
    "--local-addr=10.0.0.1",
    "--logs-specs=default",
    "--numa-binding=node",
    "--signals-to-handle=SIGTERM",
]


@pytest.mark.parametrize("flag", IDLE)
def test_flags_that_have_no_meaning_are_said(flag: str) -> None:
    found = read(f"{flag} t.py")
    assert found.changes == {"run.script": "t.py", "run.arguments": []}
    [note] = found.notes
    assert "has no meaning here: " in note or "node-rank" in note


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--nnodes 0 t.py", "--nnodes = '0': is no number of hosts; write 4, or 2:4"),
        ("--nnodes 4:2 t.py", "--nnodes"),
        ("--nnodes two t.py", "--nnodes"),
        ("--nnodes", "--nnodes: needs a value"),
        ("--nnodes --standalone t.py", "--nnodes: needs a value"),
        ("--nproc-per-node 0 t.py", "write a number from 1, auto, gpu or cpu"),
        ("--nproc-per-node tpu t.py", "--nproc-per-node = 'tpu'"),
        ("--max-restarts -1 t.py", "--max-restarts = -1: is below 0"),
        ("--max-restarts many t.py", "--max-restarts = 'many': is no number"),
        ("--start-method thread t.py", "is none of spawn, fork, forkserver"),
        ("--standalone --nnodes 2 t.py", "--standalone is for one host; remove --standalone"),
        ("--standalone=1 t.py", "--standalone = '1': takes no value"),
        ("--node-rank 1 t.py", "give the command once, for all hosts"),
        ("--no-python ./train.sh", "give the Python script itself"),
        ("-m --no-python pkg", "contradict each other"),
        ("--virtual-local-rank t.py", "let the script choose its device by LOCAL_RANK"),
        ("--nnode-s 3 t.py", "--nnode-s: there is no such option"),
        ("--rdzv 3 t.py", "is not clear; one of --rdzv-backend, --rdzv-endpoint, --rdzv-id, --rdzv-conf"),
        ("-x t.py", "-x: there is no such option"),
    ],
)
def test_flags_that_contradict_are_errors_with_their_cure(line: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read(line)


def test_our_own_options_are_left_as_they_are() -> None:
    found = read("--hosts 4 -d --nproc-per-node 2 --spares=1 t.py --hosts 9")
    assert found.ours == ["--hosts", "4", "-d", "--spares", "1"]
    assert found.changes["run.arguments"] == ["--hosts", "9"]


def test_there_may_be_no_script_when_a_file_names_it() -> None:
    assert read("--nnodes 3").changes == {"run.hosts": 3}
    assert read("").changes == read("--").changes == {}


def test_variables_are_defaults_as_for_torchrun() -> None:
    environ = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "0", "PET_RDZV_BACKEND": "c10d"}
    found = read("--nnodes 2 t.py", **environ)
    assert (found.changes["run.hosts"], found.changes["run.workers_per_host"]) == (2, 2)
    assert any(note.startswith("--rdzv-backend") for note in found.notes)
    assert read("pkg", PET_MODULE="1").changes["run.module"] is True
    for name, value in (("PET_NODE_RANK", "first"), ("PET_STANDALONE", "yes"), ("PET_START_METHOD", "thread")):
        with pytest.raises(UserError, match=f"{name} = '{value}'.*correct {name}"):
            read("t.py", **{name: value})


def test_every_flag_of_the_installed_torchrun_is_known(torchrun: argparse.ArgumentParser) -> None:
    actions = [action for action in torchrun._actions if action.option_strings and action.dest != "help"]
    assert len(actions) > 20
    for action in actions:
        value = next(iter(action.choices)) if action.choices else "3"
        for option in action.option_strings:
            words = [option] if action.nargs == 0 else [option, value]
            try:
                found = read_flags([*words, "t.py", "x"], {})
            except UserError as error:
                assert action.dest in ("no_python", "virtual_local_rank", "node_rank"), error
            else:
                assert (found.changes["run.script"], found.changes["run.arguments"]) == ("t.py", ["x"])
                assert found.notes or len(found.changes) > 2, f"{option} is neither a setting nor noted"


VALUES = {
    "--nnodes": ["1", "4", "1:4"],
    "--nproc-per-node": ["2", "auto", "cpu"],
    "--nproc_per_node": ["3"],
    "--rdzv-backend": ["c10d", "static"],
    "--rdzv_endpoint": ["host:29400"],
    "--rdzv-id": ["a", "7"],
    "--rdzv-conf": ["timeout=1,b=2"],
    "--max-restarts": ["0", "3"],
    "--max_restarts": ["1"],
    "--master-port": ["29500"],
    "--node-rank": ["0"],
    "--role": ["trainer"],
    "--tee": ["3", "0:1,1:2"],
    "-t": ["1"],
    "-r": ["2"],
    "--log-dir": ["/x"],
    "-m": [],
    "--run-path": [],
    "--module": [],
}
OPTION = st.sampled_from(sorted(VALUES)).flatmap(
    lambda name: (
        st.just([name])
        if not VALUES[name]
        else st.sampled_from(VALUES[name]).flatmap(
            lambda value: st.sampled_from([[name, value], *([[f"{name}={value}"]] if name.startswith("--") else [])])
        )
    )
)
WORDS = st.lists(st.text("ab-=. ", min_size=1, max_size=6).filter(lambda word: word != "--"), max_size=4)


@given(st.lists(OPTION, max_size=5), WORDS)
def test_what_torchrun_accepts_is_read_as_torchrun_reads_it(
    torchrun: argparse.ArgumentParser, options: list[list[str]], words: list[str]
) -> None:
    line = [*(word for option in options for word in option), "train.py", *words]
    try:
        theirs = torchrun.parse_args(line)
    except SystemExit:  # argparse takes a script's "--=" for an unclear option
        reject()
    ours = read_flags(line, {})
    assert ours.changes["run.script"] == theirs.training_script
    assert ours.changes["run.arguments"] == theirs.training_script_args
    assert ours.changes.get("run.module", False) == theirs.module
    assert str(ours.changes.get("run.workers_per_host", 1)) == theirs.nproc_per_node
    assert ours.changes.get("run.hosts", 1) == int(theirs.nnodes.split(":")[-1])
    assert ours.changes.get("run.policy.max_restarts", 0) == theirs.max_restarts


@given(st.lists(st.text(max_size=8) | st.sampled_from(["--nnodes", "--", "-m", "=", "--tee=", "-", "-r"])))
def test_wild_command_lines_are_read_or_refused(words: list[str]) -> None:
    try:
        found = read_flags(words, {}, OURS)
    except UserError:
        return
    assert isinstance(found.changes.get("run.arguments", []), list)
