"""The demo model's tokenizer: a byte-level BPE of its corpus, with ChatML."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from actors.checkpoints.chatml import SPECIAL_TOKENS, byte_level, for_transformers

_MARKS = re.compile(r"<\|[a-z_]+\|>")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens, the special ones last."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_MARKS.sub("", text) for text in texts), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write it as transformers reads it, `tokenizer.json` without blanks."""
    for_transformers(tokenizer).save_pretrained(directory)
    file = directory / "tokenizer.json"
    compact = json.dumps(
        json.loads(file.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":")
    )
    file.write_text(compact + "\n", encoding="utf-8")
