"""Token ids to text, a few ids at a time.

What has been handed out is never taken back and never ends in a broken character. There are two
ways, chosen by looking at the tokenizer's decoder (`TokenBytes.of`):

- `ByteStream`: every token is a fixed sequence of bytes, so an incremental UTF-8 decoder does it in
  O(1) per token. Byte-level BPE (GPT-2, Llama 3, Qwen), and SentencePiece BPE with byte fallback
  (Llama 2, Mistral, Gemma).
- `WindowStream`: anything else; decodes a short window twice per token and hands out the difference.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5  # vLLM's INITIAL_INCREMENTAL_DETOKENIZATION_OFFSET
_MAX_WINDOW_TOKENS = 8  # more than the bytes of a character: the text is broken, not unfinished


class StreamDecoder(Protocol):
    """Decodes one continuation."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain; empty while a character is unfinished."""

    def flush(self) -> str:
        """The rest, unfinished characters as U+FFFD. Nothing may follow."""


class TokenBytes:
    """The bytes of every token of one tokenizer, for tokenizers whose decoder works by token.

    Args:
        backend: the tokenizer.
        convert: the text of a token, as the vocabulary holds it, to bytes.
        strip: how many leading spaces the decoder takes off a text.
    """

    def __init__(self, backend: Tokenizer, convert: Callable[[str], bytes], strip: int) -> None:
        self.strip = strip
        self._backend = backend
        self._convert = convert
        self._bytes: dict[int, bytes] = {}
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._hidden = {token_id for token_id, token in added.items() if token.special}

    @classmethod
    def of(cls, backend: Tokenizer) -> "TokenBytes | None":
        """The table of a tokenizer, or None if its decoder does not work token by token."""
        if backend.decoder is None:
            return None
        spec = json.loads(backend.decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(backend, _byte_level_bytes, strip=0)
        # In the order of transformers' LlamaTokenizer and GemmaTokenizer.
        strip = 0
        if kinds[-1:] == ["Strip"] and steps[-1]["content"] == " " and steps[-1]["stop"] == 0:
            strip = steps[-1]["start"]
            kinds.pop()
        if kinds == ["Replace", "ByteFallback", "Fuse"] and "String" in steps[0]["pattern"]:
            old, new = steps[0]["pattern"]["String"], steps[0]["content"]
            return cls(backend, lambda token: _byte_fallback_bytes(token, old, new), strip)
        return None

    def of_token(self, token_id: int) -> bytes:
        """The token's bytes, also those of special tokens; empty for an id that is no token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._convert(token)
        return found

    def visible(self, token_id: int) -> bytes:
        """The token's part of the output: nothing for special tokens."""
        return b"" if token_id in self._hidden else self.of_token(token_id)


class ByteStream:
    """StreamDecoder over the bytes of tokens.

    Equal to `tokenizer.decode(ids, skip_special_tokens=True)`, with one exception: where a run of
    byte-fallback tokens holds an error, `decode` replaces every byte of the run, so it could say
    nothing before the run has ended. This replaces the broken parts only, as byte-level tokenizers
    do.

    Args:
        table: the tokenizer's.
        continues: text comes before this one, so that a leading space is part of it.
    """

    def __init__(self, table: TokenBytes, continues: bool) -> None:
        self._table = table
        self._strip = 0 if continues else table.strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._stripped(self._utf8.decode(b"".join(map(self._table.visible, token_ids))))

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowStream:
    """StreamDecoder over any decoding function, as TGI and vLLM do it.

    Decodes the last tokens with and without the new one. Text that ends in U+FFFD waits for the rest
    of the character, but not for longer than a character can be.

    Args:
        decode: token ids to text.
        context: token ids before the first one; their end is needed for the spaces between words.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._told = len(self._ids)  # how many of them are in what has been handed out

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self.flush()
        unfinished = not text or text.endswith(_REPLACEMENT)
        if unfinished and len(self._ids) - self._told < _MAX_WINDOW_TOKENS:
            return ""
        if text:  # what was new is the next window's context
            del self._ids[: self._told]
            self._told = len(self._ids)
        else:  # special tokens: the context stays
            del self._ids[self._told :]
        return text

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._told])) :]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, src/encoder.py: bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """As tokenizers' ByteLevel decoder: added tokens outside the alphabet stand for themselves."""
    try:
        return bytes(_BYTE_LEVEL[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str, old: str, new: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(old, new).encode()
