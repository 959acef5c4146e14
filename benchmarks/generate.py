"""Tokens per second of generation, ours and transformers', in turn: one prompt, and many at once.

    python benchmarks/generate.py                            # 312M parameters, 1 and 32 prompts, bf16 on a GPU
    python benchmarks/generate.py --device cpu --quick       # a small model on a CPU, in a minute

Both continue the same prompts with the same weights, which are random, and neither stops early. A first text of each
is not counted: it captures graphs and fills caches. Then the two take turns, so that a machine that is busy for a while
is busy for both; the medians are shown, and for how many prompts both choose the same tokens where the likeliest is
taken (in bf16 ties are many). Without transformers ours runs alone.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from support.harness import benchmark_parser, in_turns, timed, timer, write_json

from phalanx.core import units
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.generate import Sampler, Sampling, streams
from phalanx.model.huggingface import export_folder
from phalanx.model.logical_parameters import LogicalParameters, initialise
from phalanx.model.shapes import num_parameters
from phalanx.train.device import Device

SHAPES = {
    "tiny": ModelConfig(vocab_size=256, layers=2, hidden=64, heads=4, max_sequence=256),
    "small": ModelConfig(vocab_size=4096, layers=6, hidden=384, heads=6, max_sequence=1024),
    "312m": ModelConfig(vocab_size=4096, layers=24, hidden=1024, heads=16, max_sequence=1024),
}

Make = Callable[[], list[list[int]]]


@dataclass(frozen=True)
class Result:
    """What one contender reached: tokens of all prompts together over the time of prompts and tokens."""

    contender: str
    shape: str
    parameters: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    greedy: bool
    seconds: float
    tokens_per_s: float
    first_s: float
    same: int | None


def ours(model: Decoder, prompts: list[list[int]], count: int, sampling: Sampling) -> Make:
    sampler = Sampler(model, sampling, batch=len(prompts), max_length=len(prompts[0]) + count)
    noise = streams(prompts, sampling.seed)
    return lambda: [list(text) for text in zip(*sampler.run(prompts, noise, count), strict=True)]


def theirs(model: Decoder, prompts: list[list[int]], count: int, sampling: Sampling, device: Device) -> Make:
    """transformers' `generate`, with its defaults: attention by sdpa, a cache that grows."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        export_folder(model.config, LogicalParameters(model), None, Path(folder) / "model")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=device.compute_dtype, local_files_only=True
        )
    loaded.to(device.torch_device).eval()
    loaded.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=device.torch_device)
    how = {"do_sample": False}
    if not sampling.is_greedy:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}

    def make() -> list[list[int]]:
        found = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, pad_token_id=0, **how
        )  # fmt: skip
        return found[:, ids.shape[1] :].tolist()

    return make


def compare(name: str, model: Decoder, number: int, sampling: Sampling, device: Device, sizes: Sizes) -> list[Result]:
    """Both in turn on `number` prompts."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(model.config.vocab_size, (number, sizes.prompt), generator=generator)
    prompts: list[list[int]] = ids.tolist()
    makes = {"ours": ours(model, prompts, sizes.new, sampling)}
    if importlib.util.find_spec("transformers") is not None:
        makes["transformers"] = theirs(model, prompts, sizes.new, sampling, device)
    first_s = {who: timed(make) for who, make in makes.items()}
    texts: dict[str, list[list[int]]] = {}

    def once(who: str) -> None:
        texts[who] = makes[who]()

    times_s = in_turns({who: timer(partial(once, who)) for who in makes}, sizes.rounds, warm_up=0)
    same = {who: sum(a == b for a, b in zip(texts[who], texts["ours"], strict=True)) for who in makes}
    return [
        Result(
            contender=who,
            shape=name,
            parameters=num_parameters(model.config),
            prompts=number,
            prompt_tokens=sizes.prompt,
            new_tokens=sizes.new,
            greedy=sampling.is_greedy,
            seconds=statistics.median(times_s[who]),
            tokens_per_s=number * sizes.new / statistics.median(times_s[who]),
            first_s=first_s[who],
            same=same[who] if sampling.is_greedy else None,
        )
        for who in makes
    ]


@dataclass(frozen=True)
class Sizes:
    """Tokens of a prompt, new tokens, and how often each contender has its turn."""

    prompt: int
    new: int
    rounds: int


def print_table(results: list[Result], device: Device) -> None:
    title = f"{device.name}, torch {torch.__version__}, {device.compute_dtype}, {device.threads} threads"
    table = Table(title=title, title_justify="left")
    for column in (
        "contender",
        "parameters",
        "prompts",
        "new tokens",
        "choice",
        "time",
        "tokens/s",
        "first time",
        "same",
    ):
        table.add_column(column, justify="left" if column in ("contender", "choice") else "right")
    for each in results:
        table.add_row(
            each.contender,
            units.count(each.parameters),
            f"{each.prompts} x {each.prompt_tokens}",
            str(each.new_tokens),
            "greedy" if each.greedy else "T 0.8, top-p 0.95",
            units.duration(each.seconds),
            f"{each.tokens_per_s:,.1f}",
            units.duration(each.first_s),
            "" if each.same is None else f"{each.same} of {each.prompts}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = benchmark_parser(__doc__, quick="a tiny model, few tokens", as_json=True)
    parser.add_argument("--shape", choices=list(SHAPES), help="default: 312m on a GPU, small on a CPU, tiny if --quick")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 32], help="how many at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender has its turn")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    arguments = parser.parse_args()
    device = _device(arguments.device)
    usual = "312m" if device.torch_device.type == "cuda" else "small"
    name = arguments.shape or ("tiny" if arguments.quick else usual)
    sizes = Sizes(8, 16, 1) if arguments.quick else Sizes(arguments.prompt_tokens, arguments.tokens, arguments.rounds)
    model = Decoder(SHAPES[name], device=device.torch_device, compute_dtype=device.compute_dtype)
    initialise(model, 0)
    results = []
    for number in arguments.prompts:
        for sampling in (Sampling(0), Sampling(0.8, top_p=0.95)):
            results += compare(name, model, number, sampling, device, sizes)
    print_table(results, device)
    write_json(arguments.json, [asdict(result) for result in results])


def _device(wanted: str) -> Device:
    if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()):
        torch.set_float32_matmul_precision("high")
        where = torch.device("cuda", torch.cuda.current_device())
        return Device(where, torch.cuda.get_device_name(where), torch.bfloat16, torch.get_num_threads())
    return Device(torch.device("cpu"), "CPU", torch.float32, torch.get_num_threads())


if __name__ == "__main__":
    main()
