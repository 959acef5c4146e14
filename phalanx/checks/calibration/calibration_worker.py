"""One rank that measures, in a process of its own: the task comes on stdin, and it answers in one line on stdout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import FileStore

from phalanx.checks.calibration import kernel_cases, step_cases
from phalanx.checks.calibration.calibration_messages import Answer, Precision, Task, Timing, choose_scale, fitting
from phalanx.checks.calibration.stopwatch import Pool, Stopwatch
from phalanx.core.host import cpu_line
from phalanx.core.layout import Layout
from phalanx.ipc.processes import die_with_parent, name_process
from phalanx.kernels.host_memory import keep_freed_memory, use_huge_pages
from phalanx.kernels.linear import cpu_has_fast_bf16
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import Mesh

_HUGE_PAGE_HEAP_BYTES = 2 << 30  # as in training
_TIMEOUT_S = 600.0


def measure(task: Task) -> Answer:
    """Everything that the task asks for."""
    numbers = {"process_s": max(time.time() - task.started_unix_s, 0.0)}
    device = _prepare(task)
    began_s = time.perf_counter()
    group = Group.alone()
    if task.ranks > 1:
        store = FileStore(task.meet, task.ranks)
        mesh = Mesh(Layout(replicate=task.ranks), task.rank, store, device, _TIMEOUT_S, _TIMEOUT_S)
        group = mesh.group("replicate")
        group.barrier()
    numbers["groups_s"] = time.perf_counter() - began_s
    scale = choose_scale(device.type, quick=task.quick)
    if device.type == "cuda":
        # The least of all ranks' devices: they measure the same cases.
        mine = torch.tensor([torch.cuda.mem_get_info(device)[0]], device=device)
        every = mine.new_empty(group.size)
        group.all_gather(every, mine).wait()
        scale = fitting(scale, int(every.min()))
    watch = Stopwatch(device, group, scale.rounds, clock=_clock(task))
    compiled = step_cases.compiles(device)
    wide = Pool(device, torch.float32, scale.pool)
    timings: list[Timing] = []
    fast: tuple[Precision, ...] = ("fp32", "bf16")
    is_cuda = device.type == "cuda"
    has_bf16 = torch.cuda.is_bf16_supported() if is_cuda else cpu_has_fast_bf16()
    precisions = task.precisions or (fast if has_bf16 else fast[:1])
    for precision in precisions:
        pool = wide if precision == "fp32" else Pool(device, torch.bfloat16, scale.pool)
        timings += watch.measure(kernel_cases.products_cases(scale.tokens, scale.widths, precision, pool))
        timings += watch.measure(
            kernel_cases.attention_cases(scale.attended, scale.queries, scale.head_dims, precision, pool)
            + kernel_cases.streams_cases(scale.shapes, precision, pool, wide, compiled=compiled)
            + kernel_cases.ends_cases(scale.heads, precision, pool, wide)
        )
    timings += watch.measure(step_cases.updates_cases(scale.updated, device))
    if group.size > 1:
        # Their times scatter by factors where ranks share a host: medians of few turns would be luck.
        patient = Stopwatch(device, group, 4 * scale.rounds, long_s=1.0)
        timings += patient.measure(step_cases.collectives_cases(scale.messages, group, device))
    numbers |= {"host_launch_s": step_cases.host_launch_s(device), "layer_host_s": step_cases.layer_host_s(device)}
    if compiled:
        numbers["compiled_layer_host_s"] = step_cases.layer_host_s(device, compiled=True)
    timings += step_cases.layers(device)
    numbers |= step_cases.kernel_numbers(device)
    numbers |= {**kernel_cases.slow_rates(precisions, device), **step_cases.numbers(task.quick)}
    if is_cuda:
        name, memory_bytes = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory_bytes = cpu_line("model name"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    numbers["memory_bytes"] = float(memory_bytes)
    return Answer(tuple(timings), numbers, {"device": name, "torch": torch.__version__})


def _clock(task: Task) -> Callable[[], float]:
    # One thread alone is timed by what it has of its core: so other work on the host adds less to its times.
    return time.process_time if task.threads == 1 and task.device == "cpu" else time.perf_counter


def _prepare(task: Task) -> torch.device:
    """Cores, threads and memory as in training."""
    if task.cpus and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cpus)
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.rank)
    if task.device == "cuda":
        torch.cuda.set_device(task.rank)
        return torch.device("cuda", task.rank)
    if keep_freed_memory():
        use_huge_pages(_HUGE_PAGE_HEAP_BYTES)
    return torch.device("cpu")


def main() -> None:
    """Do one task. What libraries print goes to stderr, so that it cannot be taken for the answer."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task.from_json(sys.stdin.read())
    die_with_parent(task.parent)
    name_process("phalanx measure")
    answer.write(measure(task).to_json())
    answer.flush()
    os._exit(0)  # groups that are let go of one after the other would wait for each other


if __name__ == "__main__":
    main()
