"""Hosts of a job followed by their metrics: whose series are whose, a server that is away, verdicts as they come."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
from msgspec.structs import replace

from phalanx.core.errors import UserError
from phalanx.detect.detection import LACKING_METRICS, Culprit, Detection, JudgeVerdict, Onset
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.prometheus_source import PrometheusServer
from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.config import PrometheusConfig, RunConfig
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Host, initial
from phalanx.run.driver.hosts import HostWatch
from phalanx.run.driver.hosts_at_work import HostsAtWork, beside_work
from phalanx.run.driver.machine_watch import check_source, source_of, watch_machines
from phalanx.run.driver.run_judges import RunJudges

GUARD_S = 280.0
HOSTS = ("a", "b", "c", "d")
CALLED = {"a": "gpu-1", "b": "gpu-2", "c": "gpu-3", "d": "gpu-4"}
START_S = 1_790_000_000.0
POLICY = {"settle_s": 16, "vanished_s": 40}


def config(**more: Any) -> PrometheusConfig:
    return PrometheusConfig.model_validate({"url": "http://127.0.0.1:9", "policy": POLICY, "hosts": CALLED} | more)


def power(row: int, at_s: float) -> float:
    """Watts of a machine, much the same for all."""
    return 300 + 20 * math.sin(at_s / 3) + row + 2 * math.sin(7.1 * row + at_s)


class FakeServer:
    """Its clock is the judge's; one machine is silent from some moment on, and the server may be away."""

    def __init__(self, silent: str = "gpu-3", since_s: float = 120.0, away_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self.now_s, self.silent, self.since_s, self.away_s = START_S, silent, since_s, away_s
        self.asked: list[tuple[str, ...]] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self, server: PrometheusServer, *, minutes: float, machines: Sequence[str]) -> MetricTable:
        self.asked.append(tuple(machines))
        if self.away_s[0] <= self.now_s - START_S < self.away_s[1]:
            raise UserError("cannot be reached", cure="look at the address", value=server.url)
        times = self.now_s - np.arange(round(minutes * 60))[::-1]
        values = np.full((1, len(machines), len(times)), np.nan, np.float32)
        for row, name in enumerate(machines):
            known = times < START_S + self.since_s if name == self.silent else times > 0
            if name in CALLED.values():
                values[0, row, known] = [power(row, at) for at in times[known]]
        return MetricTable(values, ("gpu_power_draw",), tuple(machines), float(times[0]))


def told(server: FakeServer, for_s: float = 300.0, **more: Any) -> list[JudgeVerdict]:
    """All that is said in this time."""

    class OverError(Exception):
        pass

    def sleep(seconds: float) -> None:
        server.sleep(seconds)
        if server.now_s > START_S + for_s:
            raise OverError

    source = source_of(config(**more), dict.fromkeys(HOSTS, ""))
    found = []
    with pytest.raises(OverError):
        for verdict in watch_machines(source, START_S, server.read, sleep, lambda: server.now_s):
            found.append(verdict)  # what came before the end is wanted
    return found


def test_a_machine_that_falls_silent_is_told_once_by_the_name_of_its_host() -> None:
    server = FakeServer()
    (verdict,) = told(server)
    (found,) = verdict.detections
    assert found.sentence.startswith("c no longer delivers gpu_power_draw")
    assert [one.hosts for one in found.who] == [("c",)] and found.advice in ("check", "evict")
    assert found.since.unix_s == pytest.approx(START_S + 120, abs=2)
    assert set(server.asked) == {tuple(CALLED.values())}
    assert told(FakeServer(silent="")) == []


def test_a_server_that_is_away_is_said_once_and_what_was_missed_is_judged_after_it() -> None:
    at_first = told(FakeServer(away_s=(0, 60)))
    assert [one.abstains for one in at_first if one.abstains] == [
        ("'http://127.0.0.1:9': cannot be reached; look at the address",)
    ]
    assert at_first[-1].detections[0].who[0].hosts == ("c",)
    meanwhile = told(FakeServer(away_s=(100, 200)))
    assert len([one for one in meanwhile if one.abstains]) == 1
    assert [one.detections[0].who[0].hosts for one in meanwhile if one.detections] == [("c",)]


def test_hosts_are_known_by_their_names_or_by_addresses_that_only_they_have() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.2", "d": ""}
    assert source_of(config(hosts={"d": "gpu-4"}), addresses).names == {
        "a": ("a", "10.0.0.1"),
        "b": ("b",),
        "c": ("c",),
        "d": ("gpu-4",),
    }
    server = FakeServer()
    found = told(server, hosts={host: name for host, name in CALLED.items() if host != "d"})
    assert "the server has nothing of d; say in run.judges.prometheus.hosts" in found[0].abstains[0]
    assert server.asked[-1] == ("gpu-1", "gpu-2", "gpu-3", "d")


def test_too_few_hosts_are_said_and_the_server_is_not_asked() -> None:
    server = FakeServer()
    source = source_of(config(), dict.fromkeys(HOSTS[:3], ""))
    (verdict,) = watch_machines(source, START_S, server.read, server.sleep, lambda: server.now_s)
    assert "3 hosts are not compared, 4 or more are" in verdict.abstains[0] and server.asked == []


def test_bad_settings_are_refused_before_the_job_begins(tmp_path: Path) -> None:
    check_source(config())
    with pytest.raises(UserError, match=r"run\.judges\.prometheus\.policy\.settle_s"):
        check_source(config(policy={"settle_s": 1}))
    with pytest.raises(UserError, match=r"run\.judges\.prometheus\.policy.*seetle"):
        check_source(config(policy={"seetle_s": 60}))
    with pytest.raises(UserError, match="cannot be read"):
        check_source(config(token_file=str(tmp_path / "none")))
    with pytest.raises(UserError, match="password_file") as refused:
        check_source(config(url="http://user:hunter22@h:9090"))
    assert "hunter22" not in str(refused.value)
    for url in ("ftp://h", "prometheus:9090", "http://h/?token=secret"):
        with pytest.raises(ValueError, match="url"):
            config(url=url)


@contextmanager
def http_server(silent: str, since_unix_s: float, token: str) -> Iterator[str]:
    """What speaks Prometheus's API over HTTP, for who has the token."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if self.headers["Authorization"] != f"Bearer {token}":
                self.send_error(401)
                return
            data: dict[str, Any] = {"result": [time.time(), str(time.time())]}
            if self.path.endswith("query_range"):
                data = {"result": self.series(form) if "DCGM_FI_DEV_POWER_USAGE" in form["query"][0] else []}
            body = json.dumps({"status": "success", "data": data}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def series(self, form: dict[str, list[str]]) -> list[dict[str, Any]]:
            first_s, end_s, step_s = (float(form[name][0]) for name in ("start", "end", "step"))
            times = [first_s + at * step_s for at in range(round((end_s - first_s) / step_s) + 1)]
            return [
                {
                    "metric": {"instance": f"{name}:9400"},
                    "values": [(at, str(power(row, at))) for at in times if name != silent or at < since_unix_s],
                }
                for row, name in enumerate(CALLED.values())
            ]

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("is_known", [True, False])
def test_the_driver_has_them_followed_in_a_process_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    (tmp_path / "token").write_text("sesame" if is_known else "guessed")
    began_s = time.time() - 400
    kept: list[tuple[str, Detection]] = []
    hosts = {name: Host("", "active", place=place) for place, name in enumerate(HOSTS)}
    job = Job("j", hosts=4, workers_per_host=1)
    state = replace(
        initial(Policy(), job), phase="running", attempt=1, placement=HOSTS, hosts=hosts, phase_since_s=began_s
    )
    driver = SimpleNamespace(
        state=state,
        attempt=None,
        hosts=SimpleNamespace(hosts={}),
        keep=lambda judge, found, incident: kept.append((judge, found)),
    )

    async def story(url: str) -> None:
        server = {"url": url, "hosts": CALLED, "policy": POLICY, "token_file": str(tmp_path / "token"), "every_s": 0.2}
        settings = RunConfig.model_validate(
            {"script": "train.py", "folder": str(tmp_path / "job"), "judges": {"prometheus": server}}
        )
        judges = RunJudges(settings, driver, tmp_path, tmp_path)  # type: ignore[arg-type]
        watching = asyncio.create_task(judges._watch_machines())
        async with asyncio.timeout(GUARD_S):
            while not (kept or caplog.records):
                await asyncio.sleep(0.05)
        watching.cancel()
        await asyncio.wait([watching])

    with caplog.at_level(logging.WARNING), http_server("gpu-2", began_s + 200, "sesame") as url:
        asyncio.run(story(url))
    if is_known:
        ((judge, found),) = kept
        assert judge == "machines" and [one.hosts for one in found.who] == [("b",)] and not caplog.records
    else:
        assert kept == [] and "does not let us in" in caplog.text and "guessed" not in caplog.text


def vanished(*hosts: str, confidence: float = 0.97) -> Detection:
    """As the judge says it where it knows a host only by metrics that vanished."""
    return Detection(
        "faulty machine",
        f"{hosts[0]} no longer delivers cpu_usage and gpu_power_draw, perhaps a machine unreachable (78%)",
        tuple(Culprit("host", host, hosts=(host,)) for host in hosts),
        Onset(START_S),
        confidence,
        ("for 240 s it has not delivered cpu_usage and gpu_power_draw, which others do", "faults that look like it: x"),
        ("run `phalanx check`",),
        "evict",
        {LACKING_METRICS: 2, "fault": "machine unreachable", "fault_share": 0.78},
    )


def hosts_heard(step_age_s: float, ago_s: float = 0.4, took_s: float = 0.2) -> HostWatch:
    """Two hosts, one beat from each `ago_s` before 1000 s of the monotonic clock."""
    watch = HostWatch(1.0)
    for place, name in enumerate(("a", "b")):
        hello = messages.Hello(messages.VERSION, name, "10.0.0.1", 8, 1 << 30, [], "", "boot", 1, 1, [place])
        watch.on_hello(hello, Now(900.0, START_S + 200))
        worker = messages.WorkerState(place, 1, "running", 500, step_age_s, took_s, steps_here=500)
        beat = messages.heartbeat(1, 0.0, 1, [worker], messages.HostState(0.1, 1 << 30, 1 << 29, 1 << 30), [])
        watch.on_heartbeat(name, beat, Now(1000.0 - ago_s, START_S + 300 - ago_s))
    return watch


NOW = Now(1000.0, START_S + 300)


def doing(watch: HostWatch, work: HostsAtWork | None = None, *, is_paused: bool = False) -> dict[str, str]:
    return (work or HostsAtWork()).of_hosts(watch, ["b"], NOW, 0.2, START_S, is_paused=is_paused)


def test_a_host_that_is_heard_and_makes_steps_is_only_worth_a_look_at_its_exporter() -> None:
    found = beside_work(vanished("b"), doing(hosts_heard(0.1)))
    assert found.advice == "watch" and found.confidence <= 0.5 and found.blamed_hosts == ()
    assert found.sentence == (
        "b no longer delivers cpu_usage and gpu_power_draw; b is heard and makes steps: look at its exporter"
    )
    assert "faults that" not in " ".join(found.why) and "fault" not in found.figures
    answering = "its exporters answer (up = 1): what they no longer have is gone on the machine, such as a card"
    up = dataclasses.replace(vanished("b"), why=(*vanished("b").why, answering))
    assert beside_work(up, doing(hosts_heard(0.1))).why == found.why
    of_a_metric = dataclasses.replace(vanished("b"), figures={"metric": "gpu_power_draw"})
    assert beside_work(of_a_metric, doing(hosts_heard(0.1))) == of_a_metric


def test_a_host_that_is_silent_stands_still_or_has_slowed_down_stays_to_blame() -> None:
    assert doing(hosts_heard(60.0)) == {}
    assert doing(hosts_heard(0.1, ago_s=70.0)) == {}
    silent = hosts_heard(0.1, ago_s=6.0)
    silent.tick(NOW)
    assert doing(silent) == {} and doing(silent, is_paused=True) == {}
    assert doing(HostWatch(1.0)) == {}
    slowed, as_before = HostsAtWork(), HostsAtWork()
    for at in range(-100, 300):
        slowed.look(hosts_heard(0.1, took_s=0.2 if at < 0 else 0.3), ("a", "b"), START_S + at)
        as_before.look(hosts_heard(0.1), ("a", "b"), START_S + at)
    assert doing(hosts_heard(0.1), slowed) == {}
    assert doing(hosts_heard(0.1), as_before) == {"b": "is heard and makes steps"}
    assert beside_work(vanished("b"), {}) == vanished("b")


def test_a_host_whose_job_pauses_is_there_and_of_several_the_silent_ones_stay() -> None:
    assert doing(hosts_heard(60.0), is_paused=True) == {"b": "is heard while the job pauses"}
    found = beside_work(vanished("b", "c"), {"b": "is heard and makes steps"})
    assert found.blamed_hosts == ("c",) and found.advice == "evict"
    assert found.why[0] == "b is heard and makes steps: look at its exporter"
