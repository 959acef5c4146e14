"""Lines by which a program shows its progress: steps, bars, and lines of the loss or an epoch that come again.

step: 120  loss 2.31 · iteration     120/    500 | · global_step=120 · 45%|████▌    | 45/100 [00:10<…      a step
{'loss': 2.31, 'epoch': 0.02} · Train Epoch: 1 [640/60000 (1%)]  Loss: 2.31 · 12/500 ━━━ 3s - loss: 2.31    no step
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_STEP = re.compile(
    r"\b(?P<what>step|global_step|iteration|iter|it|batch|update|num_updates)\b[\"']?\s{0,3}[:=\[(/#]?\s{0,12}"
    r"(?P<step>\d{1,9})(?!\d{0,9}\.\d)",
    re.IGNORECASE,
)
_OF_STEPS = re.compile(r" ?(?:/|of) {0,12}(\d{1,9})\b")
_BAR = re.compile(r"\d{1,3}%\|.{1,120}\| {0,2}(?P<step>\d{1,9})/(?P<total>\d{1,9}) \[")
_OTHER_STEPS = re.compile(r"\b(?:eval\w*|valid\w*|test\w*|warm-?up\w*)\b", re.IGNORECASE)
_EPOCHS = re.compile(r"\bepoch\W{0,3}(\d{1,6}) ?(?:/|of) ?(\d{1,6})", re.IGNORECASE)
_LOSS = re.compile(
    r"\b(?:[a-z]{1,12}[_/ -]){0,3}loss(?:es)?\b[\"']?\s{0,4}[:=|(]?\s{0,4}[\"']?(-?\d[\d.e+-]{0,16})", re.IGNORECASE
)
_EPOCH = re.compile(
    r"\bepochs?\b(?:\(\w{1,12}\))?[^\w.]{0,6}(\d{1,6}(?:\.\d{1,6})?)(?:[^\w.]{1,6}(\d{1,9})/)?", re.IGNORECASE
)
_BY_STEP = re.compile(r"\bloss\b|\bit/s\b|s/it\b|\btokens\b", re.IGNORECASE)
_TROUBLE = re.compile(
    r"\b(?:errors?|fail\w{0,4}|fatal|exception|abort\w{0,3}|nan|inf|diverge\w{0,2}|stop\w{0,4}|killed|refused|lost)\b"
    r"(?! rate)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """What a line says of progress.

    Attributes:
        series: of whose numbers it is: a bar or a word such as ``step``; numbers of others are not compared with them.
        step: None: none is named; the line has a loss or an epoch.
        total: how many steps there are to be; None: not said.
        mark: tells lines without a step apart that say the same.
        key: of the same moment in the logs of other ranks; empty: it cannot be told.
        is_other: of an evaluation or a warm-up.
    """

    series: str
    step: int | None
    total: int | None = None
    mark: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    is_bar: bool = False
    is_other: bool = False
    is_last_epoch: bool = True


def may_be_of_step(text: str) -> bool:
    """Whether a line that a general rule takes for trouble may be one of a step all the same."""
    return bool(_BY_STEP.search(text))


def progress_of(text: str) -> ProgressLine | None:
    """What it says of progress; None: nothing. A line without a step counts only where lines like it come again."""
    is_other = bool(_OTHER_STEPS.search(text, 0, 200))
    epoch = _EPOCHS.search(text, 0, 200)
    is_last_epoch = epoch is None or int(epoch[1]) + 1 >= int(epoch[2])
    if match := _STEP.search(text, 0, 200):
        total = _OF_STEPS.match(text, match.end("step"))
        series = f"{match['what'].lower()}{' of others' if is_other else ''}"
        of_steps = int(total[1]) if total else None
        return ProgressLine(series, int(match["step"]), of_steps, is_other=is_other, is_last_epoch=is_last_epoch)
    if match := _BAR.search(text, 0, 300):
        series = "bar " + re.sub(r"\d+", "", text[: match.start()])[-40:]
        return ProgressLine(
            series, int(match["step"]), int(match["total"]), is_bar=True, is_other=is_other, is_last_epoch=is_last_epoch
        )
    loss, at = _LOSS.search(text, 0, 300), _EPOCH.search(text, 0, 300)
    if (loss is None and at is None) or _TROUBLE.search(text, 0, 300):
        return None
    key = ("epoch", at[1], at[2] or "") if at else ()
    return ProgressLine("loss" if loss else "epoch", None, mark=(*key, loss[1] if loss else ""), key=key)
