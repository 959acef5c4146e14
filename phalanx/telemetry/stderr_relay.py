"""The process beside a rank that passes on what is written to its fd 2: to where stderr went before, and into the log.

    python -I -S stderr_relay.py LOG WHO FILE_BYTES  <the rank's fd 2, as a pipe  >where its stderr went before

It is a process of its own so that neither the rank's interpreter lock nor its crash can hold up or lose a line: what
stands in the pipe when the rank dies is still read. It ends when nobody is left who could write. It imports nothing of
ours, since it is started once per rank and has to be small.
"""

import os
import signal
import sys
import time

_BLOCK_BYTES = 1 << 16
_PARTIAL_BYTES = 16 << 10
# A terminal or a scheduler sends these to every process of a job; the rank's end is what ends this one.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGTSTP", "SIGTTOU", "SIGUSR1", "SIGUSR2", "SIGPIPE")


class LogCopy:
    """Appends lines to a log that another process writes, and turns over, too.

    Args:
        most_bytes: from this size of the file on lines are left out, and counted.
    """

    def __init__(self, path: str, who: str, most_bytes: int) -> None:
        self._path, self._who, self._most_bytes = path, who, most_bytes
        self._partial = b""
        self._left_out = 0

    def feed(self, block: bytes) -> None:
        """Append the lines that have ended; of one that is drawn over, the last state."""
        *lines, rest = (self._partial + block).split(b"\n")
        self._partial = rest[-_PARTIAL_BYTES:]
        self._append([line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines])

    def close(self) -> None:
        """Append what has no end."""
        if self._partial:
            self.feed(b"\n")

    def _append(self, lines: "list[bytes]") -> None:
        if not lines:
            return
        now_s = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s % 1 * 1000):03d}Z"
        texts = [b"%s STDERR %s %s\n" % (stamp.encode(), self._who.encode(), line) for line in lines]
        try:
            # Opened anew each time: the rank may have renamed the file and begun another.
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            self._left_out += len(lines)
            return
        try:
            size = os.fstat(descriptor).st_size
            if size > self._most_bytes:
                self._left_out += len(lines)
                return
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # stacks of a crash are being written
                texts.insert(0, b"\n")
            if self._left_out:
                told = f"{stamp} WARNING {self._who} {self._left_out} lines of stderr were left out\n"
                texts.insert(0, told.encode())
            os.write(descriptor, b"".join(texts))
            self._left_out = 0
        except OSError:
            self._left_out += len(lines)
        finally:
            os.close(descriptor)


def relay(source: int, shown: int, copy: LogCopy) -> None:
    """Pass on until nobody can write any more."""
    while True:
        try:
            block = os.read(source, _BLOCK_BYTES)
        except InterruptedError:
            continue
        if not block:
            copy.close()
            return
        _show(shown, block)
        copy.feed(block)


def _show(shown: int, block: bytes) -> None:
    """Write it where stderr went before; a terminal that is gone is no reason to stop."""
    while block:
        try:
            block = block[os.write(shown, block) :]
        except BlockingIOError:  # somebody has set the terminal so
            time.sleep(0.01)
        except OSError:
            return


def main() -> None:
    """What the process does."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    path, who, file_bytes = sys.argv[1:4]
    relay(0, 1, LogCopy(path, who, 2 * int(file_bytes)))


if __name__ == "__main__":
    main()
