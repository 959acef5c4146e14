"""Monitoring data from files, from a server and from a run, as one table; what is missing stays missing."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trustme

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_alignment import Grid, combine, fill_short_gaps, nearest
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_generator import generate
from phalanx.detect.monitoring.metric_names import RawSeries, load_names, rates, table_by_names
from phalanx.detect.monitoring.metric_residuals import read_residuals
from phalanx.detect.monitoring.metric_sources import read_metrics
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.prometheus_source import PrometheusServer, host_of, read_prometheus
from phalanx.detect.monitoring.table_files import read_table, write_table
from phalanx.telemetry.counters import COUNTERS

T0 = 1_790_000_000.0


def small(fault: str | None = "GPU card drop") -> MetricTable:
    return generate(draw_scenario("develop", 2, fault=fault, machines=6, duration_s=120), list(CATALOGUE)).table


def same(one: MetricTable, other: MetricTable) -> None:
    assert (one.metrics, one.machines, one.period_s) == (other.metrics, other.machines, other.period_s)
    assert one.start_s == pytest.approx(other.start_s, abs=1e-3)
    np.testing.assert_array_equal(one.values, other.values)


# Alignment


def test_samples_stand_for_moments_near_them_and_for_no_others() -> None:
    moments = np.arange(10.0)
    found = nearest(np.array([0.2, 1.3, 7.6]), np.array([1.0, 2.0, 3.0]), moments, within_s=1.5)
    np.testing.assert_array_equal(found, [1, 2, 2, np.nan, np.nan, np.nan, np.nan, 3, 3, 3])
    assert np.isnan(nearest(np.array([]), np.array([]), moments, 5)).all()
    np.testing.assert_array_equal(nearest(np.array([3.0]), np.array([9.0]), moments[:5], 1), [np.nan] * 2 + [9] * 3)
    np.testing.assert_array_equal(
        nearest(np.array([1.0, 2.0]), np.array([np.nan, 5.0]), moments[:3], 1), [np.nan, 5, 5]
    )


def test_devices_become_one_machine_and_those_without_value_do_not_count() -> None:
    devices = np.array([[1, np.nan, np.nan], [3, 5, np.nan]], np.float32)
    np.testing.assert_array_equal(combine(devices, "mean"), [2, 5, np.nan])
    np.testing.assert_array_equal(combine(devices, "sum"), [4, 5, np.nan])
    np.testing.assert_array_equal(combine(devices, "max"), [3, 5, np.nan])


def test_short_gaps_are_filled_and_a_metric_that_vanished_stays_away() -> None:
    values = np.full((1, 2, 40), 1.0, np.float32)
    values[0, 0, 10:14] = np.nan
    values[0, 1, 15:] = np.nan
    table = MetricTable(values, ("cpu_usage",), ("a", "b"), T0)
    filled = fill_short_gaps(table, 5)
    assert not np.isnan(filled.values[0, 0]).any()
    assert np.isnan(filled.values[0, 1]).sum() == 20
    assert np.isnan(table.values).sum() == 29


def test_rates_of_counters_know_nothing_where_they_were_reset() -> None:
    times, values = rates(np.array([0.0, 1, 2, 4]), np.array([10.0, 14, 2, 8]))
    np.testing.assert_array_equal(times, [1, 4])
    np.testing.assert_array_equal(values, [4, 3])


def test_names_of_exporters_become_metrics() -> None:
    times = T0 + np.arange(20.0)
    raw = [
        RawSeries("DCGM_FI_DEV_GPU_UTIL", "a", times, np.full(20, 80.0), "0"),
        RawSeries("DCGM_FI_DEV_GPU_UTIL", "a", times, np.full(20, 40.0), "1"),
        RawSeries("DCGM_FI_PROF_NVLINK_TX_BYTES", "a", times, np.full(20, 1e9)),
        RawSeries("DCGM_FI_PROF_NVLINK_RX_BYTES", "a", times, np.full(20, 2e9)),
        RawSeries('node_cpu_seconds_total{mode="idle"}', "a", times, 0.75 * np.arange(20.0), "0"),
        RawSeries("node_memory_MemAvailable_bytes", "a", times, np.full(20, 25.0)),
        RawSeries("node_memory_MemTotal_bytes", "a", times, np.full(20, 100.0)),
        RawSeries("node_ethtool_tx_prio3_pause", "a", times, 7 * np.arange(20.0), "eth0"),
        RawSeries("node_ethtool_tx_prio3_pause", "a", times, 5 * np.arange(20.0), "eth1"),
    ]
    table = table_by_names(raw, load_names(), Grid(T0, 20))
    found = {name: float(table.of(name)[0, 10]) for name in table.metrics}
    assert found == pytest.approx(
        {"cpu_usage": 0.25, "gpu_duty_cycle": 0.6, "gpu_nvlink_bandwidth": 3e9, "memory_usage": 0.75,
         "pfc_tx_packet_rate": 12}, rel=1e-5)  # fmt: skip
    with pytest.raises(UserError, match="no series has a known name"):
        table_by_names([RawSeries("speed", "a", times, times)], load_names(), Grid(T0, 20))


def test_every_metric_has_a_rule_and_rules_of_users_take_their_place(tmp_path: Path) -> None:
    assert load_names().keys() == CATALOGUE.keys()
    own = tmp_path / "names.toml"
    own.write_text('[[cpu_usage]]\nseries = ["my_cpu"]\nscale = 0.01\ncombine = "max"\n')
    names = load_names(own)
    assert names["cpu_usage"][0].promql("host", 'job="x"', 3) == (
        '(max by (host) (last_over_time(my_cpu{job="x"}[3000ms]))) * 0.01'
    )
    assert names["gpu_duty_cycle"] == load_names()["gpu_duty_cycle"]
    assert load_names()["cpu_usage"][0].promql("instance", 'a="b"', 3) == (
        '1 - (avg by (instance) (irate(node_cpu_seconds_total{mode="idle",a="b"}[3000ms])))'
    )
    cpu = "[[cpu_usage]]\n"
    for text in ("[[speed]]\nseries=['a']", f"{cpu}name='a'", f"{cpu}kind='rate'\nseries=['a']", f"{cpu}scale=2",
                 "[cpu_usage]\nseries=['a']", f"{cpu}series=['a']\nscale=true", "[["):  # fmt: skip
        own.write_text(text)
        with pytest.raises(UserError):
            load_names(own)


# Files


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    table = small()
    write_table(table, tmp_path / "t.parquet")
    same(read_table(tmp_path / "t.parquet"), table)
    some = read_table(tmp_path / "t.parquet", machines=["host-0004", "other"], metrics=["gpu_power_draw"])
    assert (some.machines, some.metrics) == (("host-0004", "other"), ("gpu_power_draw",))
    np.testing.assert_array_equal(some.values[0, 0], table.of("gpu_power_draw")[4])
    assert np.isnan(some.values[0, 1]).all()


def rows_of(table: MetricTable, metrics: list[str]) -> Iterator[tuple[float, str, str, float]]:
    for name in metrics:
        for row, machine in enumerate(table.machines):
            for at, value in enumerate(table.of(name)[row]):
                if not np.isnan(value):
                    yield table.start_s + at, machine, name, float(value)


@pytest.mark.parametrize("form", ["long.csv", "long.parquet", "wide.csv", "wide.csv.gz"])
def test_both_forms_in_both_kinds_of_file_say_the_same(form: str, tmp_path: Path) -> None:
    table, path = small(None).only(["cpu_usage", "gpu_power_draw"]), tmp_path / form
    rows = list(rows_of(table, list(table.metrics)))
    rows.reverse()  # any order will do
    columns: dict[str, list[Any]]
    if form.startswith("long"):
        columns = {"timestamp": [round(at * 1000) for at, *_ in rows], "host": [one for _, one, _, _ in rows],
                   "metric": [one for _, _, one, _ in rows], "value": [one for *_, one in rows]}  # fmt: skip
    else:
        write_table(table, tmp_path / "t.parquet")
        found = pq.read_table(tmp_path / "t.parquet")
        order = np.random.default_rng(0).permutation(len(found))
        columns = {name: found[name].take(pa.array(order)).to_pylist() for name in found.column_names}
    if form.endswith("parquet"):
        pq.write_table(pa.table(columns), path)
    else:
        with pa.output_stream(path, compression="gzip" if form.endswith("gz") else None) as out:
            pa.csv.write_csv(pa.table(columns), out)
    read = read_table(path)
    if form.startswith("wide"):
        same(read, table)
    else:  # short gaps take the nearest sample
        filled = fill_short_gaps(table)
        known = ~np.isnan(filled.values)
        np.testing.assert_allclose(read.values[known], filled.values[known], rtol=1e-6)


def test_files_that_are_none_are_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match="has no column of times"):
        read_table(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("time,machine,cpu_usage\nyesterday,a,0.5\n")
    with pytest.raises(UserError, match="neither numbers nor time stamps"):
        read_table(tmp_path / "b.csv")
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        read_table(tmp_path / "c.parquet")
    with pytest.raises(UserError, match="no source"):
        read_metrics(str(tmp_path / "none"))
    write_table(small(), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="no samples of these machines"):
        read_metrics(str(tmp_path / "t.parquet"), machines=["h1"])
    assert read_metrics(str(tmp_path / "t.parquet"), minutes=1).samples == 60


def test_counters_of_a_run_are_a_source_by_one_clock(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    for host, ahead_s in (("a", 0.0), ("b", 30.0)):
        rows = []
        for at in range(60):
            moment_ns = int((T0 + at + ahead_s) * 1e9)
            own = {"cpu_utilisation_ratio": (-1, at / 100), "memory_used_bytes": (-1, 30.0),
                   "memory_available_bytes": (-1, 70.0), "network_receive_bytes_total": (-1, 1000.0 * at),
                   "network_transmit_bytes_total": (-1, 500.0 * at)}  # fmt: skip
            rows += [{"host": host, "step": 0, "end_ns": moment_ns, "gpu": gpu, "name": name, "value": value}
                     for name, (gpu, value) in own.items()]  # fmt: skip
            rows += [{"host": host, "step": 0, "end_ns": moment_ns, "gpu": gpu, "name": "gpu_power_watts",
                      "value": 100.0 * (gpu + 1)} for gpu in (0, 1)]  # fmt: skip
        (folder / "counters" / host).mkdir(parents=True)
        first, last = int(T0 * 1000), int((T0 + 100) * 1000)
        part = folder / "counters" / host / f"a1-s0-s0-t{first}-t{last}-r0-r0-1.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=COUNTERS), part)
    (folder / "spans").mkdir()
    (folder / "clocks").mkdir()
    clock = {"host": "b", "attempt": 1, "at_ns": int(T0 * 1e9), "offset_ns": int(30e9), "error_ns": 1.0}
    (folder / "clocks" / "b.jsonl").write_text(json.dumps(clock | {"reference": "a"}) + "\n")
    table = read_metrics(str(tmp_path))
    assert table.machines == ("a", "b") and table.samples == 60
    np.testing.assert_allclose(table.of("cpu_usage")[1], table.of("cpu_usage")[0], atol=0.011)
    assert table.of("memory_usage")[0, 5] == pytest.approx(0.3)
    assert table.of("tcp_throughput")[1, 5] == pytest.approx(1500)
    assert table.of("gpu_power_draw")[0, 5] == 150


# Noise of real hosts


def test_noise_of_a_file_takes_the_place_of_what_is_made_up(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    level = 0.5 + 0.3 * np.sin(np.arange(600) / 500)
    real = (level * (1 + 0.02 * random.standard_normal((3, 600)))).astype(np.float32)
    idle = np.zeros((1, 600), np.float32)
    values = np.concatenate([real, idle])[None]
    write_table(MetricTable(values, ("cpu_usage",), ("a", "b", "c", "idle"), T0), tmp_path / "real.parquet")
    noise = read_residuals(tmp_path / "real.parquet")
    assert noise["cpu_usage"].shape == (3, 600)
    assert noise["cpu_usage"].std() == pytest.approx(0.02, rel=0.1)
    scenario = draw_scenario("develop", 5, machines=8, duration_s=300)
    made_up, spliced = generate(scenario, ["cpu_usage"]), generate(scenario, ["cpu_usage"], real_noise=noise)

    def jitter(table: MetricTable) -> float:
        return float(np.nanmedian(np.abs(np.diff(table.of("cpu_usage")) / table.of("cpu_usage")[:, 1:])))

    assert jitter(spliced.table) < 0.6 * jitter(made_up.table)
    short = MetricTable(values[..., :100], ("cpu_usage",), ("a", "b", "c", "idle"), T0)
    write_table(short, tmp_path / "short.parquet")
    with pytest.raises(UserError, match="no noise"):
        read_residuals(tmp_path / "short.parquet")


# A server that answers as Prometheus does, or does not


class Fake:
    """Answers of a server by path; `refuse` may return a status and a text instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.refuse: Callable[[dict[str, str]], tuple[int, str] | None] = lambda form: None
        self.hosts = {"h1:9100": 0.5, "h2:9100": 0.25}
        self.shares_up: dict[str, list[str]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = dict(urllib.parse.parse_qsl(text))
                outer.asked.append((self.path, form, dict(self.headers)))
                status, body = outer.refuse(form) or (200, json.dumps(outer.answer(self.path, form)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, form: dict[str, str]) -> dict[str, Any]:
        if path == "/api/v1/query":
            return {"status": "success", "data": {"resultType": "scalar", "result": [T0, str(T0)]}}
        result = []
        if "node_cpu_seconds_total" in form["query"]:
            start, end, step = (float(form[name]) for name in ("start", "end", "step"))
            moments = [start + step * at for at in range(round((end - start) / step) + 1)]
            for host, value in self.hosts.items():
                values = [[at, str(value)] for at in moments if not (host.startswith("h2") and at > T0 - 30)]
                result.append({"metric": {"instance": host}, "values": values})
        elif "up{" in form["query"]:
            for host, shares in self.shares_up.items():
                values = [[float(form["start"]) + at, share] for at, share in enumerate(shares)]
                result.append({"metric": {"instance": host}, "values": values})
        return {"status": "success", "data": {"resultType": "matrix", "result": result}}


@pytest.fixture(name="fake")
def fake_fixture() -> Iterator[Fake]:
    fake = Fake()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_a_server_is_asked_and_what_vanished_is_missing(fake: Fake) -> None:
    table = read_metrics(fake.url, minutes=2)
    assert (table.metrics, table.machines, table.samples) == (("cpu_usage",), ("h1", "h2"), 120)
    assert table.start_s + 119 == pytest.approx(T0 - 1)
    np.testing.assert_array_equal(table.values[0, 0], np.float32(0.5))
    assert np.isnan(table.values[0, 1]).sum() == 29
    wanted = read_prometheus(PrometheusServer(fake.url), minutes=1, metrics=["cpu_usage"], machines=["h2", "h9"])
    assert wanted.machines == ("h2", "h9") and np.isnan(wanted.values[0, 1]).all()


def test_long_ranges_are_asked_for_page_by_page(fake: Fake) -> None:
    table = read_prometheus(PrometheusServer(fake.url), minutes=420, metrics=["cpu_usage"])
    assert table.samples == 25_200 and not np.isnan(table.values[0, 0]).any()
    ranges = [form for path, form, _ in fake.asked if path.endswith("range") and "up{" not in form["query"]]
    assert len(ranges) == 4  # the first is short: it tells how many hosts there are
    assert all((float(one["end"]) - float(one["start"])) / float(one["step"]) < 11_000 for one in ranges)


def test_answers_that_are_too_large_are_halved(fake: Fake) -> None:
    def refuse(form: dict[str, str]) -> tuple[int, str] | None:
        if "start" in form and float(form["end"]) - float(form["start"]) > 100:
            text = "query processing would load too many samples into memory in query execution"
            return 422, json.dumps({"status": "error", "errorType": "execution", "error": text})
        return None

    fake.refuse = refuse
    table = read_prometheus(PrometheusServer(fake.url), minutes=5, metrics=["cpu_usage"])
    assert table.samples == 300 and not np.isnan(table.values[0, 0]).any()


def test_which_exporters_are_up_is_asked_once_of_the_jobs_hosts_and_done_without_where_it_is_not_known(
    fake: Fake,
) -> None:
    assert read_prometheus(PrometheusServer(fake.url), minutes=1, metrics=["cpu_usage"]).scraped is None
    fake.shares_up = {"h1:9100": ["1"] * 60, "h1:9400": ["1"] * 30 + ["0"] * 30, "h2:9100": ["0"] * 60}
    fake.asked.clear()
    server = PrometheusServer(fake.url, selector='cluster="a"')
    table = read_prometheus(server, minutes=1, metrics=["cpu_usage"], machines=["h2", "h1", "h3"])
    assert table.scraped is not None
    np.testing.assert_array_equal(table.scraped[0], np.float32(0))
    np.testing.assert_array_equal(table.scraped[1], np.repeat(np.float32([1, 0.5]), 30))
    assert np.isnan(table.scraped[2]).all()
    (query,) = [form["query"] for _, form, _ in fake.asked if "up{" in form["query"]]
    assert query == ('avg by (instance) (last_over_time(up{cluster="a",instance=~"(h2|h1|h3)(:[0-9]+)?"}[3000ms]))')
    fake.refuse = lambda form: (400, '{"status":"error","error":"no up"}') if "up{" in form["query"] else None
    assert read_prometheus(PrometheusServer(fake.url), minutes=1, metrics=["cpu_usage"]).scraped is None


@contextmanager
def endless_server(head: bytes, part: bytes, gap_s: float) -> Iterator[str]:
    """It begins an answer and sends a part after each gap, for as long as anybody listens."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with suppress(OSError):
                self.wfile.write(head)
                while not over.wait(gap_s):
                    self.wfile.write(part)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\nX-Dripping: ", b"x"),
    ],
)
def test_a_server_that_drips_is_left_after_one_limit_for_all(head: bytes, part: bytes) -> None:
    with endless_server(head, part, 0.02) as url, pytest.raises(UserError, match=r"does not answer in 0.5 s"):
        read_prometheus(PrometheusServer(url, timeout_s=0.5), minutes=1)


def test_an_answer_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.detect.monitoring.prometheus_source._MOST_BYTES", 1 << 20)
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with endless_server(head, part, 0.0) as url, pytest.raises(UserError, match="more than 1 MiB in one answer"):
        read_prometheus(PrometheusServer(url), minutes=1)


def test_secrets_go_into_headers(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    read_prometheus(PrometheusServer(fake.url, token_file=tmp_path / "token"), minutes=1, metrics=["cpu_usage"])
    assert {headers.get("Authorization") for *_, headers in fake.asked} == {"Bearer s3cret"}
    with pytest.raises(UserError, match="cannot be read"):
        read_prometheus(PrometheusServer(fake.url, token_file=tmp_path / "none"))


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (401, "no", "does not let us in; give a token"),
        (404, "page not found", "answers with status 404; give the address below which"),
        (200, "<html>", "not as Prometheus does"),
        (400, '{"status":"error","error":"bad parser"}', "bad parser; look at selector"),
        (503, "busy", "answers with status 503"),
        (200, '{"status":"success","data":{"result":[{"metric":{"instance":5}}]}}', "does not tell its time"),
        (200, '{"data":{"result":' + "[" * 100_000, "does not tell its time"),
    ],
)
def test_what_servers_say_otherwise_is_told_with_the_cure(fake: Fake, status: int, text: str, told: str) -> None:
    fake.refuse = lambda form: (status, text)
    with pytest.raises(UserError, match=told):
        read_prometheus(PrometheusServer(fake.url), minutes=1, metrics=["cpu_usage"])


def test_addresses_hosts_and_metrics_that_are_not_there(fake: Fake) -> None:
    with pytest.raises(UserError, match="give hosts as the label instance names them, such as h1, h2"):
        read_prometheus(PrometheusServer(fake.url), minutes=1, machines=["x"])
    with pytest.raises(UserError, match="has none of the metrics"):
        read_prometheus(PrometheusServer(fake.url), minutes=1, metrics=["gpu_power_draw"])
    with pytest.raises(UserError, match="cannot be reached"):
        read_prometheus(PrometheusServer("http://127.0.0.1:1"), minutes=1)
    for wrong in ({"url": "prometheus:9090"}, {"url": fake.url, "host_label": "a b"}):
        with pytest.raises(UserError):
            PrometheusServer(**wrong)
    assert [host_of(one) for one in ("h:1", "h", "[::1]:9", "a.b.c:80", "fe80::1")] == [
        "h", "h", "::1", "a.b.c", "fe80::1"
    ]  # fmt: skip


def test_a_server_with_a_certificate_of_its_own_needs_its_authority(fake: Fake, tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    fake.server.socket = context.wrap_socket(fake.server.socket, server_side=True)
    url = fake.url.replace("http:", "https:")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with pytest.raises(UserError, match="a certificate that nobody here trusts; give the file of the authority"):
        read_prometheus(PrometheusServer(url), minutes=1, metrics=["cpu_usage"])
    table = read_prometheus(PrometheusServer(url, ca_file=tmp_path / "ca.pem"), minutes=1, metrics=["cpu_usage"])
    assert table.machines == ("h1", "h2")
    with pytest.raises(UserError, match="name a file of certificates"):
        read_prometheus(PrometheusServer(url, ca_file=tmp_path / "none.pem"), minutes=1)
