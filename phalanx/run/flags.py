"""torchrun's flags, so that a command line that was made for it works with `phalanx run`.

Each flag either changes a setting of ``[run]``, or is accepted and has no meaning here, which is noted, or contradicts
how `phalanx run` works, which is an error with its cure. Variables ``PET_<FLAG>`` are defaults, as for torchrun.

A job that is `phalanx train` gets its folder from the words of its command line: the job is looked for by its folder
whenever its driver is started again, so that must not depend on anything that may be edited meanwhile, such as the
config file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from phalanx.core.config import parse_override
from phalanx.core.errors import UserError

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True)
class Flags:
    """A command line that was read."""

    changes: dict[str, Any] = field(default_factory=dict)  # settings by dotted key, for `phalanx.run.config.load_job`
    # A line for each flag that is accepted and has no meaning here, or another one.
    notes: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)  # options of `phalanx run` itself, in order, as they were written


@dataclass(frozen=True)
class _Flag:
    """A flag of torchrun; `note`: why it has no meaning here."""

    name: str
    short: str = ""
    is_switch: bool = False
    note: str = ""
    choices: tuple[str, ...] = ()
    kind: Callable[[str], Any] = str

    @property
    def destination(self) -> str:
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        return [f"--{self.name}", f"--{self.destination}", *([f"-{self.short}"] if self.short else [])]


_STORE = "each attempt has a rendezvous store of its own, beside rank 0"
_START = "see --start fresh and --start warm"

_TORCHRUN = (
    _Flag("nnodes"),
    _Flag("nproc-per-node"),
    _Flag("rdzv-backend", note=_STORE),
    _Flag("rdzv-endpoint", note=_STORE),
    _Flag("rdzv-id"),
    _Flag("rdzv-conf", note=_STORE),
    _Flag("standalone", is_switch=True),
    _Flag("max-restarts", kind=int),
    _Flag("monitor-interval", kind=float, note="an end of a rank is noticed at once"),
    _Flag("start-method", choices=("spawn", "fork", "forkserver"), note=_START),
    _Flag("event-log-handler", note="events are in the journal"),
    _Flag("role", note="there is one role"),
    _Flag("module", "m", is_switch=True),
    _Flag("no-python", is_switch=True),
    _Flag("run-path", is_switch=True, note="a script is run with runpy in any case"),
    _Flag("log-dir"),
    _Flag("redirects", "r", note="stdout and stderr of every rank go to its log file, together"),
    _Flag("tee", "t", note="see `phalanx run logs -f` for what ranks write"),
    _Flag("local-ranks-filter", note="see `phalanx run logs -f RANK` for one rank"),
    _Flag("duplicate-stdout-filters", note="see `phalanx run logs` for what ranks write"),
    _Flag("duplicate-stderr-filters", note="see `phalanx run logs` for what ranks write"),
    _Flag("node-rank", kind=int),
    _Flag("master-addr", note=_STORE),
    _Flag("master-port", kind=int, note=_STORE),
    _Flag("local-addr", note="an executor says by itself where it is reached"),
    _Flag("logs-specs", note="logs are those of phalanx run"),
    _Flag("numa-binding", choices=("node", "socket", "exclusive", "core-complex"), note="ranks are not bound to cores"),
    _Flag("signals-to-handle", note="SIGINT, SIGTERM and SIGHUP stop the job"),
    _Flag("shutdown-timeout", kind=int),
    _Flag("virtual-local-rank", is_switch=True),
)


def read_flags(arguments: Sequence[str], environ: Mapping[str, str], ours: Mapping[str, bool] | None = None) -> Flags:
    """Read a command line: options, the script, and the script's arguments, with or without ``--`` before it.

    Args:
        environ: where ``PET_NNODES`` and its like are looked up.
        ours: options of `phalanx run` itself, such as ``--hosts`` or ``-d``, and whether each takes a value.

    Raises:
        UserError: a flag is unknown, lacks its value, has a wrong one, or contradicts others or `phalanx run`.
    """
    options: list[str] = []
    given, script = _split(list(arguments), ours or {}, options)
    values = {flag: given[flag.name] if flag.name in given else _from_environment(flag, environ) for flag in _TORCHRUN}
    changes, notes = _translated({flag.destination: value for flag, value in values.items()})
    idle = (flag for flag, value in values.items() if flag.note and value)
    notes += [f"--{flag.name} has no meaning here: {flag.note}" for flag in idle]
    if script:
        changes |= {"run.script": script[0], "run.arguments": script[1:]}
    return Flags(changes, notes, options)


def _split(rest: list[str], ours: Mapping[str, bool], options: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Values of torchrun's flags, and the script with its arguments; `options` gets those of ours.

    As argparse would, but that a script's own ``--`` stays, and that there may be no script.
    """
    flags = {spelling: flag for flag in _TORCHRUN for spelling in flag.spellings}
    known: dict[str, _Flag | bool] = {**flags, **ours}
    values: dict[str, Any] = {}
    while rest and rest[0] != "--" and rest[0].startswith("-"):
        written, value = _option(rest.pop(0), known)
        meant = known[written]
        takes_value = meant if isinstance(meant, bool) else not meant.is_switch
        if takes_value and value is None:
            if not rest or (rest[0].startswith("-") and not _NEGATIVE.fullmatch(rest[0])):
                raise UserError("needs a value", cure="give it one", field=written)
            value = rest.pop(0)
        elif not takes_value and value is not None:
            raise UserError("takes no value", cure=f"write {written} alone", field=written, value=value)
        if isinstance(meant, bool):
            options.extend([written] if value is None else [written, value])
        else:
            values[meant.name] = True if value is None else _typed(meant, value, f"--{meant.name}")
    rest = rest[1:] if rest[:1] == ["--"] else rest
    if rest[:1] in (["-m"], ["--module"]):  # after the --, as python -m is written
        values["module"] = True
        rest = rest[1:]
    return values, rest


def _option(word: str, known: Mapping[str, Any]) -> tuple[str, str | None]:
    """The full spelling of an option, which may be written short as long as it is clear, and its ``=value``."""
    if not word.startswith("--") and len(word) > 2 and word[:2] in known:
        return word[:2], word[2:].removeprefix("=")
    name, equals, value = word.partition("=")
    close = [name] if name in known else [option for option in known if len(name) > 2 and option.startswith(name)]
    if len({option.replace("_", "-") for option in close}) != 1:
        cure = (
            f"one of {', '.join(option for option in close if '_' not in option)}"
            if close
            else "see `phalanx run --help`; a script comes after all options"
        )
        raise UserError("is not clear" if close else "there is no such option", cure=cure, field=name)
    return close[0], value if equals else None


def _typed(flag: _Flag, text: str, name: str) -> Any:
    cure = f"correct {name}"
    try:
        value = flag.kind(text)
    except ValueError:
        raise UserError("is no number", cure=cure, field=name, value=text) from None
    if flag.choices and value not in flag.choices:
        raise UserError(f"is none of {', '.join(flag.choices)}", cure=cure, field=name, value=text)
    return value


def _from_environment(flag: _Flag, environ: Mapping[str, str]) -> Any:
    name = f"PET_{flag.destination.upper()}"
    text = environ.get(name)
    if not text:
        return None
    if flag.is_switch:
        return bool(_typed(_Flag(flag.name, kind=int), text, name))
    return _typed(flag, text, name)


def _translated(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Settings, and lines about flags that mean something a little different here."""
    changes: dict[str, Any] = {}
    notes: list[str] = []
    fewest, most = _nodes(given["nnodes"]) if given["nnodes"] is not None else (1, 1)
    _refuse_contradictions(given, most)
    if given["nnodes"] is not None:
        changes["run.hosts"] = most
        if fewest < most:
            changes["run.allowed_hosts"] = list(range(fewest, most))
            changes["run.policy.when_missing"] = "shrink"
    if given["standalone"]:
        changes |= {"run.backend": "local", "run.hosts": 1}
    if (workers := given["nproc_per_node"]) is not None:
        if workers not in ("auto", "gpu", "cpu"):
            if not re.fullmatch(r"\d+", workers) or int(workers) < 1:
                cure = "write a number from 1, auto, gpu or cpu"
                raise UserError("is no number of ranks", cure=cure, field="--nproc-per-node", value=workers)
            workers = int(workers)
        changes["run.workers_per_host"] = workers
    if (count := given["max_restarts"]) is not None:
        # torchrun gives up after so many restarts in all; 0, its default, means none at all.
        if count < 0:
            raise UserError("is below 0", cure="give 0 or more", field="--max-restarts", value=count)
        if count == 0:
            notes.append("--max-restarts 0 has no meaning here: to have no restart, set run.policy.advise_only = true")
        else:
            changes["run.policy.max_restarts"] = count
    if given["rdzv_id"] not in (None, "none"):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", given["rdzv_id"]).strip("-._")[:63]
        changes |= {"run.name": name} if name else {}
        notes.append(f"--rdzv-id names the job here: {name or 'nothing is left of it'}")
    if given["module"]:
        changes["run.module"] = True
    if given["log_dir"]:
        changes["run.logs.folder"] = given["log_dir"]
    if given["shutdown_timeout"] is not None:
        changes["run.policy.grace_s"] = given["shutdown_timeout"]
    if given["node_rank"] is not None:
        notes.append("--node-rank has no meaning here: the driver gives ranks to hosts")
    return changes, notes


def _nodes(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < fewest <= most:
        raise UserError("is no number of hosts", cure="write 4, or 2:4", field="--nnodes", value=text)
    return fewest, most


def _refuse_contradictions(given: Mapping[str, Any], hosts: int) -> None:
    if given["module"] and given["no_python"]:
        raise UserError("--module and --no-python contradict each other", cure="give one of them")
    if given["no_python"]:
        cure = "give the Python script itself, or -m and its module; what it has to start it can start by itself"
        raise UserError("--no-python does not fit: every rank is a Python that reports how it ends", cure=cure)
    if given["virtual_local_rank"]:
        cure = "leave it out, and let the script choose its device by LOCAL_RANK"
        raise UserError("--virtual-local-rank does not fit: every rank sees all devices of its host", cure=cure)
    if given["standalone"] and hosts > 1:
        cure = "remove --standalone, or give --nnodes 1"
        raise UserError("--standalone is for one host", cure=cure, field="--nnodes", value=given["nnodes"])
    if given["node_rank"]:
        cure = "give the command once, for all hosts: the back end starts them; leave --node-rank out"
        raise UserError("no host starts by itself", cure=cure, field="--node-rank", value=given["node_rank"])


_MODULES = ("phalanx", "phalanx.__main__", "phalanx.cli.main")
_FOLDER = "run.folder"


class Training(NamedTuple):
    """Where a training goes: its config file, and its folder (empty: not given), from the folder that ranks run in.

    `alerts`: settings of ``[alerts]`` that its words give, by their names.
    """

    config: str
    folder: str
    alerts: Mapping[str, Any] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Of its run."""
        return Path(self.folder).name if self.folder else Path(self.config).stem

    def names_folder(self, working_folder: str) -> bool:
        """Whether the words, or the config file if it can be read here, give a folder."""
        if self.folder:
            return True
        with suppress(OSError, ValueError, AttributeError):
            found = tomllib.loads((Path(working_folder or ".") / self.config).read_text(encoding="utf-8-sig"))
            return bool(found.get("run", {}).get("folder"))
        return False


def training_of(script: str, is_module: bool, arguments: Sequence[str]) -> Training | None:
    """The training that a module and its arguments stand for; None: it is something else."""
    if not is_module or script not in _MODULES or arguments[:1] not in (["train"], ("train",)):
        return None
    words, rest = list[str](), iter(arguments[1:])
    for word in rest:
        if word == "--cluster":
            next(rest, "")
        elif not word.startswith("-"):
            words.append(word)
    if not words:
        return None
    folder, alerts = "", dict[str, Any]()
    for word in words[1:]:
        with suppress(UserError):  # which the training will report
            key, value = parse_override(word)
            folder = str(value) if key == _FOLDER else folder
            table, _, name = key.partition(".")
            if table == "alerts" and name:
                alerts[name] = value
    return Training(words[0], folder, alerts)


def with_folder(folder: Path) -> str:
    """The word that has a training go there."""
    return f"{_FOLDER}={json.dumps(str(folder), ensure_ascii=False)}"
