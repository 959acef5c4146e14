"""The manifest: what is written is read again, and what is wrong says where, what and how to mend it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.faults.campaign import agenda_of
from phalanx.faults.case_manifest import (
    Cluster,
    Expected,
    Incident,
    Lasts,
    Manifest,
    Place,
    Response,
    When,
    load,
    parse,
    save,
)
from phalanx.faults.fault_schedule import KINDS, SAFETY_ORDER, Agenda, read_agenda, write_agenda

VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**53), 2**53),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
}


@st.composite
def whens(draw: st.DrawFn, steps: int) -> When:
    phase = draw(st.sampled_from(["start", "step", "checkpoint", "recovery"]))
    step = draw(st.integers(1, steps)) if phase in ("step", "checkpoint") else 0
    attempt = draw(st.integers(2 if phase == "recovery" else 1, 5))
    return When(step=step, phase=phase, attempt=attempt, delay_s=draw(st.floats(0, 3600)))


@st.composite
def incidents(draw: st.DrawFn, cluster: Cluster, steps: int) -> Incident:
    machines = cluster.hosts + cluster.spares
    numbers = {
        "ranks": range(cluster.ranks),
        "hosts": range(cluster.hosts),
        "spares": range(cluster.hosts, machines),
        "links": range(machines),
        "driver": range(0),
    }
    name = draw(st.sampled_from([name for name in KINDS if cluster.spares or name != "spare-bad"]))
    kind = KINDS[name]
    what = draw(st.sampled_from(sorted(kind.places)))
    chosen = draw(st.sets(st.sampled_from(numbers[what]), min_size=1, max_size=8)) if numbers[what] else set()
    unit = draw(st.sampled_from(["calls", "steps", "seconds", "forever"]))
    amount = draw(st.integers(1, 10**6) if unit in ("calls", "steps") else st.floats(1e-3, 1e6))
    given_settings = draw(st.sets(st.sampled_from(sorted(kind.settings)))) if kind.settings else set()
    return Incident(
        kind=name,
        place=Place(what=what, numbers=tuple(sorted(chosen))),
        when=draw(whens(steps)),
        lasts=Lasts(unit=unit, amount=amount),
        retrigger=draw(st.sampled_from(["once", "attempt", "host"])),
        safety=draw(st.sampled_from(SAFETY_ORDER[SAFETY_ORDER.index(kind.safety) :])),
        settings={setting: draw(VALUES[kind.settings[setting]]) for setting in sorted(given_settings)},
    )


@st.composite
def expectations(draw: st.DrawFn, cluster: Cluster) -> Expected:
    machines = st.sets(st.integers(0, cluster.hosts + cluster.spares - 1), min_size=1)
    names = draw(st.lists(st.sampled_from(["restart", "evict", "stop", "shrink", "wait"]), max_size=4))
    return Expected(
        responses=tuple(
            Response(action=name, hosts=tuple(sorted(draw(machines))) if name == "evict" else ()) for name in names
        ),
        blame_ranks=tuple(sorted(draw(st.sets(st.integers(0, cluster.ranks - 1))))),
        blame_hosts=tuple(sorted(draw(machines))),
        goes_on=draw(st.booleans()),
        same_layout=draw(st.booleans()),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    cluster = Cluster(
        hosts=draw(st.integers(1, 6)),
        workers_per_host=draw(st.integers(1, 4)),
        spares=draw(st.integers(0, 3)),
        may_shrink=draw(st.booleans()),
    )
    steps = draw(st.integers(1, 1000))
    return Manifest(
        id=draw(st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)),
        seed=draw(st.integers(0, 2**63 - 1)),
        cluster=cluster,
        steps=steps,
        incidents=tuple(draw(st.lists(incidents(cluster, steps), max_size=4))),
        expected=draw(expectations(cluster)),
    )


@settings(max_examples=150, deadline=None)
@given(manifests())
def test_what_is_written_is_read_again(manifest: Manifest) -> None:
    text = manifest.model_dump_json()
    assert parse(text) == manifest
    assert parse(text).digest() == manifest.digest()


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_workers_are_told_their_part_and_no_more(manifest: Manifest) -> None:
    agenda = agenda_of(manifest)
    assert msgspec.json.decode(msgspec.json.encode(agenda), type=Agenda) == agenda
    own = [number for number, one in enumerate(manifest.incidents) if one.place.what == "ranks"]
    assert [order.number for order in agenda.orders] == own
    for order in agenda.orders:
        incident = manifest.incidents[order.number]
        assert (order.kind, tuple(order.ranks), order.settings) == (
            incident.kind,
            incident.place.numbers,
            incident.settings,
        )
    assert b"expected" not in msgspec.json.encode(agenda)


def tree(**changes: Any) -> dict[str, Any]:
    one = {"kind": "exit", "place": {"what": "ranks", "numbers": [3]}, "when": {"step": 5}}
    return {"id": "001-exit", "seed": 1, "incidents": [one | changes.pop("incident", {})]} | changes


WRONG: list[tuple[dict[str, Any], str]] = [
    (tree(version=2), "version = 2"),
    (tree(id="No Name"), "id = 'No Name'"),
    (tree(seed=-1), "seed = -1"),
    (tree(steps=4), r"incidents\.0\.when\.step = 5 is never reached.*at most 4"),
    (tree(incident={"kind": "explode"}), r"kind = 'explode'.*write one of exception"),
    (tree(incident={"kind": "host-killed"}), r"place\.what = 'ranks'.*write hosts"),
    (tree(incident={"place": {"what": "ranks", "numbers": [8]}}), r"numbers = 8 does not exist.*0 to 7"),
    (tree(incident={"place": {"what": "ranks", "numbers": [3, 3]}}), r"numbers = \[3, 3\].*each once"),
    (tree(incident={"place": {"what": "ranks", "numbers": []}}), r"numbers = \[\].*give numbers"),
    (
        tree(incident={"kind": "spare-bad", "place": {"what": "spares", "numbers": [0]}}),
        r"numbers = 0 does not exist.*4 to 4",
    ),
    (tree(incident={"when": {"phase": "start", "step": 3}}), r"step = 3.*leave the step out"),
    (tree(incident={"when": {}}), r"phase = 'step' needs a step.*give step"),
    (tree(incident={"when": {"phase": "recovery"}}), r"attempt = 1 is no recovery.*from 2"),
    (tree(incident={"when": {"step": 5, "delay_s": -1}}), r"when\.delay_s = -1"),
    (tree(incident={"lasts": {"unit": "steps", "amount": 1.5}}), r"amount = 1\.5.*whole number"),
    (tree(incident={"lasts": {"unit": "hours"}}), r"lasts\.unit = 'hours'"),
    (tree(incident={"safety": "safe_in_process"}), r"safety = 'safe_in_process'.*at least isolated_destructive"),
    (tree(incident={"settings": {"speed": 1}}), r"settings\.speed = 1.*status"),
    (tree(incident={"settings": {"status": "one"}}), r"settings\.status = 'one'.*give int"),
    (tree(incident={"kind": "slow", "settings": {"factor": "two"}}), r"settings\.factor = 'two'.*give one"),
    (tree(incident={"reason": "none"}), r"incidents\.0\.reason: there is no such setting"),
    (tree(expected={"responses": [{"action": "evict"}]}), r"hosts = \[\].*name machines"),
    (tree(expected={"responses": [{"action": "stop", "hosts": [1]}]}), r"hosts = \[1\].*only there"),
    (tree(expected={"blame_ranks": [9]}), r"expected\.blame_ranks = 9 does not exist.*0 to 7"),
    (tree(expected={"blame_hosts": [5]}), r"hosts of expected = 5 does not exist.*0 to 4"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_what_is_wrong_is_named_with_its_cure(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(json.dumps(wrong))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "no JSON object"), ("3", "int"), (b"\xff", "JSON")]
)
def test_what_is_no_manifest(text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    manifest = parse(json.dumps(tree()))
    save(manifest, tmp_path / "one.json")
    assert load(tmp_path / "one.json") == manifest
    with pytest.raises(UserError, match=r"none\.json.*check the path"):
        load(tmp_path / "none.json")


def test_an_agenda_is_written_and_read(tmp_path: Path) -> None:
    agenda = agenda_of(parse(json.dumps(tree())), "calls")
    path = tmp_path.parent.parent / "notes.json" if "fault" in str(tmp_path) else tmp_path / "notes.json"
    try:
        write_agenda(agenda, path)
        assert read_agenda(path) == agenda
    finally:
        path.unlink(missing_ok=True)


def test_no_part_of_it_loads_torch() -> None:
    modules = "inject, host_faults, referee, campaign, tcp_proxy, worker_faults"
    program = f"import sys; from phalanx.faults import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_workers_load_neither_pydantic_nor_rich() -> None:
    program = (
        "import sys; import phalanx.faults.inject; sys.exit(str([m for m in ('pydantic', 'rich') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"
