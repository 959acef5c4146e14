"""The file of digests: what is written is read again, and what is torn, old or made again does no harm."""

from __future__ import annotations

from pathlib import Path

from phalanx.detect.corruption.digest_file import (
    FILE,
    StepDigests,
    UnlikeCopies,
    UnlikeReplays,
    append_digests,
    digest_text,
    read_digests,
    read_records,
)

ONE = StepDigests(100, 0, 1.5, "dp4", {"weight": {"embedding": "0a"}}, compared=1)
COPIES = UnlikeCopies(100, 0, 1.5, "weight", "embedding", {0: "a", 1: "b"}, {0: "h0", 1: "h1"}, {0: "p", 1: "p"}, 50)
REPLAYS = UnlikeReplays(100, 0, 1.5, {0: {0: "a", 1: "b"}, 1: {1: "c", 2: "c"}}, {0: "h0"}, {0: "p"})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    append_digests(tmp_path, [COPIES, REPLAYS, ONE])
    assert list(read_records(tmp_path)) == [COPIES, REPLAYS, ONE]


def test_a_step_that_was_made_again_counts_as_it_was_made_last(tmp_path: Path) -> None:
    later, again = StepDigests(200, 0, 2.0, "dp4", {}), StepDigests(100, 1, 3.0, "dp4", {"weight": {"embedding": "0b"}})
    append_digests(tmp_path, [ONE, later])
    append_digests(tmp_path, [again])
    assert read_digests(tmp_path) == {100: again, 200: later}


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    append_digests(tmp_path, [ONE])
    with (tmp_path / FILE).open("a") as file:
        file.write(
            '{"kind": "digests", "step": 1}\n{"kind": "other", "step": 1}\nrubbish\n{"kind": "digests", "step": 2'
        )
    assert list(read_records(tmp_path)) == [ONE]
    assert list(read_records(tmp_path / "none")) == []


def test_sums_are_modulo_two_to_the_64() -> None:
    assert digest_text(-1, 1 << 64) == "f" * 16 + "0" * 16
