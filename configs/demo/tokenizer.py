"""The demo model's tokenizer: a byte-level BPE of its corpus, with ChatML."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The same text as corpus.chatml.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# How Qwen2's tokenizer cuts text into words (transformers, models/qwen2/tokenization_qwen2.py).
_WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"""
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_MARKS = re.compile(r"<\|[a-z_]+\|>")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of `vocab_size` tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
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
    wrapped(tokenizer).save_pretrained(directory)
    file = directory / "tokenizer.json"
    compact = json.dumps(
        json.loads(file.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":")
    )
    file.write_text(compact + "\n", encoding="utf-8")


def wrapped(tokenizer: Tokenizer) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
