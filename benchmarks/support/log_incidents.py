# ruff: noqa: E501  (lines of logs are long)
"""Logs of failed and of healthy training jobs, made of real messages (`log_messages.toml`), with the truth beside them.

Every job has several hosts and ranks, lines of one of several frameworks, clocks that differ, harmless lines with scary
words, and, where it fails, victims that notice the end of others, in one of several layouts of files.
"""

from __future__ import annotations

import os
import random
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Set = Literal[
    "written", "held", "fresh", "tuned", "untouched", "blind", "last", "third", "fourth", "fifth", "sixth", "outside"
]

_START = 1_764_000_000.0
_PROGRAM = ("framework", "script")

SCARY = (
    "INFO error_rate=0 errors=0 failed_requests=0",
    "WARNING Failed to load optional module 'apex'; using the native implementation",
    "UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly",
    "INFO NCCL timeout is 1800 s (Timeout(ms)=1800000)",
    "WARNING could not find the metadata file latest.txt, will not load any checkpoints and will start from random",
    "INFO number of nan iterations: 0 number of skipped iterations: 0",
    "[W socket.cpp:663] [c10d] The client socket cannot be initialized to connect to [node]:7010 (errno: 97 - Address family not supported by protocol).",
    "WARNING: urllib3.connectionpool Retrying (Retry(total=4, connect=None)) after connection broken by 'ConnectionResetError(104, 'Connection reset by peer')'",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "DEBUG: fsspec.local open file: /mnt/data/errors/failed_samples.json",
    "INFO 0 CUDA errors, 0 ECC errors, link failures: none",
    "INFO:torch.distributed.elastic.agent.server.api:[default] Worker group successfully finished previous round: failed=0",
    "WARNING:root:Traceback capture is disabled; exceptions are printed by the launcher",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated. Aborting support in 2.9",
    "INFO saving checkpoint, old ones are killed by the retention policy",
    "WARNING: Connection to metrics server refused, retrying in 5 s (attempt 1/10)",
    "libibverbs: Warning: couldn't load driver 'libvmw_pvrdma-rdmav34.so': cannot open shared object file, ignored",
)
KERNEL_CALM = (
    "perf: interrupt took too long (2509 > 2500), lowering kernel.perf_event_max_sample_rate to 79500",
    "mlx5_core 0000:41:00.0 enp65s0f0np0: Link up",
    "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Opts: (null). Quota mode: none.",
    "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
    "pcieport 0000:00:02.0: AER: Corrected error received: 0000:01:00.0",
    "EDAC MC0: Giving out device to module skx_edac controller Skylake Socket#0 IMC#0",
    "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
)


@dataclass(frozen=True)
class Truth:
    """What was put in: the class; the hosts that may be named (empty: none must be); whether it fails at all."""

    kind: str
    host: str
    rank: int | None
    family: str


@dataclass
class Job:
    """A job that is being written: lines by rank (or kernel, scheduler), each with its time."""

    rng: random.Random
    hosts: list[str]
    per_host: int
    framework: str
    lines: dict[tuple[str, int], list[tuple[float, str]]] = field(default_factory=dict)
    skew_s: dict[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        return range(len(self.hosts) * self.per_host)

    def host_of(self, rank: int) -> str:
        return self.hosts[rank // self.per_host]

    def address(self, host: str) -> str:
        return f"10.0.{7}.{10 + self.hosts.index(host)}"

    def say(self, rank: int, at_s: float, text: str) -> None:
        self.lines.setdefault(("rank", rank), []).append((at_s, text.replace("{rank}", str(rank))))

    def kernel(self, host: str, at_s: float, text: str) -> None:
        self.lines.setdefault(("kernel", self.hosts.index(host)), []).append((at_s, text))

    def scheduler(self, at_s: float, text: str) -> None:
        self.lines.setdefault(("scheduler", 0), []).append((at_s, text))


def load_messages() -> dict[str, Any]:
    """Messages, victims' lines and lines of jobs that went on, of all sets."""
    found: dict[str, Any] = {"message": [], "victim": [], "calm": []}
    for name in (
        "log_messages.toml", "log_messages_gathered.toml", "log_messages_later.toml", "log_messages_unseen.toml",
        "log_messages_sixth.toml",
    ):  # fmt: skip
        of_file = tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
        found = {kind: found[kind] + of_file.get(kind, []) for kind in found}
    return found


def new_job(rng: random.Random, steps: int, calm: tuple[str, ...] = ()) -> tuple[Job, float]:
    """A healthy job and the time of its last step; `calm` are more harmless lines, for jobs of up to 64 ranks."""
    scary = SCARY + tuple(one for one in calm if not one.startswith("kernel: "))
    kernel_calm = KERNEL_CALM + tuple(one.removeprefix("kernel: ") for one in calm if one.startswith("kernel: "))
    hosts = [f"gpu{number:02d}" for number in rng.sample(range(1, 60), rng.randint(2, 8 if calm else 6))]
    job = Job(rng, hosts, rng.choice((2, 4, 8)), rng.choice(("megatron", "titan", "huggingface", "deepspeed")))
    for host in hosts:
        job.skew_s[host] = rng.gauss(0, 0.8)
    if rng.random() < 0.3:
        job.skew_s[rng.choice(hosts)] += rng.choice((-30.0, 30.0, 8.0))
    step_s = rng.uniform(1.5, 12)
    all_log = rng.random() < 0.6
    for rank in job.ranks:
        host = job.host_of(rank)
        job.say(
            rank,
            _START,
            f"{host}:{4000 + rank}:{4000 + rank} [{rank % job.per_host}] NCCL INFO Bootstrap : Using eth0:{job.address(host)}<0>",
        )
        job.say(
            rank,
            _START + 1,
            f"{host}:{4000 + rank}:{4100 + rank} [{rank % job.per_host}] NCCL INFO comm 0x55 rank {rank} nranks {len(job.ranks)} cudaDev {rank % job.per_host} - Init COMPLETE",
        )
        for _ in range(rng.randint(0, 4)):
            job.say(rank, _START + rng.uniform(2, 10), rng.choice(scary))
    for host in hosts:
        for _ in range(rng.randint(1, 5)):
            job.kernel(host, _START + rng.uniform(0, steps * step_s), rng.choice(kernel_calm))
    at_s = _START + 20
    for step in range(1, steps + 1):
        at_s += step_s * rng.uniform(0.95, 1.1)
        for rank in job.ranks if all_log else (0,):
            job.say(rank, at_s + rng.uniform(0, 0.2), _step_line(job, step, rank))
        if rng.random() < 0.05:
            job.say(rng.choice(job.ranks), at_s, rng.choice(scary))
    return job, at_s


def write_healthy(seed: int, folder: Path, calm: tuple[str, ...] = ()) -> None:
    """A job that ends well, or is still running, with scary words anywhere."""
    rng = random.Random(seed)
    job, at_s = new_job(rng, rng.randint(20, 120), calm)
    scary = SCARY + tuple(one for one in calm if not one.startswith("kernel: "))
    for _ in range(rng.randint(3, 12)):
        job.say(rng.choice(job.ranks), rng.uniform(_START + 20, at_s + 1), rng.choice(scary))
    if rng.random() < 0.5:
        for rank in job.ranks:
            job.say(
                rank,
                at_s + 5,
                rng.choice(
                    ("Training completed.", "INFO training is done", "`Trainer.fit` stopped: `max_steps=100` reached.")
                ),
            )
    _write(job, folder, rng.choice(("per_rank", "per_host", "torchrun", "pdsh")))


def write_incident(
    seed: int,
    kind: str,
    message: dict[str, Any],
    victims: list[dict[str, Any]],
    folder: Path,
    family: str,
    calm: tuple[str, ...] = (),
) -> Truth:
    """A job that fails by `message`."""
    rng = random.Random(seed)
    job, at_s = new_job(rng, rng.randint(12, 100), calm)
    culprit = rng.choice(job.ranks)
    host = job.host_of(culprit)
    at_s += rng.uniform(0.2, 3)
    values = _values(job, rng, culprit)
    if message.get("victims"):
        _only_victims(job, rng, kind, message, culprit, at_s, values)
        truth = Truth(kind, host, culprit, family)
    elif family in _PROGRAM and kind not in ("dataloader killed", "out of memory") and rng.random() < 0.6:
        for rank in job.ranks:
            _tell(job, rng, message, rank, at_s + rng.uniform(0, 0.6), values | {"rank": rank})
        truth = Truth(kind, "", None, family)
    elif kind in ("connection error", "storage error") and rng.random() < 0.4:
        for rank in job.ranks:
            _tell(job, rng, message, rank, at_s + rng.uniform(0, 1.5), values | {"rank": rank})
        truth = Truth(kind, "", None, family)
    elif (
        kind == "network error" and "{addr}" in " ".join(message["lines"]) and rng.random() < 0.5 and len(job.hosts) > 2
    ):
        for other in (one for one in job.hosts if one != host):  # several complain of the same peer
            rank = job.hosts.index(other) * job.per_host + rng.randrange(job.per_host)
            _tell(job, rng, message, rank, at_s + rng.uniform(0, 1), values | {"addr": job.address(host), "rank": rank})
        truth = Truth(kind, host, None, family)
    else:
        silent = bool(message.get("silent"))
        _tell(job, rng, message, culprit, at_s, values, only_beside=silent)
        late = (
            rng.choice((0.0, 0.0, 600.0))
            if kind in ("NVLink error", "ECC error", "CUDA error", "node failure")
            else 0.0
        )
        _victims(job, rng, victims, culprit, at_s + late, values, whole_host=silent)
        truth = Truth(kind, host, culprit, family)
    _summaries(job, rng, culprit, at_s + 8, truth)
    _write(job, folder, rng.choice(("per_rank", "per_host", "torchrun", "pdsh")))
    return truth


def write_ended(seed: int, message: dict[str, Any], victims: list[dict[str, Any]], folder: Path) -> None:
    """A healthy job that `message` says was ended from outside; ranks say what they say when they are told to end."""
    rng = random.Random(seed)
    job, at_s = new_job(rng, rng.randint(12, 100))
    at_s += rng.uniform(0.2, 3)
    values = _values(job, rng, 0)
    for raw in message["lines"]:
        text = _filled(raw, values)
        if text.startswith("scheduler: "):
            job.scheduler(at_s + rng.uniform(0, 0.5), text.removeprefix("scheduler: "))
            continue
        for rank in job.ranks:
            job.say(rank, at_s + rng.uniform(0, 0.5), text)
    for rank in rng.sample(job.ranks, rng.randint(0, len(job.ranks) // 2)):
        peer = rng.choice(job.hosts)
        own = values | {"rank": rank, "peer": job.address(peer), "peerhost": peer}
        for raw in rng.choice(victims)["lines"]:
            job.say(rank, at_s + rng.uniform(0.6, 4), _filled(raw, own))
    _write(job, folder, rng.choice(("per_rank", "per_host", "torchrun", "pdsh")))


def _values(job: Job, rng: random.Random, culprit: int) -> dict[str, Any]:
    host = job.host_of(culprit)
    others = [one for one in job.hosts if one != host]
    return {
        "pid": rng.randint(1000, 90_000), "port": rng.randint(30_000, 60_000), "rank": culprit, "host": host,
        "pci": f"0000:{rng.randrange(16, 255):02x}:00", "addr": job.address(rng.choice(others)), "n": rng.randint(100, 90_000),
        "file": rng.choice(("/data/train.bin", "/mnt/ckpt/iter_0001200", "/home/u/run/config.json")),
        "peer": job.address(host), "peerhost": host,
    }  # fmt: skip


def _tell(
    job: Job,
    rng: random.Random,
    message: dict[str, Any],
    rank: int,
    at_s: float,
    values: dict[str, Any],
    *,
    only_beside: bool = False,
) -> None:
    """The lines of a message, with a traceback before an exception of Python."""
    host = job.host_of(rank)
    for number, raw in enumerate(message["lines"]):
        text = _filled(raw, values | {"own": job.address(host)})
        if text.startswith("kernel: "):
            job.kernel(host, at_s - rng.uniform(0, 1.5), text.removeprefix("kernel: "))
            continue
        if text.startswith("scheduler: "):
            job.scheduler(at_s + rng.uniform(5, 60), text.removeprefix("scheduler: "))
            continue
        if only_beside:
            continue
        if number == 0 or "Error" in text[:60]:
            job.say(rank, at_s, "Traceback (most recent call last):")
            job.say(rank, at_s, '  File "/workspace/train.py", line 212, in main')
            job.say(rank, at_s, "    loss = step(batch)")
        job.say(rank, at_s + 0.001 * number, text)


def _victims(
    job: Job,
    rng: random.Random,
    victims: list[dict[str, Any]],
    culprit: int,
    at_s: float,
    values: dict[str, Any],
    *,
    whole_host: bool,
) -> None:
    message = rng.choice(victims)
    host = job.host_of(culprit)
    for rank in job.ranks:
        if rank == culprit or (whole_host and job.host_of(rank) == host) or rng.random() < 0.05:
            continue
        peer = host if rng.random() < 0.6 else rng.choice(job.hosts)
        own = values | {"rank": rank, "peer": job.address(peer), "peerhost": peer}
        later = message.get("delay_s", 0) + rng.uniform(0.3, 4)
        for raw in message["lines"]:
            job.say(rank, at_s + later, _filled(raw, own))


def _only_victims(
    job: Job, rng: random.Random, kind: str, message: dict[str, Any], culprit: int, at_s: float, values: dict[str, Any]
) -> None:
    """The culprit says nothing, or stands behind."""
    host = job.host_of(culprit)
    wait_s = 600 if kind == "NCCL timeout" else 0
    whole = rng.random() < 0.4
    behind = kind == "NCCL timeout" and "{n}" in message["lines"][0] and rng.random() < 0.3
    for rank in job.ranks:
        peer = host if rng.random() < 0.7 else rng.choice([one for one in job.hosts if one != job.host_of(rank)])
        own = values | {"rank": rank, "peer": job.address(peer), "peerhost": peer}
        if rank == culprit or (whole and job.host_of(rank) == host):
            if not behind or rank != culprit:
                continue
            own["n"] -= 1
        for raw in message["lines"]:
            job.say(rank, at_s + wait_s + rng.uniform(0, 2), _filled(raw, own))


def _summaries(job: Job, rng: random.Random, culprit: int, at_s: float, truth: Truth) -> None:
    """What torchrun's agents write at the end, on most hosts."""
    if rng.random() < 0.4:
        return
    for host in job.hosts:
        first = job.hosts.index(host) * job.per_host
        own = host == job.host_of(culprit)
        rank = culprit if own else first
        code = rng.choice((1, -9)) if own and truth.family in _PROGRAM else -6
        for text in (
            f"W1125 10:00:00.123000 4242 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {5000 + rank} closing signal SIGTERM",
            f"E1125 10:00:00.223000 4242 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {rank % job.per_host} (pid: {4000 + rank}) of binary: /usr/bin/python3",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "Root Cause (first observed failure):",
            "[0]:",
            f"  host      : {host}.cluster",
            f"  rank      : {rank} (local_rank: {rank % job.per_host})",
            f"  exitcode  : {code} (pid: {4000 + rank})",
        ):  # fmt: skip
            job.say(first, at_s + rng.uniform(0, 0.01), text)


def _filled(raw: str, values: dict[str, Any]) -> str:
    text = raw
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def _step_line(job: Job, step: int, rank: int) -> str:
    loss = 2 + 8 / (step + 1)
    match job.framework:
        case "megatron":
            return f" iteration {step:8d}/  500000 | consumed samples: {step * 1024} | elapsed time per iteration (ms): 1234.5 | learning rate: 1.5E-04 | lm loss: {loss:.6E} | grad norm: 0.812 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        case "titan":
            return (
                f"root - INFO - step: {step:2d}  loss: {loss:7.4f}  memory: 41.20GiB(52.01%)  tps: 2,345  mfu: 40.12%"
            )
        case "deepspeed":
            return f"[INFO] [logging.py:96:log_dist] [Rank {rank}] step={step}, skipped=0, lr=[1e-04], mom=[(0.9, 0.95)] loss: {loss:.4f}"
        case _:
            return f"  3%|▎         | {step}/4000 [10:00<2:03:04,  1.32s/it]{{'loss': {loss:.4f}, 'grad_norm': 0.5, 'learning_rate': 0.0001, 'epoch': 0.12}}"


def _stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]


def _write(job: Job, folder: Path, layout: str) -> None:
    texts: dict[Path, list[tuple[float, str]]] = {}
    for (what, number), lines in job.lines.items():
        if what == "scheduler":
            texts.setdefault(folder / "scheduler.log", []).extend((at, f"{_stamp(at)} {text}") for at, text in lines)
            continue
        host = job.hosts[number] if what == "kernel" else job.host_of(number)
        at = [(time_s + job.skew_s[host], text) for time_s, text in lines]
        if what == "kernel":
            path = folder / f"{host}.kern.log"
            kernel = [
                (s, f"{datetime.fromtimestamp(s, UTC).strftime('%b %d %H:%M:%S')} {host} kernel: [ 123.456] {text}")
                for s, text in at
            ]
            texts.setdefault(path, []).extend(kernel)
        elif layout == "per_rank":
            texts.setdefault(folder / f"{host}_rank{number}.log", []).extend(
                (s, f"{_stamp(s)} {text}") for s, text in at
            )
        elif layout == "per_host":
            texts.setdefault(folder / f"{host}.log", []).extend(
                (s, f"[rank{number}]: {_stamp(s)} {text}") for s, text in at
            )
        elif layout == "torchrun":
            path = folder / host / "run_1_abc" / "attempt_0" / str(number % job.per_host) / "stderr.log"
            texts.setdefault(path, []).extend((s, f"[{_stamp(s)}] [rank{number}]: {text}") for s, text in at)
        else:
            texts.setdefault(folder / "job.out", []).extend(
                (s, f"{host}: {_stamp(s)} [rank{number}]: {text}") for s, text in at
            )
    for path, lines_of_file in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines_of_file.sort(key=lambda one: one[0])
        path.write_text("".join(f"{text}\n" for _, text in lines_of_file), encoding="utf-8")
        os.utime(path, (lines_of_file[-1][0],) * 2)  # syslog has no year
