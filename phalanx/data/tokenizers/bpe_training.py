"""Making a tokenizer of the sources: the alphabet of all the text, or a byte-level BPE (Sennrich et al. 2016).

The package `tokenizers` trains a BPE in native code that no signal interrupts: for minutes, with much text. A process
of its own can be ended at once, and has written nothing then. Started as ``python -m
phalanx.data.tokenizers.bpe_training PID``, it gets the config as a line of JSON and answers with one.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.core.errors import UserError
from phalanx.data.config import TOKEN_KINDS, DataConfig, SourceConfig, TokenizerConfig
from phalanx.data.shuffle import Permutation, derive_key
from phalanx.data.sources.documents import read_pieces, was_skipped
from phalanx.data.sources.input_files import HoldOutRule, WorkUnit, list_files, plan_units
from phalanx.data.tokenizers.tokenizer import END_OF_TEXT
from phalanx.ipc.processes import die_with_parent, start_helper

# The pattern of cl100k (GPT-4), as in Llama 3's tokenizer.json.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(texts: Iterator[str], config: TokenizerConfig) -> str:
    """The ``tokenizer.json`` of a BPE with at most `config.vocab_size` ids: end-of-text, 256 bytes (as in GPT-2), then
    merges; the same for the same texts on every machine. UserError: there is no text."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=config.pattern == "gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    if config.pattern == "gpt4":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_GPT4), "isolated"), words])
    else:
        tokenizer.pre_tokenizer = words
    first = next(texts, None)
    if first is None:
        cure = "add text, or hold less out"
        raise UserError("there is no text to train the tokenizer on", cure=cure, field="data.sources")
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    content: str = tokenizer.to_str()
    return content


MIN_SAMPLE_BYTES = 1 << 18
LITTLE_BYTES = 1 << 20  # trained on in less time than a process takes to start


def _make_bpe(config: DataConfig, sources: list[SourceConfig]) -> str:
    if sum(file.size for source in sources for file in list_files(source)) <= LITTLE_BYTES:
        return _train_here(config)
    process = start_helper(__name__)
    try:
        answer, _ = process.communicate(config.model_dump_json(exclude_unset=True) + "\n")
    finally:
        process.kill()
        process.wait()
    if not answer:
        cure = "look above for its last words; -9 is often too little memory: lower data.tokenizer.training_bytes"
        raise UserError(f"the process that trains the tokenizer ended with code {process.returncode}", cure=cure)
    message = json.loads(answer)
    if "problem" in message:
        raise UserError(**message["problem"])
    content: str = message["content"]
    return content


def _train_here(config: DataConfig) -> str:
    texts = training_texts(config, sources_of(config))
    if (first := next(texts, None)) is None:  # the one document there is was chosen to be held out
        whole = config.model_copy(update={"validation_fraction": 0.0})
        return train_bpe(training_texts(whole, sources_of(config)), config.tokenizer)
    return train_bpe(itertools.chain([first], texts), config.tokenizer)


def _make_alphabet(config: DataConfig, sources: list[SourceConfig]) -> str:
    """Every character of all the sources, held-out text too, so that no text is without an id."""
    seen = np.zeros(0x110000, bool)
    for source in sources:
        for unit in plan_units(source, list_files(source), 0.0):
            for text in _texts(source, unit, None, 0):
                seen[np.frombuffer(text.encode("utf-32-le"), np.uint32)] = True
    return "".join(map(chr, np.flatnonzero(seen)))


MAKERS: dict[str, Callable[[DataConfig, list[SourceConfig]], str]] = {"bpe": _make_bpe, "chars": _make_alphabet}


def training_texts(config: DataConfig, sources: list[SourceConfig]) -> Iterator[str]:
    """About `training_bytes` of training text (held-out documents left out), spread over all the sources.

    Units of work are taken in a keyed order, some of each, until there is enough; so the same text is chosen on every
    machine and a huge corpus is not read through.
    """
    tail = config.held_out if config.validation_split == "tail" else 0.0
    units = [(source, unit) for source in sources for unit in plan_units(source, list_files(source), tail)]
    share = max(config.tokenizer.training_bytes // len(units), MIN_SAMPLE_BYTES)
    rule = HoldOutRule(config.held_out, config.validation_seed)
    left = config.tokenizer.training_bytes
    for number in Permutation(derive_key("tokenizer"), len(units))(np.arange(len(units))).tolist():
        source, unit = units[number]
        for text in _texts(source, unit, rule, share):
            yield text
            left -= len(text.encode())
            if left <= 0:
                return


def _texts(source: SourceConfig, unit: WorkUnit, rule: HoldOutRule | None, limit: int) -> Iterator[str]:
    """The text of a unit, the training split's alone when there is a `rule`, up to `limit` bytes (0: all)."""
    size = 0
    for part in unit.parts:
        split = rule.split(part.name, part) if rule else "train"
        for piece in read_pieces(source, part):
            if was_skipped(piece) is not None:
                continue
            if rule and piece.name is not None:
                split = rule.split(piece.name, part)
            if split == "train":
                yield piece.text
                size += len(piece.text.encode())
            if limit and size >= limit:
                return


def sources_of(config: DataConfig) -> list[SourceConfig]:
    """The sources that a tokenizer is made of."""
    every = config.sources + (config.validation_sources if config.tokenizer.kind == "chars" else ())
    return [source for source in every if source.kind not in TOKEN_KINDS]


def main() -> None:
    """Train the BPE of the config that stdin gives, and write it to stdout."""
    die_with_parent(int(sys.argv[1]))
    try:
        answer: dict[str, object] = {"content": _train_here(DataConfig.model_validate_json(sys.stdin.readline()))}
    except UserError as error:
        answer = {"problem": {"problem": str(error).removesuffix(f"; {error.cure}"), "cure": error.cure}}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
