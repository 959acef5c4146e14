"""Lines of ranks: splitting, progress bars, lines that are too long, escape sequences, HTML; and their tails."""

from __future__ import annotations

import html.parser
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.logs.log_lines import LineSplitter, Tails, cut, escape_for_html, share_of, strip_ansi


def split(*blocks: bytes, most: int = 1 << 14) -> list[str]:
    splitter = LineSplitter(most)
    return [line for block in blocks for line in splitter.feed(block)] + splitter.finish()


@pytest.mark.parametrize(
    ("blocks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\nc", b"d"], ["ab", "cd"]),
        ([b"\n\n"], ["", ""]),
        ([b""], []),
        ([b"dos\r\n", b"dos\r", b"\n"], ["dos", "dos"]),
        ([b"\r 10%\r 20%", b"\r 30%\ndone\n"], [" 30%", "done"]),
        ([b" 10%\r", b" 20%\r", b"\n"], [" 20%"]),
        ([b" 10%\r", b" 20%\r"], [" 20%"]),
        ([b"a\r\r\rb\r\r\n"], ["b"]),
        ([b"\r\n"], [""]),
        (["ü€🙂\n".encode()[:3], "ü€🙂\n".encode()[3:]], ["ü€🙂"]),
        ([b"a\xff\xfeb\n"], ["a��b"]),
        ([b"a\x0bb\x0cc\x1cd\xc2\x85e\n"], ["a\x0bb\x0cc\x1cd\x85e"]),
    ],
)
def test_lines(blocks: list[bytes], lines: list[str]) -> None:
    assert split(*blocks) == lines


def test_a_line_that_is_too_long_is_cut_and_says_by_how_much() -> None:
    assert split(b"x" * 10 + b"\n", most=10) == ["x" * 10]
    assert split(b"x" * 25, b"y" * 5, b"\nshort\n", most=10) == ["x" * 10 + " … [20 bytes more]", "short"]
    assert split("xü".encode() * 2 + b"\n", most=5) == ["xüx … [1 bytes more]"]
    assert split(b"x" * 100, b"\rnew", b"\n", most=10) == ["new"]
    assert split(b"x" * 100, b"\r", b"\n", most=10) == ["x" * 10 + " … [90 bytes more]"]


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 30))
def test_it_does_not_matter_how_bytes_come(blocks: list[bytes], most: int) -> None:
    whole = b"".join(blocks)
    assert split(*blocks, most=most) == split(whole, most=most) == split(*(bytes([byte]) for byte in whole), most=most)


@given(st.binary())
def test_wild_bytes_lose_no_line(data: bytes) -> None:
    lines = split(data)
    assert len(lines) in (data.count(b"\n"), data.count(b"\n") + 1)
    assert all("\n" not in line and "\r" not in line for line in lines)


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"])), min_size=1))
def test_text_comes_back(lines: list[str]) -> None:
    assert split("".join(f"{line}\n" for line in lines).encode(), most=1 << 20) == lines


def test_what_has_no_end_yet_can_be_seen() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"done\n 10%\r 20%") == ["done"]
    assert splitter.pending == " 20%"
    assert splitter.feed(b"\r 30%\n") == [" 30%"]
    assert (splitter.pending, splitter.finish()) == ("", [])


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[1;31mred\x1b[0m and \x1b[38;2;1;2;3mmore\x1b[K", "red and more"),
        ("\x1b]0;title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "textlink"),
        ("\x9b31mred", "red"),
        ("\x1b(Btext\x1bcreset\x1b7", "textreset"),
        ("bell\x07 back\x08 tab\t nul\x00 del\x7f", "bell back tab\t nul del"),
        ("\x1b[?25l\x1b[2Jclear", "clear"),
        ("ends in \x1b", "ends in "),
        ("ends in \x1b[1", "ends in 1"),
        ("\x1b]0;never ends", ""),
        ("brackets [1m stay ü€", "brackets [1m stay ü€"),
    ],
)
def test_escape_sequences_go(text: str, plain: str) -> None:
    assert strip_ansi(text) == plain


@given(st.text(st.sampled_from("\x1b\x9b\x9d[]0;1mKa \\\x07\x00\n\r\t<&")) | st.text())
def test_nothing_stays_that_moves_a_terminal(text: str) -> None:
    plain = strip_ansi(text)
    assert all(char == "\t" or (char.isprintable() or ord(char) >= 0xA0) for char in plain)


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.sampled_from("<>&\"'/ab=\x1b[m;#x !-\ud800")) | st.text())
def test_html_stays_text(text: str) -> None:
    escaped = escape_for_html(text)
    assert not set(escaped) & set("<>\"'")
    reader = Reader()
    reader.feed(f"<p>{escaped}</p>")
    reader.close()
    assert reader.tags == ["p"]
    assert reader.text == strip_ansi(text).encode(errors="replace").decode()


def test_a_text_is_cut() -> None:
    assert (cut("abc", 3), cut("abcd", 3)) == ("abc", "ab…")


MISSING = re.compile(r"… (one|[\d,]+) more lines? (?:is|are) in the log")


def test_tails_are_bounded_and_count_what_is_left_out() -> None:
    tails = Tails(heartbeat_bytes=4 * 32 + 3 + 256, kept_lines=3)
    tails.add(1, ["a", "b"])
    tails.add(0, ["long" * 100])
    tails.add(1, ["c"])
    cut_line = ("long" * 100)[:255] + "…"
    told = [(0, cut_line), (1, "… one more line is in the log"), (1, "b"), (1, "c")]
    assert [(line.rank, line.text) for line in tails.newest()] == told
    tails.sent()
    assert tails.newest() == [] and tails.is_empty
    tails.add(1, [str(number) for number in range(20)])
    lines = [line.text for line in tails.newest()]
    assert lines[0] == f"… {20 - len(lines[1:])} more lines are in the log"
    assert lines[1:] == [str(number) for number in range(20)][-len(lines[1:]) :] and len(lines) > 10
    assert (tails.last(1), tails.last(0), tails.last(7)) == (["17", "18", "19"], ["long" * 100], [])
    tails.forget()
    assert tails.last(1) == [] and not tails.is_empty


def test_whoever_sends_tails_when_they_are_half_full_loses_nothing() -> None:
    tails, sent = Tails(share_of(1)), list[str]()

    def send() -> None:
        sent.extend(line.text for line in tails.newest())
        tails.sent()

    tails.on_full = send
    lines = [f"line {number}" for number in range(100_000)] + ["x" * 16_384] * 200 + ["é" * 4000] * 100
    tails.add(0, lines)
    send()
    assert sent == lines


def test_of_many_hosts_nobody_is_called_early_and_the_bound_holds() -> None:
    tails, called = Tails(share_of(10_000)), list[int]()
    tails.on_full = lambda: called.append(1)
    for rank in range(8):
        tails.add(rank, [f"line {number}" for number in range(1000)])
    lines = tails.newest()
    assert not called and {line.rank for line in lines} == set(range(8))
    assert sum(len(line.text) + 32 for line in lines) < share_of(10_000) + 8 * 100


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.text(), max_size=9)) | st.none()))
def test_every_line_of_a_tail_is_sent_or_counted(steps: list[tuple[int, list[str]] | None]) -> None:
    tails, added, seen = Tails(heartbeat_bytes=400), 0, 0
    for step in [*steps, None]:
        if step is None:
            lines = tails.newest()
            tails.sent()
            missing = [found[1] for line in lines if (found := MISSING.fullmatch(line.text))]
            assert sum(len(line.text) for line in lines if line.text not in missing) <= 600
            seen += len(lines) - len(missing)
            seen += sum(1 if count == "one" else int(count.replace(",", "")) for count in missing)
        else:
            tails.add(*step)
            added += len(step[1])
    assert seen == added
