"""Training a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with the package `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from phalanx.core.errors import UserError
from phalanx.data.config import TokenizerConfig
from phalanx.data.tokenizers.tokenizer import END_OF_TEXT

# The pattern of cl100k (GPT-4), as in Llama 3's tokenizer.json.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_bpe(texts: Iterator[str], config: TokenizerConfig) -> str:
    """The ``tokenizer.json`` of a BPE with at most `config.vocab_size` ids: end-of-text, 256 bytes, then merges.

    The result is the same for the same texts on every machine.

    Raises:
        UserError: there is no text.
    """
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
    tokenizer.train_from_iterator(_chain(first, texts), trainer)
    content: str = tokenizer.to_str()
    return content


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
