"""Sampling from a decoder: prompts of any lengths side by side, token by token, in steps that never wait for the host.

A step takes the newest token of each row, and chooses the next one on the device. Its shapes and addresses stay the
same, so that on CUDA it is captured once and replayed as one graph; tokens come to the host in arrears, while the next
steps run. Where noise decides, it is a hash of (seed, prompt, which sample of it, position, token): what a prompt is
continued with depends neither on its neighbours nor on the device, up to the rounding of logits.

Shapes: B rows, P longest prompt, D hidden, V vocabulary, N candidates.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels.counter import column_states, make_key, row_states, uniform
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.layers import InputProjection, LossHead, OutputProjection

_PREFILL_TOKENS = 1 << 15
"""Tokens of prompts in one pass at most, so that long prompts take no more memory than their keys."""

_ARREARS = 8
"""Steps of a GPU that are looked at together, while as many others run."""

_KEY = 0x53616D706C696E67  # of the hash; the seed is in the streams

Capture = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None]]
"""Turns a step into something that repeats it; may run it meanwhile if it puts the tensors back as they were."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # logits are divided by it; 0 takes the likeliest token (greedy)
    top_p: float = 1.0  # sample from the fewest tokens whose probabilities reach this sum (nucleus, arXiv 1904.09751)
    top_k: int = 0  # sample from this many likeliest tokens; 0 = all, 1 = greedy
    seed: int = 0

    def __post_init__(self) -> None:
        for field, fits, cure in (
            ("temperature", self.temperature >= 0, "take 0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "take a number above 0, at most 1"),
            ("top_k", self.top_k >= 0, "take 0 (all) or more"),
        ):
            if not fits:
                raise UserError("is out of range", cure=cure, field=field, value=getattr(self, field))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken; also where a temperature is 0 to the devices that divide by it."""
        return self.temperature < torch.finfo(torch.float32).tiny or self.top_k == 1


def generate(
    model: Decoder,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Continue `tokens`; yields new ids, ends after a token of `stop` (which is not yielded) or `max_new_tokens`.

    Settings as of `Sampling`; torch's global generators are neither read nor disturbed.

    Raises:
        UserError: at the call, before sampling: no prompt, an id outside the vocabulary, a bad setting, or prompt and
            new tokens beyond `max_sequence`.
    """
    _check(model.config, [tokens], [max_new_tokens])
    sampling, stop = Sampling(temperature, top_p, top_k, seed), frozenset(stop)

    # A generator of its own, so that bad arguments are refused at the call and not at the first token.
    def run() -> Iterator[int]:
        sampler = Sampler(model, sampling, batch=1, max_length=len(tokens) + max_new_tokens)
        for (token,) in sampler.run([tokens], streams([tokens], seed), max_new_tokens):
            if token in stop:
                return
            yield token

    return run()


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Collection[int] = (),
    batch: int = 32,
) -> Iterator[list[int]]:
    """Continue each of `prompts`; yields the new ids of one after another, as soon as those of its batch are there.

    Each is continued as `generate` would; one that comes again, in another way: `prompts * n` makes n samples of each.

    Args:
        max_new_tokens: for all, or of each.
        batch: prompts at once at most.

    Raises:
        UserError: at the call, as `generate`; or `batch` is below 1.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if batch < 1:
        raise UserError("is out of range", cure="take 1 or more", field="batch", value=batch)
    _check(model.config, prompts, limits)
    sampling, stop = Sampling(temperature, top_p, top_k, seed), frozenset(stop)

    def run() -> Iterator[list[int]]:
        if not prompts:
            return
        batches = -(-len(prompts) // batch)
        rows = -(-len(prompts) // batches)  # as even as can be: a row without a prompt costs as much as one with
        longest = max(len(tokens) + limit for tokens, limit in zip(prompts, limits, strict=True))
        sampler = Sampler(model, sampling, batch=rows, max_length=longest)
        noise = streams(prompts, seed)
        for first in range(0, len(prompts), rows):
            part = slice(first, first + rows)
            texts: list[list[int]] = [[] for _ in prompts[part]]
            going = {row for row, limit in enumerate(limits[part]) if limit}
            for tokens in sampler.run(prompts[part], noise[part], max(limits[part])):
                for row in sorted(going):
                    if tokens[row] not in stop:
                        texts[row].append(tokens[row])
                    if tokens[row] in stop or len(texts[row]) == limits[first + row]:
                        going.remove(row)
                if not going:
                    break
            yield from texts

    return run()


def streams(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """The number (int64) of each prompt's stream of noise: of its tokens, and of how often they came before."""
    before: Counter[tuple[int, ...]] = Counter()
    numbers = []
    for prompt in map(tuple, prompts):
        numbers.append(make_key(seed, "prompt", before[prompt], " ".join(map(str, prompt))) - (1 << 63))
        before[prompt] += 1
    return numbers


class Sampler:
    """Continues batches of `batch` prompts, up to `max_length` tokens in all, with the same buffers and graphs.

    The model may go on training afterwards, but not while this is used. `capture` decides how a step is repeated; None:
    as a CUDA graph, or plainly where there is no CUDA.
    """

    def __init__(
        self, model: Decoder, sampling: Sampling, *, batch: int, max_length: int, capture: Capture | None = None
    ) -> None:
        self.device = model.embedding.weight.device
        self.model, self.sampling = inference_copy(model), sampling
        on_cuda = self.device.type == "cuda"
        self._capture = capture or (CudaGraphs(self.device) if on_cuda else _plain)
        self._steps: dict[int, Callable[[], None]] = {}
        # Chunks of steps whose tokens are still on their way to the host, and how many steps a chunk has.
        self._behind, self._arrears = (1, _ARREARS) if on_cuda else (0, 1)
        with torch.inference_mode():
            self.cache = self.model.new_cache(batch, max_length)
            self.token_B, self.stream_B = torch.zeros(2, batch, dtype=torch.int64, device=self.device)
            self._columns_V = column_states(_KEY, torch.arange(model.config.vocab_size, device=self.device))
            shape = (self._behind + 1, self._arrears, batch)
            self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=on_cuda)

    def run(self, prompts: Sequence[Sequence[int]], noise: Sequence[int], steps: int) -> Iterator[list[int]]:
        """The next token of each row, `steps` times; fewer prompts than rows leave the last rows without meaning."""
        waiting: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()  # tokens of some steps, on their way
        done = number = 0
        while done < steps:
            count = min(self._arrears, steps - done) if done else 1  # the first token alone, for who waits for it
            with torch.inference_mode():  # Not held over a yield: the mode would leak into the caller.
                host = self._host[number % len(self._host), :count]
                for tokens_B in host:
                    if done:
                        self.step()
                    else:
                        self.begin(prompts, noise)
                    tokens_B.copy_(self.token_B, non_blocking=self._behind > 0)
                    done += 1
                event = torch.cuda.current_stream(self.device).record_event() if self._behind else None
                waiting.append((host, event))
            number += 1
            while waiting and (len(waiting) > self._behind or done == steps):
                host, event = waiting.popleft()
                if event is not None:
                    event.synchronize()
                yield from host.tolist()

    def begin(self, prompts: Sequence[Sequence[int]], noise: Sequence[int]) -> None:
        """Take new prompts, and choose the first token behind each."""
        idle = len(self.token_B) - len(prompts)
        prompts, noise = [*prompts, *[prompts[0]] * idle], [*noise, *[noise[0]] * idle]
        longest = max(map(len, prompts))
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in prompts]
        tokens_BP = torch.tensor(padded, device=self.device)
        lengths_B = torch.tensor([len(tokens) for tokens in prompts], device=self.device)
        self.stream_B.copy_(torch.tensor(noise))
        self.cache.clear()
        # The cache takes all tokens, a run of positions at a time; of each row the state of the last one is kept.
        length = max(_PREFILL_TOKENS // len(tokens_BP), 1)
        found: Tensor | None = None
        for start in range(0, tokens_BP.shape[1], length):
            part_BS = tokens_BP[:, start : start + length]
            size = part_BS.shape[1]
            hidden_BSD = self.model(part_BS, cache=self.cache, lengths_B=(lengths_B - start).clamp(0, size))
            last_B = lengths_B - 1 - start
            last_BD = hidden_BSD[self.cache.rows_B, last_B.clamp(0, size - 1)]
            found = last_BD if found is None else torch.where((last_B >= 0)[:, None], last_BD, found)
        assert found is not None
        self._choose(found)
        self.cache.length = min(self.cache.length, self.cache.max_length - 1)

    def step(self) -> None:
        """Take the newest token of each row and choose the one behind it; waits for nothing."""
        cache = self.cache
        reach = cache.reach(1)
        if reach not in self._steps:
            self._steps[reach] = self._capture(self._decode, (self.token_B, cache.length_B))
        self._steps[reach]()
        cache.length = min(cache.length + 1, cache.max_length - 1)

    def _decode(self) -> None:
        length = self.cache.length
        hidden_B1D = self.model(self.token_B[:, None], cache=self.cache)
        self.cache.length = length  # The host counts in `step`: replaying a graph does not come here.
        self._choose(hidden_B1D[:, 0])

    def _choose(self, hidden_BD: Tensor) -> None:
        logits_BV = self.model.logits(hidden_BD)[:, : self.model.config.vocab_size]
        self.token_B.copy_(choose(logits_BV, self.sampling, self.stream_B + self.cache.length_B, self._columns_V))
        # Rows that are full already wait for the others at their last slot.
        self.cache.length_B.clamp_(max=self.cache.max_length - 1)


def choose(logits_BV: Tensor, sampling: Sampling, noise_B: Tensor, columns_V: Tensor) -> Tensor:
    """The next token of each row, int64 (B,).

    A token wins with its probability if it has the most of probability over an exponential variate of its own; so no
    sum decides, whose rounding would depend on the device.
    """
    if sampling.is_greedy:
        return logits_BV.argmax(dim=-1)
    likely_BN, ids_BN = candidates(logits_BV, sampling)
    columns = columns_V if ids_BN is None else columns_V[ids_BN]
    exponential_BN = uniform(row_states(_KEY, noise_B), columns).log_().neg_()
    best_B1 = (likely_BN / exponential_BN).argmax(dim=-1, keepdim=True)
    return (best_B1 if ids_BN is None else ids_BN.gather(1, best_B1)).squeeze(1)


def candidates(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Probabilities (B, N), with 0 for what is cut off, and whose they are (None: those of all tokens, in order).

    Of the first `top_k`, the fewest stay that sum to `top_p`. Sums are of whole 2^-40ths: exact in any order.
    """
    highest_B1 = logits_BV.amax(dim=-1, keepdim=True)
    probabilities_BV = ((logits_BV - highest_B1) / sampling.temperature).softmax(dim=-1)
    if sampling.top_k:
        likely_BN, ids_BN = probabilities_BV.topk(min(sampling.top_k, probabilities_BV.shape[1]))
    elif sampling.top_p < 1:
        likely_BN, ids_BN = probabilities_BV.sort(descending=True, stable=True)
    else:
        return probabilities_BV, None
    if sampling.top_p < 1:
        parts_BN = (likely_BN.double() * 2.0**40).to(torch.int64)
        before_BN = parts_BN.cumsum(dim=-1) - parts_BN
        likely_BN = likely_BN.masked_fill(before_BN >= math.ceil(sampling.top_p * 2.0**40), 0.0)
    return likely_BN, ids_BN


def inference_copy(model: Decoder) -> Decoder:
    """`model` for generation: without its hooks, and never compiled, since it would be anew for each length of a text.

    Weights are shared, but matrices are cast once instead of in every step. A GPU that has no room for that casts on.
    """
    stored = model.embedding.weight
    copy = Decoder(model.config, device="meta", dtype=stored.dtype, compute_dtype=model.compute_dtype)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    cast = []  # names of weights that are read in the compute type alone
    for path, module in copy.named_modules():
        if isinstance(module, InputProjection | OutputProjection | LossHead):
            cast.append(f"{path}.weight")
        if isinstance(module, InputProjection) and module.bias is not None:
            cast.append(f"{path}.bias")
    cast = [name for name in cast if weights[name].dtype != model.compute_dtype]
    if _has_room(sum(weights[name].numel() for name in cast) * model.compute_dtype.itemsize, stored.device):
        weights |= {name: weights[name].to(model.compute_dtype) for name in cast}
    copy.load_state_dict(weights, assign=True)
    copy.causal_kernel = model.causal_kernel
    return copy.requires_grad_(False).eval()


def _has_room(size_bytes: int, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free_bytes = torch.cuda.mem_get_info(device)[0]
    free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size_bytes <= free_bytes // 2  # the other half is for keys, values and activations


def _plain(step: Callable[[], None], _changed: Sequence[Tensor]) -> Callable[[], None]:
    return step


class CudaGraphs:
    """Captures steps as CUDA graphs, which share the memory of what lies between their kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = 0
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None], changed: Sequence[Tensor]) -> Callable[[], None]:
        """`step` as one launch; it has run once by then, for libraries to settle, and `changed` is as before."""
        with torch.cuda.device(self.device):
            before = [tensor.clone() for tensor in changed]
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                step()
            here.wait_stream(aside)
            for tensor, was in zip(changed, before, strict=True):
                tensor.copy_(was)
            graph = torch.cuda.CUDAGraph()
            # Other threads, of a process that trains, may go on using the device.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        self.captured += 1
        return graph.replay


def _check(config: ModelConfig, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    for number, (tokens, limit) in enumerate(zip(prompts, limits, strict=True), start=1):
        which = f"prompt {number}: " if len(prompts) > 1 else ""
        if not tokens:
            raise UserError(f"{which}there is nothing to continue", cure="give a prompt of at least one token")
        outside = [token for token in tokens if not 0 <= token < config.vocab_size]
        if outside:
            problem = f"is outside the vocabulary of {config.vocab_size}"
            raise UserError(problem, cure="use the model's own tokenizer", field=f"{which}token", value=outside[0])
        if limit < 0:
            raise UserError("is out of range", cure="take 0 or more", field="max_new_tokens", value=limit)
        total, longest = len(tokens) + limit, config.max_sequence
        if config.position != "none" and total > longest:
            problem = f"prompt ({len(tokens)} tokens) and new tokens ({limit}) are longer than max_sequence ({longest})"
            raise UserError(which + problem, cure="shorten the prompt, or generate fewer tokens")
