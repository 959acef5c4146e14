"""A plain DDP script whose state has a certain size, and which writes down when it has done what.

    training.py FOLDER STATE_MB KEEPING STEP_S [--quick]

KEEPING is ``file``, for a checkpoint of its own by torch.save, or ``memory``, for one that keepers hold. With --quick
it does what docs/warm_start.md says of scripts that are to be back soon; with a file, the same by torch's own means. Of
the state a third is weights, the rest AdamW's moments. It saves after `SAVED_AT` steps; with ``memory`` there is a
snapshot of each step. It ends when there is a file ``end`` in the folder; it stands still, or crashes, when there is
one that is called ``deadlock-RANK`` or ``crash-RANK``. It runs under any launcher that sets torchrun's variables.
"""

import os
import resource
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

FOLDER, STATE_MB, KEEPING, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
QUICK = "--quick" in sys.argv[5:]
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
SAVED_AT = 3
WIDTH = 2048
MARKS = os.open(FOLDER / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def mark(what, step=-1):
    """Write down that this has been done, and what it has cost; one short write is whole, whoever else writes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = f"{used.ru_utime:.3f} {used.ru_stime:.3f} {used.ru_minflt}"
    os.write(MARKS, f"{time.time_ns()} {ATTEMPT} {RANK} {os.getpid()} {what} {step} {cost}\n".encode())


mark("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

if KEEPING == "memory":
    from phalanx.checkpoint import Checkpointer


def make_layer(blank):
    """One; with `blank` its weights are anything."""
    if blank:
        return torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH, bias=False)
    return torch.nn.Linear(WIDTH, WIDTH, bias=False)


def make_model(blank=False):
    """As many weights as make up a third of the state."""
    layers = max(1, round(STATE_MB * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    return torch.nn.Sequential(*(make_layer(blank) for _ in range(layers)))


def make_training(model, blank):
    """The model spread over the ranks, and its optimizer; with `blank` its weights will be restored."""
    if QUICK:
        net = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=not blank)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    net = DistributedDataParallel(model)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-5)


def break_if_asked():
    """Wait for what never comes, as for a lock that nobody gives back; or crash."""
    if (FOLDER / f"deadlock-{RANK}").exists():
        mark("deadlock")
        threading.Semaphore(0).acquire()
    if (FOLDER / f"crash-{RANK}").exists():
        mark("crash")
        os.abort()


def update(model, optimizer):
    """One step."""
    loss = model(torch.randn(2, WIDTH)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def from_file(model, optimizer):
    """The step of the checkpoint in the folder, which has been loaded; 0: there is none."""
    path = FOLDER / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, mmap=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def to_file(model, optimizer, step):
    """Save, aside first."""
    path = FOLDER / "state.pt"
    aside = FOLDER / "state.new"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
    aside.replace(path)


def train_with_file():
    """Steps, and one checkpoint on the way."""
    blank = QUICK and (FOLDER / "state.pt").exists()
    model, optimizer = make_training(make_model(blank), blank)
    mark("made")
    step = from_file(model, optimizer)
    mark("restored", step)
    while not (FOLDER / "end").exists():
        break_if_asked()
        update(model, optimizer)
        step += 1
        mark("step", step)
        if step == SAVED_AT:
            if RANK == 0:
                to_file(model, optimizer, step)
            dist.barrier()
            mark("saved", step)
        time.sleep(STEP_S)


def train_with_memory():
    """Steps, and a snapshot of each in the memory of this host's keeper."""
    with Checkpointer(FOLDER / "checkpoints", every_steps=10**6, memory_every_steps=1) as checkpoints:
        with checkpoints.blank_weights() if QUICK else nullcontext(False) as blank:
            model = make_model()
        model, optimizer = make_training(model, blank)
        checkpoints.add(model=model, optimizer=optimizer)
        mark("made")
        step = checkpoints.restore()
        mark("restored", step)
        while not (FOLDER / "end").exists():
            break_if_asked()
            update(model, optimizer)
            step += 1
            mark("step", step)
            checkpoints.step(step)
            if step >= SAVED_AT:
                mark("saved", step)
            time.sleep(STEP_S)


if "PHALANX_HOST" in os.environ:  # each host has a keeper of its own, although both are this machine
    keeper = f"keeper-{FOLDER.name}-{os.environ['PHALANX_HOST']}"
    os.environ["PHALANX_INTERFACE"] = "lo"
    os.environ["PHALANX_KEEPER"] = f"{tempfile.gettempdir()}/phalanx-{os.geteuid()}/{keeper}"
mark("imported")
dist.init_process_group("gloo")
mark("met")
torch.manual_seed(0)
(train_with_memory if KEEPING == "memory" else train_with_file)()
os._exit(0)
