"""Prompts to token ids, token ids to text.

`TextCodec` is shared by all requests of a replica and safe to use from several threads; what it
makes for one continuation (`stream`) is not.
"""

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from actors.engine.detokenizer import ByteStream, StreamDecoder, TokenBytes, WindowStream
from actors.engine.validation import check_token_ids
from actors.errors import InvalidRequest
from actors.protocol import ChatPrompt, Prompt, TokenLogprob

# Arguments of `apply_chat_template` that belong to the request; the others are ours.
_TEMPLATE_OPTIONS = {"documents", "continue_final_message"}


class TextCodec:
    """A tokenizer as the engine needs it.

    Args:
        tokenizer: of transformers.
        vocab_size: rows of the model's embedding; may exceed the tokenizer's own size.
        eos_ids: tokens that end a sequence.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._table: TokenBytes | None = None
        # A subclass with a decode of its own (as CodeGen's) is more than its backend.
        if (
            isinstance(tokenizer, PreTrainedTokenizerFast)
            and type(tokenizer).decode is PreTrainedTokenizerBase.decode
            and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        ):
            self._table = TokenBytes.of(tokenizer.backend_tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = set(parameters) - _TEMPLATE_OPTIONS - {"kwargs"}

    @classmethod
    def load(cls, checkpoint_dir: str | Path) -> "TextCodec":
        """Read tokenizer and model configuration from a checkpoint in Hugging Face layout.

        End-of-sequence ids are those of the tokenizer, `generation_config.json` and `config.json`
        together: chat models often name the end of a turn in only one of them.
        """
        directory = Path(checkpoint_dir)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
        sources = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
        generation_config = directory / "generation_config.json"
        if generation_config.exists():
            sources.append(json.loads(generation_config.read_text()).get("eos_token_id"))
        eos_ids: set[int] = set()
        for source in sources:
            ids = source if isinstance(source, list) else [source]
            eos_ids.update(i for i in ids if i is not None and 0 <= i < config.vocab_size)
        return cls(tokenizer, config.vocab_size, eos_ids)

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, at least one.

        Text gets the special tokens that the tokenizer adds by itself; messages get those that the
        chat template writes.

        Raises:
            InvalidRequest: no tokens, ids outside the vocabulary, no chat template, or the template
                refused the messages.
        """
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if isinstance(prompt, ChatPrompt):
            ids = self._encode(self._render(prompt), param, add_special_tokens=False)
        elif isinstance(prompt, str):
            ids = self._encode(prompt, param, add_special_tokens=True)
        else:
            ids = tuple(prompt)
        check_token_ids(ids, param, self.vocab_size)
        if not ids:
            raise InvalidRequest("the prompt has no tokens; it must have at least one", param)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a sequence, without special tokens."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one continuation.

        Args:
            context: the ids that the text continues. Without them (an answer in a chat) the text
                starts as `decode` would start it: Llama 2's tokenizer drops a leading space.
        """
        if self._table is not None:
            return ByteStream(self._table, continues=bool(context))
        return WindowStream(self.decode, context)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, which may be part of a character; special tokens have their name."""
        if self._table is not None:
            return self._table.of_token(token_id)
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """The token's text; U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_logprob(
        self, token_id: int, logprob: float, top: Iterable[tuple[int, float]] = ()
    ) -> TokenLogprob:
        """A log-probability with the token's text; `top` holds pairs of id and log-probability."""
        return TokenLogprob(
            token_id=token_id,
            token=self.token_text(token_id),
            token_bytes=self.token_bytes(token_id),
            logprob=logprob,
            top=tuple(self.token_logprob(*pair) for pair in top),
        )

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:  # JSON can carry lone surrogates
            raise InvalidRequest(f"{param} is not valid Unicode: {exc.reason}", param) from exc
        # `verbose` is about texts longer than the model's context, which the engine refuses.
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return tuple(ids)

    def _render(self, prompt: ChatPrompt) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; send a text prompt", "messages")
        reserved = sorted(self._reserved & set(prompt.template_kwargs))
        if reserved:
            raise InvalidRequest(
                f"{', '.join(reserved)} cannot be set for the chat template", "chat_template_kwargs"
            )
        options: dict[str, Any] = dict(prompt.template_kwargs)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
                add_generation_prompt=prompt.add_generation_prompt,
                tokenize=False,
                **options,
            )
        # A template is a program over the caller's messages: what it stumbles over, they sent.
        except (TemplateError, TypeError, ValueError, LookupError) as exc:
            raise InvalidRequest(f"the chat template refused: {exc}", "messages") from exc
        assert isinstance(text, str)
        return text
