"""What training does on a GPU, where there is none: tensors that know a CUDA device, shape and type, and hold nothing.

A process of its own (see `start`) walks through cases of `CASES` under torch's FakeTensorMode and prints what went
wrong, by name. An operator that gets tensors of host and device together fails as it would on a GPU, and so does
reading a value back from the device. What is on the host alone is computed for real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# torch without CUDA knows neither a device guard nor streams of CUDA, which the autograd engine asks for: a library
# with such that do nothing is loaded before it. torch built for CUDA takes its own such guard where no GPU is.
GUARD = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using Nothing = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
struct FakeGuard : Nothing {
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

namespace at {
struct FakeHooks : CUDAHooksInterface {
  explicit FakeHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", FakeHooks)
}
"""


def start(folder: Path, compiler: str, torch_folder: Path, cases: Sequence[str], *, has_cuda: bool) -> dict[str, str]:
    """What went wrong in each of `cases`, empty where nothing did; `folder` is for what is built."""
    environment = dict(os.environ)
    if not has_cuda:
        source, library = folder / "guard.cpp", folder / "guard.so"
        source.write_text(GUARD)
        paths = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        command = [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *paths]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True, capture_output=True, text=True)
        environment |= {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(torch_folder / "lib")}
    done = subprocess.run(
        [sys.executable, __file__, *cases], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _mode() -> AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._pytree import tree_leaves

    class FakeDevice(FakeTensorMode):
        supports_higher_order_operators = True  # FlexAttention in a compiled layer
        waits_are_errors = False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            kwargs.pop("pin_memory", None)  # there is nothing that could copy from it
            if self.waits_are_errors:
                _refuse_waiting(function, args, kwargs)
            device = kwargs.get("device")
            on_host = device is None or device.type == "cpu"
            if on_host and not any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
                return function(*args, **kwargs)
            return super().__torch_dispatch__(function, types, args, kwargs)

    return FakeDevice(allow_non_fake_inputs=True)


def _refuse_waiting(function: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Copies between host and device for which the host would wait, as it does where `non_blocking` is not said."""
    import torch

    if function is torch.ops.aten._to_copy.default:
        source, target, promised = args[0].device, kwargs.get("device") or args[0].device, kwargs.get("non_blocking")
    elif function is torch.ops.aten.copy_.default:
        source, target, promised = args[1].device, args[0].device, args[2] if len(args) > 2 else False
        promised = promised or (args[1].numel() == 1 and target.type == "cuda")  # a number, as an argument of a kernel
    else:
        return
    if source.type != target.type and not promised:
        raise AssertionError(f"the host waits for the device: {function} from {source} to {target}")


class _Event:
    """A mark in a queue in which nothing is ever waiting."""

    def __init__(self, **_options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True


class _Launch:
    """In place of the Triton kernels of the optimizers: what they are told lies on the device."""

    Launch: Any

    def adamw(self, parameters: Any, states: Any, numbers: Any, seed: Any, bits: int) -> None:
        told = [*parameters, *(p.grad for p in parameters), *(t for state in states for t in state.values())]
        assert all(tensor.device.type == "cuda" for tensor in (*told, numbers, seed)) and bits in (8, 16, 32)

    def lamb_moments(self, parameters: Any, states: Any, numbers: Any) -> Any:
        self.adamw(parameters, states, numbers, numbers, 32)
        return parameters[0].new_empty(len(parameters), 2)

    def lamb_apply(self, numbers: Any, factors: Any) -> None:
        assert factors.device.type == numbers.device.type == "cuda"


_Launch.Launch = _Launch


class _Stream:
    """A queue in which nothing is ever waiting; see `_Event`."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()


class _FakeNccl:
    """A group of ranks that are not there: what NCCL asks of operands, and a work that is never asked if it is done."""

    def __init__(self, size: int) -> None:
        self.size = size

    def name(self) -> str:
        return "nccl"

    def allreduce(self, tensors: Any, _options: Any) -> Any:
        return self._work(*tensors)

    def broadcast(self, tensors: Any, _options: Any) -> Any:
        return self._work(*tensors)

    def send(self, tensors: Any, _to: int, _tag: int) -> Any:
        return self._work(*tensors)

    def recv(self, tensors: Any, _source: int, _tag: int) -> Any:
        return self._work(*tensors)

    def _allgather_base(self, out: Any, x: Any) -> Any:
        assert out.numel() == self.size * x.numel() and out.dtype == x.dtype, "all-gather"
        return self._work(out, x)

    def _reduce_scatter_base(self, out: Any, x: Any) -> Any:
        assert x.numel() == self.size * out.numel() and out.dtype == x.dtype, "reduce-scatter"
        return self._work(out, x)

    def alltoall_base(self, out: Any, x: Any, out_rows: list[int], rows: list[int]) -> Any:
        assert out.dtype == x.dtype and (sum(rows) or x.shape[0]) == x.shape[0], "all-to-all"
        assert (sum(out_rows) or out.shape[0]) == out.shape[0], "all-to-all"
        return self._work(out, x)

    def _work(self, *tensors: Any) -> Any:
        for tensor in tensors:
            assert tensor.device.type == "cuda" and tensor.is_contiguous(), f"NCCL does not take {tensor}"
        return _FakeWork()


class _FakeWork:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        raise AssertionError("the host looks whether the device is done")


def _flex(
    q: Any, k: Any, v: Any, *, block_mask: Any, scale: float | None, enable_gqa: bool, return_aux: Any = None
) -> Any:
    """In place of FlexAttention, whose kernels are made for values: the mask asked of every pair, and products."""
    import torch

    for tensor in (block_mask.kv_num_blocks, block_mask.full_kv_indices, block_mask.q_indices):
        assert tensor.device == q.device, "the block mask is elsewhere"
    batch, i, j = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2], k.shape[2]))
    seen = block_mask.mask_mod(batch[:, None, None], None, i[:, None], j).expand(len(batch), len(i), len(j))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=enable_gqa
    )
    return out if return_aux is None else (out, SimpleNamespace(lse=out.float().sum(-1)))


def _model(changes: Mapping[str, Any], fp8_layers: range = range(0)) -> Any:
    import torch

    from phalanx.model.config import ModelConfig
    from phalanx.model.decoder import Decoder

    sizes: dict[str, Any] = {"vocab_size": 512, "max_sequence": 256, "layers": 2, "hidden": 64, "heads": 4}
    config = ModelConfig(**(sizes | dict(changes)))
    return Decoder(config, device="cuda:0", compute_dtype=torch.bfloat16, fp8_layers=fp8_layers)


def _device() -> Any:
    import torch

    from phalanx.train.device import Device

    return Device(torch.device("cuda", 0), "fake", torch.bfloat16, 1)


def _batch(count: int, *, documents: bool) -> Any:
    import torch

    from phalanx.data.batch import Batch

    tokens, borders = torch.zeros(count, 256, dtype=torch.int64), torch.arange(256).expand(count, 256) // 100
    return Batch(tokens, tokens, torch.ones(count, 256), borders.int() if documents else None, torch.arange(count))


def step(
    optimizer: str = "adamw",
    *,
    bits: int = 32,
    documents: bool = False,
    recompute: str = "none",
    compiled: bool = False,
    offload: float = 0.0,
    fp8_layers: range = range(0),
    kernel: Any = None,
    **changes: Any,
) -> None:
    """Two optimizer steps as the training loop makes them, with a short last micro-batch, and held-out text."""
    import torch

    from phalanx.kernels.attention import CausalKernel
    from phalanx.model.offload import Offload, _CudaLanes
    from phalanx.optim.bad_step import BadStepJudge
    from phalanx.optim.build import build_optimizer
    from phalanx.optim.config import BadStepConfig, OptimConfig
    from phalanx.train.reports.step_record import StepRecord
    from phalanx.train.trainer import LocalTrainer

    device, model = _device(), _model(changes, fp8_layers)
    model.set_recompute(recompute)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    if offload:
        model.offload = Offload(offload, _CudaLanes(device.torch_device), least_bytes=1024)
    trainer = LocalTrainer(model, device)
    if kernel:
        trainer.use_attention(CausalKernel(kernel, 256))
    update = build_optimizer(OptimConfig(name=optimizer, state_bits=bits), trainer.parameters)  # type: ignore[arg-type]
    judge, record = BadStepJudge(BadStepConfig(), device.torch_device), StepRecord()
    for number in range(2):
        batch = _batch(3, documents=documents)
        loss = trainer.accumulate_gradients(batch, micro_batch=2, seed=0, step=number)
        norm, scale = update.clip()
        bad = judge.judge(loss, norm)
        update.set_lr(0.1)
        update.step(found_inf=bad, grad_scale=scale)
        trainer.zero_grad()
        trainer.weights_changed()
        record.add(number, (loss, norm, bad, trainer.total_weight), 0.1, 0, 0)
    assert trainer.held_out_loss([_batch(2, documents=documents)] * 2).device == torch.device("cuda", 0)
    tensors = [*trainer.parameters.values(), *update.state_tensors().values(), *judge.state_tensors().values()]
    assert all(tensor.device.type == "cuda" for tensor in tensors)


def engine(*, fp8_layers: range = range(0), **changes: Any) -> None:
    """The same step by the engine of spread models, of one rank."""
    import torch

    from phalanx.core.layout import Layout
    from phalanx.model.config import ModelConfig
    from phalanx.parallel.apply import Build, build_engine
    from phalanx.parallel.config import ParallelConfig
    from phalanx.parallel.group import Group

    class Alone:
        layout, rank = Layout(), 0

        def group(self, *_axes: Any) -> Group:
            return Group.alone()

        def named(self, _name: str, _ranks: Any, _axes: Any = ()) -> Group:
            return Group.alone()

    sizes: dict[str, Any] = {"vocab_size": 512, "max_sequence": 256, "layers": 2, "hidden": 64, "heads": 4}
    build = Build(256, torch.device("cuda", 0), torch.bfloat16, seed=0, blank=True, fp8_layers=fp8_layers)
    config = ParallelConfig(replicate=1, shard=1, tensor=1, pipeline=1, context=1)
    made = build_engine(ModelConfig(**(sizes | changes)), config, Alone(), build)
    for number in range(2):
        made.accumulate_gradients(_batch(3, documents=True), micro_batch=2, seed=0, step=number)
        made.zero_grad()
        made.weights_changed()
    made.held_out_loss([_batch(2, documents=True)])


def spread(recompute: str = "none", model: Mapping[str, Any] | None = None, **axes: Any) -> None:
    """The second of two steps of a layout's first and last rank: nothing waits for the device, nor asks how far it is.

    Those between them do what one of these does too.
    """
    import torch

    from phalanx.core.layout import Axis
    from phalanx.model.config import ModelConfig
    from phalanx.optim.bad_step import BadStepJudge
    from phalanx.optim.build import build_optimizer
    from phalanx.optim.config import BadStepConfig, OptimConfig
    from phalanx.parallel.apply import Build, build_engine
    from phalanx.parallel.config import ParallelConfig
    from phalanx.parallel.group import Group

    class Absent:
        """The groups of one rank whose peers are not there."""

        def __init__(self, rank: int) -> None:
            self.layout, self.rank = config.layout, rank

        def group(self, *wanted: Axis) -> Group:
            return self.named("", self.layout.members(self.rank, wanted))

        def named(self, _name: str, ranks: Any, _axes: Any = ()) -> Group:
            return Group(ranks, list(ranks).index(self.rank), lambda: _FakeNccl(len(ranks)))

    config = ParallelConfig(**axes)
    layers = 4 if config.pipeline != 1 else 2
    sizes: dict[str, Any] = {"vocab_size": 512, "max_sequence": 256, "layers": layers, "hidden": 64, "heads": 4}
    device = torch.device("cuda", 0)
    build = Build(256, device, torch.bfloat16, seed=0, blank=True, recompute=recompute)  # type: ignore[arg-type]
    for rank in (0, config.layout.world_size - 1):
        made = build_engine(ModelConfig(**(sizes | dict(model or {}))), config, Absent(rank), build)
        how = {"reduction": made.reduction, "gradient_norm": made.gradient_norm}
        update, judge = build_optimizer(OptimConfig(), made.parameters, **how), BadStepJudge(BadStepConfig(), device)
        for number in range(2):
            batch = _batch(4, documents=True).to(device)
            _current().waits_are_errors = number > 0
            loss = made.accumulate_gradients(batch, micro_batch=2, seed=0, step=number)
            norm, scale = update.clip()
            update.step(found_inf=judge.judge(loss, norm), grad_scale=scale)
            made.zero_grad()
            made.weights_changed()
            _current().waits_are_errors = False
        made.held_out_loss([_batch(4, documents=True)])


def _current() -> Any:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


def decode(**changes: Any) -> None:
    """A prompt and two more tokens with a cache of keys and values, up to the logits, which are read back."""
    import torch

    model = _model(changes)
    with torch.no_grad():
        cache = model.new_cache(1, 64)
        for length in (20, 1, 1):
            tokens = torch.zeros(1, length, dtype=torch.int64).to("cuda:0")
            logits = model.logits(model(tokens, cache=cache)[:, -1])
    assert logits.device == torch.device("cuda", 0)


def blocks() -> None:
    """Two pieces of a ring, forward and backward, by every kernel."""
    import torch

    from phalanx.parallel.context.blocks import tried

    made = [torch.zeros(2, n, keys, 16, dtype=torch.bfloat16).to("cuda:0") for n, keys in ((4, 64), (2, 128), (2, 128))]
    for kernel in ("cudnn", "flash", "flex"):
        results = tried(kernel, 64)(*made, made[0])  # type: ignore[arg-type]
        assert all(x.device == torch.device("cuda", 0) for x in results)


def counters() -> None:
    """Hashes of rows, and masks of a slice of them."""
    import torch

    from phalanx.kernels.counter import keep_mask, row_states

    rows = torch.arange(5, device="cuda:0")
    assert keep_mask(1, rows, 7, 0.5, offset=3).device == row_states(1, rows).device == rows.device


WINDOWS: dict[str, Any] = {"attention": ("window", "full"), "window": 50, "kv_heads": 2}
LEARNED: dict[str, Any] = {"position": "learned", "norm": "layer", "bias": "all", "z_loss": 1e-4}
CAPPED: dict[str, Any] = {"logit_softcap": 30.0, "qk_norm": True, "tie_embeddings": False}
MATH: dict[str, Any] = {"attention_dropout": 0.1, "attention_backend": "math"}

CASES: dict[str, Callable[[], None]] = {
    "adamw, dropout, documents": partial(step, documents=True, dropout=0.1),
    "adamw, learned positions": partial(step, **LEARNED),
    "adamw, states of 8 bits": partial(step, bits=8),
    "adamw, states of 16 bits": partial(step, bits=16),
    "lamb, learned positions": partial(step, "lamb", **LEARNED),
    "came, windows, documents": partial(step, "came", documents=True, **WINDOWS, **CAPPED),
    "muon, dropped attention": partial(step, "muon", block="parallel", residual="compute", **MATH),
    "selective recompute": partial(step, documents=True, recompute="selective", dropout=0.1),
    "first product of the MLP again": partial(step, recompute="mlp", documents=True),
    "offload": partial(step, documents=True, offload=1.0, dropout=0.1),
    "offload, full recompute": partial(step, recompute="full", offload=0.5, **LEARNED),
    "full recompute": partial(step, recompute="full", **MATH),
    "compiled": partial(step, compiled=True),
    "compiled, learned positions, recompute": partial(step, compiled=True, recompute="selective", **LEARNED),
    "compiled, offload, first product again": partial(step, compiled=True, offload=1.0, recompute="mlp"),
    "compiled, cudnn": partial(step, compiled=True, kernel="cudnn", kv_heads=2),
    "compiled, windows, documents": partial(step, compiled=True, documents=True, **WINDOWS),
    "cudnn": partial(step, kernel="cudnn", kv_heads=2),
    "cudnn, selective recompute": partial(step, kernel="cudnn", recompute="selective", **CAPPED),
    "flash, learned positions": partial(step, kernel="flash", **LEARNED),
    "flex where all is plain": partial(step, kernel="flex", kv_heads=1),
    "efficient": partial(step, kernel="efficient", kv_heads=2),
    "cudnn by name, windows": partial(step, attention_backend="cudnn", **WINDOWS),
    "ring of blocks": blocks,
    "decoding": partial(decode, **WINDOWS),
    "decoding, learned positions": partial(decode, **LEARNED),
    "engine": partial(engine, dropout=0.1),
    "engine, dropped attention": partial(engine, **MATH),
    "products in 8 bits": partial(step, fp8_layers=range(1, 2)),
    "products in 8 bits, biases": partial(step, fp8_layers=range(2), recompute="selective", bias="all"),
    "compiled, products in 8 bits": partial(step, compiled=True, fp8_layers=range(1, 2)),
    "engine, products in 8 bits": partial(engine, fp8_layers=range(2), block="parallel"),
    "counters": counters,
    "replicate": partial(spread, replicate=2),
    "zero 1": partial(spread, shard=2, reduce_dtype="bf16"),
    "zero 2, replicate": partial(spread, shard=2, replicate=2, zero=2),
    "zero 3, replicate": partial(spread, shard=2, replicate=2, zero=3, recompute="selective"),
    "tensor": partial(spread, tensor=2, model={"dropout": 0.1}),
    "tensor, chunked, parallel block": partial(spread, tensor=2, tensor_overlap="chunked", model={"block": "parallel"}),
    "1f1b": partial(spread, pipeline=2, model={"tie_embeddings": True}),
    "zero bubble": partial(spread, pipeline=2, schedule="interleaved_zero_bubble"),
    "zbv, zero 3": partial(spread, pipeline=2, shard=2, zero=3, schedule="zbv"),
    "ring, full attention": partial(spread, context=2, model={"dropout": 0.1, "layers": 1}),
    "ring": partial(spread, context=2, model=WINDOWS | {"dropout": 0.1, "layers": 1}),
    "all to all": partial(spread, context=2, context_method="all_to_all", model={"dropout": 0.1, "layers": 1}),
}


def main() -> None:
    """Walk through the cases that are named; the last line is what went wrong, as JSON."""
    import torch

    from phalanx.kernels import attention, fp8, loss
    from phalanx.optim import skipping

    torch.cuda.Event, torch.cuda.Stream = _Event, _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = lambda _stream: nullcontext()  # type: ignore[assignment,misc,return-value]
    loss.twin = fp8.twin = lambda like: None  # nor are the kernels of Triton
    skipping.twin = lambda parameters: _Launch  # type: ignore[assignment,return-value]
    attention._compiled_flex = lambda: _flex  # type: ignore[assignment]
    problems = {}
    for name in sys.argv[1:]:
        torch.compiler.reset()  # a process compiles for so many kinds of layers, which no case of its own has
        with _mode():
            try:
                CASES[name]()
                problems[name] = ""
            except Exception:
                problems[name] = traceback.format_exc()[-3000:]
    print(json.dumps(problems))


if __name__ == "__main__":
    main()
