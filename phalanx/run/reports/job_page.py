"""A job as one web page that needs nothing else, and of which no word can be markup.

The page loads nothing, runs no script and asks for itself again by a header of its own, so that it can be sent with
``Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

from phalanx.core.units import duration, size
from phalanx.run.incidents.incident_pages import Summary, to_html
from phalanx.run.incidents.report import Incident
from phalanx.run.logs.log_lines import cut, escape_for_html
from phalanx.run.reports import terminal_text
from phalanx.run.reports.recent_events import Item, Overview, Told

REFRESH_S = 3

_EVENTS = 30
_LINES = 40
_INCIDENTS = 20
_DETECTIONS = 10
_HOSTS = 200
_LINE_CHARS = 400

_STYLE = """
:root{color-scheme:light dark;--line:#8883;--soft:#777;--good:#18794e;--warn:#ad5700;--bad:#c62a2f;--card:#8881}
@media(prefers-color-scheme:dark){:root{--soft:#999;--good:#4cc38a;--warn:#ffa057;--bad:#ff6369}}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;padding:1.2rem;max-width:76rem}
h1{font-size:1.35rem;margin:0 0 .8rem}h2{font-size:1.02rem;margin:1.6rem 0 .5rem}
a{color:inherit}small,.soft{color:var(--soft)}.good{color:var(--good)}.warning{color:var(--warn)}.error{color:var(--bad)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(6.5rem,1fr));gap:.6rem;margin:0}
.facts div{background:var(--card);border-radius:.5rem;padding:.55rem .8rem}
.facts dt{color:var(--soft);font-size:.8rem}.facts dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
.note{border-left:.3rem solid var(--warn);background:var(--card);padding:.5rem .8rem;margin:.9rem 0;border-radius:.2rem}
.note.error{border-color:var(--bad);color:inherit}.note.good{border-color:var(--good);color:inherit}
article td:first-child{white-space:nowrap}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--soft);font-size:.8rem}
th,td{text-align:left;padding:.28rem .7rem .28rem 0;vertical-align:top}
td{border-top:1px solid var(--line)}.n{text-align:right}.n+:not(.n){padding-left:.6rem}
pre{margin:0;font:12.5px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.box{background:var(--card);border-radius:.5rem;padding:.6rem .8rem;max-height:26rem;overflow-y:auto}
"""

_STATES = {
    "active": "good",
    "spare": "soft",
    "joining": "soft",
    "draining": "warning",
    "unknown": "warning",
    "suspect": "warning",
    "evicted": "error",
    "gone": "error",
}


def page(now: Overview, items: Sequence[Item], incidents: Sequence[Summary], link: str = "incidents/") -> str:
    """A job now, with recent items and all incidents in order; an incident's page is at `link` and its number."""
    events, lines = [], []
    for item in items:
        if isinstance(item, Told):
            text = "\n".join(_text(cut(part, _LINE_CHARS)) for part in terminal_text.event_text(item).split("\n"))
            time = f'<span class="soft">{_date(item.unix_s, "%H:%M:%S")}</span>'
            events.append(f'{time} <span class="{_text(item.level)}">{text}</span>')
        else:
            lines.append(f'<span class="soft">[rank {item.rank}]</span> {_text(cut(item.text, _LINE_CHARS))}')
    if now.status is not None:
        phase = "done" if now.status == 0 else f"ended with status {now.status}"
        again = ""
    else:
        phase = f"{now.phase}{f', attempt {now.attempt}' if now.attempt else ''}, for {duration(now.phase_s)}"
        again = f"; the page asks again every {REFRESH_S} s"
    parts = [
        f"<h1>{_text(now.job)} <small>{_text(phase)}</small></h1>",
        *_notes(now, link),
        _facts(now),
        _section("Hosts", _hosts(now)),
        _section("Incidents", _incidents(incidents, link)),
        *([_section("Found by judges", _box(_detections(now)))] if now.detections else []),
        _section("Last events", _box(reversed(events[-_EVENTS:]))),
        _section("Last lines of ranks", _box(lines[-_LINES:])),
        f"<p><small>As of {_date(now.unix_s)} UTC{again}.</small></p>",
    ]
    return _whole(f"{now.job}: {now.phase}", parts, None if now.status is not None else REFRESH_S)


def incident_page(incident: Incident, back: str = "/") -> str:
    """One incident, as a page; `back`: address of the job's page."""
    title = f"{incident.job}: incident {incident.number}"
    parts = [f'<p><a href="{_text(back)}">← {_text(incident.job)}</a></p>', to_html(incident)]
    return _whole(title, parts, REFRESH_S if incident.outcome is None else None)


def _whole(title: str, parts: Iterable[str], refresh_s: int | None) -> str:
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s is not None else ""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta name="viewport" content="width=device-width,initial-scale=1">{again}',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def _text(text: str) -> str:
    return escape_for_html(terminal_text.harmless(text))


def _notes(now: Overview, link: str) -> list[str]:
    notes = []
    if now.incident is not None:
        about = f'<a href="{_text(link)}{now.incident.number}">Incident {now.incident.number}</a>'
        why = _text(now.incident.why)
        notes.append(f'<p class="note">{about} is open for {terminal_text.age(now.incident.age_s)}: {why}</p>')
    if now.status is not None:
        notes.append(f'<p class="note {"good" if now.status == 0 else "error"}">{_text(terminal_text.ending(now))}</p>')
    if now.advise_only:
        notes.append('<p class="note">The policy only advises: nothing is restarted or replaced.</p>')
    return notes


def _facts(now: Overview) -> str:
    active = now.hosts_by_state.get("active", sum(host.state == "active" for host in now.hosts))
    known = [
        ("step", f"{now.step:,}" if now.step >= 0 else "none yet"),
        ("steps/s", f"{now.steps_per_s:.3g}" if now.steps_per_s >= 0 else "–"),
        ("last step", f"{terminal_text.age(now.step_age_s)} ago" if now.step_age_s >= 0 else "–"),
        *([("last movement", f"{terminal_text.age(now.quiet_s)} ago")] if terminal_text.moves_otherwise(now) else []),
        ("hosts", f"{active:,} of {now.hosts_wanted:,}"),
        ("ranks", f"{now.world_size:,}"),
        ("spares ready", f"{now.hosts_by_state.get('spare', 0):,}"),
        ("recoveries", f"{now.recoveries:,}"),
        ("running for", duration(now.age_s) if now.age_s > 0 else "–"),
        ("training", f"{100 * now.training_s / now.age_s:.1f} %" if now.age_s > 0 else "–"),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{_text(value)}</dd></div>" for name, value in known)
    return f'<dl class="facts">{cells}</dl>'


def _hosts(now: Overview) -> str:
    order = sorted(now.hosts, key=terminal_text.host_order)
    has_gpus = any(host.seen is not None and host.seen.accelerators for host in now.hosts)
    gpu_head = (":gpu",) if has_gpus else ()
    heads = ("host", "state", ":ranks", ":step", ":s/step", ":heard", ":cpu", ":memory free", *gpu_head, "doing")
    rows = []
    for host in order[:_HOSTS]:
        seen, (step, step_s, gpu) = host.seen, terminal_text.host_figures(host)
        rows.append(
            [
                _text(host.name),
                f'<span class="{_STATES.get(host.state, "")}">{_text(host.state)}</span>',
                f"{host.ranks[0]}–{host.ranks[-1]}" if len(host.ranks) > 1 else "".join(map(str, host.ranks)),
                "" if step is None else f"{step:,}",
                "" if step_s is None else f"{step_s:.3g}",
                terminal_text.age(host.silent_s),
                f"{100 * seen.cpu_load:.0f} %" if seen is not None else "",
                size(seen.memory_free_bytes) if seen is not None else "",
                *([f"{100 * gpu:.0f} %" if gpu is not None else ""] if has_gpus else []),
                _text(cut(terminal_text.doing(host), _LINE_CHARS)),
            ]
        )
    total = max(sum(now.hosts_by_state.values()), len(now.hosts))
    more = f"<p><small>of {total:,} hosts: {_text(terminal_text.counted(now))}</small></p>" if total > len(rows) else ""
    return _table(heads, rows, "no host yet") + more


def _incidents(incidents: Sequence[Summary], link: str) -> str:
    heads = (":", "began", "what", "result", ":seconds", ":steps lost")
    rows = []
    for one in reversed(incidents[-_INCIDENTS:]):
        address = f"{_text(link)}{quote(str(one.number))}"
        rows.append(
            [
                f'<a href="{address}">{one.number}</a>',
                _date(one.began_unix_s),
                f'<a href="{address}">{_text(cut(one.title, _LINE_CHARS))}</a>',
                _text(one.result),
                f"{one.seconds:.2f}" if one.seconds is not None else "",
                "–" if one.lost_steps is None else str(one.lost_steps),
            ]
        )
    more = f"<p><small>and {len(incidents) - _INCIDENTS} before</small></p>" if len(incidents) > _INCIDENTS else ""
    return _table(heads, rows, "none so far") + more


def _detections(now: Overview) -> list[str]:
    lines = []
    for kept in reversed(now.detections[-_DETECTIONS:]):
        lines.append(_text(cut(terminal_text.detection_text(kept), _LINE_CHARS)))
        lines += [f"    {_text(cut(reason, _LINE_CHARS))}" for reason in (*kept.found.why, *kept.found.then)]
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> str:
    """A table of cells that are markup; heads with a colon before them are of numbers."""
    if not rows:
        return f'<p class="soft">{nothing}</p>'
    classes = [' class="n"' if head.startswith(":") else "" for head in heads]
    top = "".join(f"<th{mark}>{head.lstrip(':')}</th>" for head, mark in zip(heads, classes, strict=True))
    body = [
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><tr>{top}</tr>\n' + "\n".join(body) + "</table></div>"


def _box(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f'<div class="box"><pre>{text}</pre></div>' if text else '<p class="soft">nothing so far</p>'


def _date(unix_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
        return "–"
