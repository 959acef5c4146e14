"""A host in a process of its own, which kills itself at a named point; what it has to say it prints as JSON lines.

python replica_process.py keep POINT NTH            listens; says where; ends when its input does
python replica_process.py send POINT NTH PORT STEP… sends snapshots of these steps to the host at PORT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict

from replica_helpers import Host, make_plan, put

from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.core.fault_points import Points


def main() -> None:
    role, point, nth, *rest = sys.argv[1:]
    secret = bytes.fromhex(sys.stdin.readline())
    host = Host("child", secret, Points({point: killer(int(nth))}))
    if role == "keep":
        say(asdict(host.service.start_listening()))
        sys.stdin.read()
    else:
        peer = Endpoint("parent", ("127.0.0.1",), int(rest[0]))
        for step in map(int, rest[1:]):
            put(host.vault, make_plan(), step)
            say(host.send(make_plan(), peer, step).problem)
    host.service.close()


def killer(nth: int) -> Callable[..., None]:
    left = [nth]

    def reached(**_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
