"""Monitoring data of a Prometheus server (or of what speaks its HTTP API: Thanos, Mimir, VictoriaMetrics) as a table.

    server = PrometheusServer("https://prometheus.example:9090", host_label="Hostname", token_file=Path("token"))
    table = read_prometheus(server, minutes=15)

The server puts devices together and takes rates, so that one series per host and metric is sent. Long ranges are asked
for page by page: a server returns at most 11,000 points of a series. A host that is silent has no values for as long:
the server's look-back of five minutes would hide that a metric vanished, so every query names its own window.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.detect.monitoring.metric_alignment import Grid
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, known_metric
from phalanx.detect.monitoring.metric_names import NameRule, Names, load_names
from phalanx.detect.monitoring.metric_table import MetricTable

_MOST_POINTS = 10_000
"""Of a series in one answer: servers allow 11,000."""
_MOST_VALUES = 1_000_000
"""Of all series in one answer, for memory's sake; as long as the number of hosts is not known, answers are short."""
_FIRST_POINTS = 60
_AT_ONCE = 4
_TRIES = 3
_CONNECT_S = 10.0
_MOST_BYTES = 256 << 20
"""Of one answer: what is asked for in one piece is a fifth of it."""
_MOST_NAMED = 500
"""Hosts that one query names."""
_SECRET_BYTES = 65_536


@dataclass(frozen=True)
class PrometheusServer:
    """Where and how to ask.

    Attributes:
        url: such as ``http://prometheus:9090``, with its prefix if it has one.
        host_label: the label that names hosts; ports are cut off its values, so that exporters of a host are one.
        selector: further matchers of every query: ``cluster="a", job=~"dcgm|node"``.
        scrape_s: how often exporters are scraped.
        token_file: a bearer token; None: none.
        user: of basic authentication; empty: none.
        password_file: its password.
        ca_file: certificates that sign the server's; None: the system's.
        timeout_s: of one request, with all its tries, until its answer is whole.
    """

    url: str
    host_label: str = "instance"
    selector: str = ""
    scrape_s: float = 1.0
    token_file: Path | None = None
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise UserError("is no address of a server", cure="give http://HOST:PORT", field="url", value=self.url)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.host_label):
            cure = "give a name such as instance"
            raise UserError("is no label", cure=cure, field="host_label", value=self.host_label)

    @property
    def window_s(self) -> float:
        """How far back a sample counts: two scrapes and some delay, as rates need two samples."""
        return max(3.0, 3.0 * self.scrape_s)


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


class _Scalar(msgspec.Struct):
    result: tuple[float, str]


class _Now(msgspec.Struct):
    data: _Scalar


class PrometheusClient:
    """A connection to one server; its methods may be called by several threads."""

    def __init__(self, server: PrometheusServer) -> None:
        self.server = server
        headers, auth = {}, None
        if server.token_file:
            headers["Authorization"] = f"Bearer {_secret(server.token_file)}"
        if server.user:
            auth = (server.user, _secret(server.password_file) if server.password_file else "")
        self._client = httpx.Client(
            base_url=server.url.rstrip("/"),
            headers=headers,
            auth=auth,
            verify=_context(server.ca_file) if server.ca_file else True,
            follow_redirects=True,
        )

    def __enter__(self) -> PrometheusClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def now_s(self) -> float:
        """The server's clock."""
        body = self._ask("/api/v1/query", {"query": "time()"})
        try:
            return msgspec.json.decode(body or b"", type=_Now).data.result[0]
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._odd(f"does not tell its time ({error})") from None

    def range_of(self, query: str, grid: Grid, machines: int = 0) -> dict[str, NDArray[np.float32]]:
        """A query at each moment of a grid: [samples] of each host; NaN where it has no value.

        Args:
            machines: how many hosts are expected, so that no answer is too large; 0: not known.
        """
        found: dict[str, NDArray[np.float32]] = {}
        for host, values in self._series_of(query, grid, machines):
            whole = found.setdefault(host, np.full(grid.samples, np.nan, np.float32))
            # Exporters of a host complete each other.
            np.copyto(whole, values, where=~np.isnan(values))
        return found

    def _series_of(self, query: str, grid: Grid, machines: int = 0) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Host and values of each series [samples]; page by page, so that of one series there may be several."""
        hosts: set[str] = set()
        at_sample = 0
        while at_sample < grid.samples:
            count = max(machines, len(hosts))
            points = min(_MOST_POINTS, max(_FIRST_POINTS, _MOST_VALUES // count)) if count else _FIRST_POINTS
            page = grid.part(at_sample, points)
            at_sample += page.samples
            for series in self._page(query, page):
                host = host_of(series.metric.get(self.server.host_label, ""))
                hosts.add(host)
                yield host, self._on_grid(series, grid)

    def _on_grid(self, series: _Series, grid: Grid) -> NDArray[np.float32]:
        """[samples]; what is no number, or of a moment that was not asked for, is left out."""
        count = len(series.values)
        times_s = np.fromiter((at for at, _ in series.values), np.float64, count)
        try:
            values = np.fromiter((float(value) for _, value in series.values), np.float64, count)
        except ValueError as error:
            raise self._odd(f"answers what is no result of a range ({error})") from None
        at = np.rint((times_s - grid.start_s) / grid.period_s)
        inside = np.isfinite(values) & (at >= 0) & (at < grid.samples)
        whole = np.full(grid.samples, np.nan, np.float32)
        whole[at[inside].astype(np.int64)] = values[inside]
        return whole

    def shares_up(self, hosts: Sequence[str], grid: Grid) -> dict[str, NDArray[np.float32]]:
        """Share of the exporters of each host whose scrapes succeed, at each moment of a grid [samples]."""
        label, window = self.server.host_label, f"{max(1, round(self.server.window_s * 1000))}ms"
        matchers = [self.server.selector] if self.server.selector else []
        if len(hosts) <= _MOST_NAMED and all(re.fullmatch(r"[\w.-]+", host_of(host)) for host in hosts):
            names = "|".join(host_of(host).replace(".", "[.]") for host in hosts)
            matchers.append(f'{label}=~"({names})(:[0-9]+)?"')  # a server knows of many that are none of the job's
        query = f"avg by ({label}) (last_over_time(up{{{','.join(matchers)}}}[{window}]))"
        total: dict[str, NDArray[np.float32]] = {}
        count: dict[str, NDArray[np.float32]] = {}
        for host, values in self._series_of(query, grid, len(hosts)):
            known = ~np.isnan(values)
            total[host] = total.get(host, np.float32(0)) + np.where(known, values, np.float32(0))
            count[host] = count.get(host, np.float32(0)) + known.astype(np.float32)
        return {host: np.where(count[host] > 0, total[host] / np.maximum(count[host], 1), np.nan) for host in total}

    def _page(self, query: str, page: Grid) -> list[_Series]:
        """Halved where the server finds it too large."""
        end_s = page.start_s + (page.samples - 1) * page.period_s
        body = self._ask(
            "/api/v1/query_range",
            {"query": query, "start": repr(page.start_s), "end": repr(end_s), "step": repr(page.period_s)},
            may_be_too_large=page.samples > 1,
        )
        if body is None:
            half = page.samples // 2
            return [*self._page(query, page.part(0, half)), *self._page(query, page.part(half, page.samples))]
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._odd(f"answers what is no result of a range ({error})") from None
        return answer.data.result if answer.data else []

    def _ask(self, path: str, form: dict[str, str], *, may_be_too_large: bool = False) -> bytes | None:
        """The body; None: the server says that the answer would be too large.

        Raises:
            UserError: everything else that goes wrong, with the cure.
        """
        until_s = time.monotonic() + self.server.timeout_s
        for left in reversed(range(_TRIES)):
            try:
                got = self._post(path, form, until_s)
            except httpx.TimeoutException:
                if left and time.monotonic() < until_s:
                    continue
                problem = f"does not answer in {self.server.timeout_s:g} s"
                raise self._odd(problem, "ask for less, or wait longer") from None
            except httpx.HTTPError as error:
                if left and isinstance(error, httpx.RemoteProtocolError):
                    continue
                raise self._failed(error) from None
            if got.status_code in (502, 503, 504) and left:
                continue
            break
        if got.status_code == 422 and "too many" in got.text and may_be_too_large:
            return None
        if got.status_code != 200:
            raise self._refused(got, form.get("query", ""))
        if not got.content.lstrip().startswith(b"{"):
            raise self._odd("answers, but not as Prometheus does", "give the address below which /api/v1 is")
        return got.content

    def _post(self, path: str, form: dict[str, str], until_s: float) -> httpx.Response:
        """One try. In a thread of its own, since httpx bounds each read and not their sum: a server may drip.

        Raises:
            UserError: the answer is too large.
            httpx.HTTPError: as of httpx; a timeout where it is not whole in time.
        """
        answered: Future[httpx.Response] = Future()

        def ask() -> None:
            try:
                left_s = max(0.1, until_s - time.monotonic())
                limits = httpx.Timeout(left_s, connect=min(_CONNECT_S, left_s))
                with self._client.stream("POST", path, data=form, timeout=limits) as got:
                    body = self._body(got, until_s)
                    headers = [(name, value) for name, value in got.headers.items() if name == "content-type"]
                    answered.set_result(httpx.Response(got.status_code, content=body, headers=headers))
            except BaseException as error:  # whatever it is, who waits shall have it
                answered.set_exception(error)

        threading.Thread(target=ask, name="prometheus", daemon=True).start()
        try:
            return answered.result(max(0.1, until_s - time.monotonic()))
        except TimeoutError:
            raise httpx.ReadTimeout("the answer is not whole in time") from None

    def _body(self, got: httpx.Response, until_s: float) -> bytes:
        parts, size = [], 0
        for part in got.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > _MOST_BYTES:
                problem = f"sends more than {_MOST_BYTES >> 20} MiB in one answer"
                raise self._odd(problem, "look at the address, or ask for fewer hosts by the selector")
            if time.monotonic() > until_s:
                raise httpx.ReadTimeout("the answer is not whole in time")
        return b"".join(parts)

    def _failed(self, error: httpx.HTTPError) -> UserError:
        words = str(error) or type(error).__name__
        if "CERTIFICATE" in words.upper():
            cure = "give the file of the authority that signed its certificate (ca_file)"
            return self._odd("has a certificate that nobody here trusts", cure)
        return self._odd(f"cannot be reached ({words})", "look at the address, and whether this host may connect to it")

    def _refused(self, got: httpx.Response, query: str) -> UserError:
        if got.status_code in (401, 403):
            return self._odd("does not let us in", "give a token (token_file), or user and password_file")
        try:
            told = msgspec.json.decode(got.content, type=_Answer).error
        except (msgspec.DecodeError, RecursionError):
            told = ""
        if not told:
            cure = "give the address below which /api/v1 is"
            return self._odd(f"answers with status {got.status_code}", cure)
        return self._odd(f"refuses {query!r}: {told}", "look at selector and at the file of names")

    def _odd(self, problem: str, cure: str = "look at the server's own log") -> UserError:
        return UserError(problem, cure=cure, value=self.server.url)


def read_prometheus(
    server: PrometheusServer,
    *,
    minutes: float = 15,
    end_s: float | None = None,
    period_s: float = 1.0,
    metrics: Sequence[str] | None = None,
    machines: Sequence[str] | None = None,
    names: Names | None = None,
) -> MetricTable:
    """The newest samples of a job's hosts.

    Args:
        minutes: how far back.
        end_s: last moment, since 1970; None: now, by the server's clock, less one scrape.
        period_s: between samples.
        metrics: of the catalogue; None: all that the server has.
        machines: the job's hosts, in the order wanted; None: all that have the metrics, sorted.
        names: rules; None: those of the package.

    Raises:
        UserError: the server cannot be asked, or has nothing of all that.
    """
    if minutes * 60 < period_s:
        raise UserError("is too short a time", cure="give more minutes", field="minutes", value=minutes)
    wanted = [known_metric(name).name for name in (metrics or CATALOGUE)]
    rules = names or load_names()
    with PrometheusClient(server) as client:
        last_s = client.now_s() - server.scrape_s if end_s is None else end_s
        samples = max(1, round(minutes * 60 / period_s))
        grid = Grid(round(last_s, 3) - (samples - 1) * period_s, samples, period_s)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            expected = len(machines or ())
            answers = pool.map(lambda name: _first(client, rules.get(name, ()), grid, expected), wanted)
            found = {name: answer for name, answer in zip(wanted, answers, strict=True) if answer}
        hosts = tuple(machines) if machines else tuple(sorted({host for one in found.values() for host in one}))
        known = {host_of(host) for host in hosts}
        if not any(known & one.keys() for one in found.values()):
            raise _nothing(server, found)
        scraped = _scraped(client, hosts, grid)
    values = np.full((len(found), len(hosts), grid.samples), np.nan, np.float32)
    for row, one in enumerate(found.values()):
        for place, host in enumerate(hosts):
            if (of_host := one.get(host_of(host))) is not None:
                values[row, place] = of_host
    return MetricTable(values, tuple(found), hosts, grid.start_s, grid.period_s, scraped)


def _scraped(client: PrometheusClient, hosts: Sequence[str], grid: Grid) -> NDArray[np.float32] | None:
    """Share of each host's exporters that could be scraped [hosts, samples]; None: the server does not say it.

    It is no metric of the machine, and what cannot be had of it is done without.
    """
    try:
        shares = client.shares_up(hosts, grid)
    except UserError:
        return None
    if not any(host_of(host) in shares for host in hosts):
        return None
    unknown = np.full(grid.samples, np.nan, np.float32)
    return np.stack([shares.get(host_of(host), unknown) for host in hosts])


def host_of(label: str) -> str:
    """A host without its port: ``h3:9100``, ``[::1]:9100``."""
    bracketed = re.fullmatch(r"\[(.+)\](:\d+)?", label)
    if bracketed:
        return bracketed[1]
    return label.rsplit(":", 1)[0] if re.fullmatch(r"[^:]+:\d+", label) else label


def _first(
    client: PrometheusClient, rules: Sequence[NameRule], grid: Grid, machines: int
) -> dict[str, NDArray[np.float32]]:
    """Of the first alternative that has data; empty: none has."""
    server = client.server
    for rule in rules:
        query = rule.promql(server.host_label, server.selector, server.window_s)
        if found := client.range_of(query, grid, machines):
            return found
    return {}


def _nothing(server: PrometheusServer, found: dict[str, dict[str, NDArray[np.float32]]]) -> UserError:
    if not found:
        cure = "look at host_label, selector and the time; series of other names need a file of names (--names)"
        return UserError("has none of the metrics", cure=cure, value=server.url)
    some = ", ".join(sorted(next(iter(found.values())))[:5])
    cure = f"give hosts as the label {server.host_label} names them, such as {some}"
    return UserError("has none of these hosts", cure=cure, value=server.url)


def _context(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        cure = "name a file of certificates (PEM)"
        raise UserError(f"cannot be used ({error})", cure=cure, field="ca_file", value=str(ca_file)) from None


def _secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_SECRET_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        cure = "name a file that holds the secret"
        raise UserError(f"cannot be read ({error})", cure=cure, value=str(path)) from None
