"""How many token ids a config leads to, before anything is prepared."""

from __future__ import annotations

from phalanx.core.errors import UserError
from phalanx.data.config import DataConfig, TokenizerConfig
from phalanx.data.tokenizers import find_spec, open_tokenizer


def configured_vocab_size(config: TokenizerConfig) -> int:
    """The number of token ids of the tokenizer that `config` names.

    For kind bpe it is what was asked for; a corpus with too few different words may give less.

    Raises:
        UserError: it is known only when the corpus has been read (kind chars), or the file cannot be read.
    """
    if config.kind == "bpe":
        return config.vocab_size
    if config.kind == "chars":
        cure = "run `phalanx data prepare`, which says it"
        raise UserError("the characters of the corpus are not counted yet", cure=cure, field="data.tokenizer.kind")
    return open_tokenizer(find_spec(DataConfig.model_construct(tokenizer=config))).vocab_size
