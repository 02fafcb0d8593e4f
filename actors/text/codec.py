"""Prompts to token ids, token ids to text.

`TextCodec` is shared by all requests of a replica and safe to use from several threads; what it
makes for one continuation (`stream`) is not.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.chat_template_utils import render_jinja_template

from actors.checkpoints.model_config import read_config
from actors.errors import ContextLengthExceeded, InvalidRequest
from actors.protocol import ChatPrompt, MessageForm, Prompt, TokenLogprob
from actors.text.detokenizer import ByteStream, StreamDecoder, TokenBytes, WindowStream
from actors.text.generation_config import GENERATION_CONFIG, read_generation_config
from actors.text.message_form import ChatConfig, ends_in_reasoning, form_of
from actors.text.validation import check_token_ids

# Arguments of `apply_chat_template` that belong to the request; the others are ours.
_TEMPLATE_OPTIONS = {"documents", "continue_final_message"}
_STUMBLES = TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError
_ASKS_FOR_NONE = re.compile(r"(\['content'\]|\[\"content\"\]|\.content) is (not )?none")
_END_TOKENS = 16  # of a prompt, enough to see a tag and the white space behind it


class TextCodec:
    """A tokenizer as the engine needs it.

    Args:
        tokenizer: of transformers.
        vocab_size: rows of the model's embedding; may exceed the tokenizer's own size.
        eos_ids: tokens that end a sequence.
        chat: how its messages are written, where the chat template does not show it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: Iterable[int],
        chat: ChatConfig | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        if chat is not None and chat.template is not None:
            tokenizer.chat_template = chat.template
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # characters
        self._table: TokenBytes | None = None
        # A subclass with a decode of its own (as CodeGen's) is more than its backend.
        if (
            isinstance(tokenizer, PreTrainedTokenizerFast)
            and type(tokenizer).decode is PreTrainedTokenizerBase.decode
            and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        ):
            self._table = TokenBytes.of(tokenizer.backend_tokenizer)
        self._special_ids = _hidden_ids(tokenizer)
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = set(parameters) - _TEMPLATE_OPTIONS - {"kwargs"}
        self._form = form_of(chat or ChatConfig(), _all_templates(tokenizer))

    @classmethod
    def load(cls, checkpoint_dir: str | Path, chat: ChatConfig | None = None) -> "TextCodec":
        """Read tokenizer and model configuration from a checkpoint in Hugging Face layout.

        End-of-sequence ids are those of the tokenizer, `generation_config.json` and `config.json`
        together: chat models often name the end of a turn in only one of them.

        Raises:
            ValueError: there is no tokenizer, or it or a configuration is unreadable.
        """
        directory = Path(checkpoint_dir)
        whole = read_config(directory)
        tokenizer, config = _read_tokenizer(directory, whole), whole.get_text_config()
        told = (
            tokenizer.eos_token_id,
            getattr(config, "eos_token_id", None),
            read_generation_config(directory).get("eos_token_id"),
        )
        ids = [i for each in told for i in (each if isinstance(each, list) else [each])]
        if any(type(i) not in (int, type(None)) for i in ids):
            raise ValueError(
                f"eos_token_id in {directory / GENERATION_CONFIG} must be a token id, or a list of them, "
                f"found {json.dumps(told[-1]):.80}"
            )
        eos_ids = {i for i in ids if i is not None and 0 <= i < config.vocab_size}
        return cls(tokenizer, config.vocab_size, eos_ids, chat)

    @property
    def fast_tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer, if its tokens have bytes of their own."""
        tokenizer = self._tokenizer
        if self._table is None or not isinstance(tokenizer, PreTrainedTokenizerFast):
            return None
        return tokenizer

    def encode_prompt(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """The prompt's token ids, at least one. Otherwise as `tokenize`.

        Args:
            max_tokens: there is no use for more. Text too long even for so many of the longest token is
                not tokenised: a megabyte takes a second.

        Raises:
            ContextLengthExceeded: the text is longer than that.
        """
        max_chars = None if max_tokens is None else max_tokens * self._longest_token
        ids = self.tokenize(prompt, add_special_tokens=add_special_tokens, max_chars=max_chars)
        if not ids:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise InvalidRequest("the prompt has no tokens; it must have at least one", param)
        return ids

    def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool | None = None,
        max_chars: int | None = None,
    ) -> tuple[int, ...]:
        """The prompt's token ids.

        Args:
            prompt: text, messages or ids.
            add_special_tokens: those that the tokenizer adds by itself, as BOS. When None, text gets
                them, and messages only have those that the chat template writes.
            max_chars: text that is longer is refused.

        Raises:
            InvalidRequest: ids outside the vocabulary, no chat template, or the template refused the
                messages.
        """
        if isinstance(prompt, ChatPrompt):
            param, text = "messages", self._render(prompt)
            adds = bool(add_special_tokens)
        elif isinstance(prompt, str):
            param, text = "prompt", prompt
            adds = add_special_tokens is not False
        else:
            check_token_ids(prompt, "prompt", self.vocab_size)
            return tuple(prompt)
        if max_chars is not None and len(text) > max_chars:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters; the model's context (engine.max_model_len) "
                f"never holds more than {max_chars}",
                param,
            )
        ids = self._encode(text, param, add_special_tokens=adds)
        check_token_ids(ids, param, self.vocab_size)
        return ids

    def message_form(self, prompt: ChatPrompt, prompt_ids: Sequence[int]) -> MessageForm:
        """How the answer to these messages is written; `prompt_ids` are those of `prompt`."""
        if self._form.reasoning is None:
            return self._form
        end = "".join(map(self.token_text, prompt_ids[-_END_TOKENS:]))
        return replace(self._form, in_reasoning=ends_in_reasoning(prompt, end))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a sequence, without special tokens."""
        return self._decode(token_ids, skip_special_tokens=True)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of any ids, with special tokens.

        Raises:
            InvalidRequest: one is outside the vocabulary.
        """
        check_token_ids(token_ids, "tokens", self.vocab_size)
        return self._decode(token_ids, skip_special_tokens=False)

    def describe(self) -> dict[str, str | None]:
        """Special tokens and the chat template, as vLLM's /tokenizer_info names them."""
        tokenizer = self._tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": _text_or_none(tokenizer.bos_token),
            "eos_token": _text_or_none(tokenizer.eos_token),
            "pad_token": _text_or_none(tokenizer.pad_token),
            "unk_token": _text_or_none(tokenizer.unk_token),
            "chat_template": _text_or_none(tokenizer.chat_template),
        }

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one continuation.

        Args:
            context: the ids that the text continues. Without them (a message of its own in a chat) the
                text starts as `decode` would start it: Llama 2's tokenizer drops a leading space.
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

    def unwritten(
        self, prompt: Prompt, prompt_ids: Sequence[int], add_special_tokens: bool | None
    ) -> Iterator[int]:
        """How many of the bytes of each token of a prompt its text is without: see `TokenLogprob`.

        A text is as it came, so it is without what the tokenizer has added. That of ids is `decode`'s.
        """
        if isinstance(prompt, str):
            around = self.tokenize("", add_special_tokens=add_special_tokens)
            added = [token_id for token_id in around if token_id in self._special_ids]
            pairs = enumerate(zip(added, prompt_ids, strict=False))
            begin = next((at for at, (one, other) in pairs if one != other), len(added))
            end = len(prompt_ids) - (len(added) - begin)
            shown = [begin <= at < end for at in range(len(prompt_ids))]
        else:
            shown = [token_id not in self._special_ids for token_id in prompt_ids]
        spaces = 0 if self._table is None else self._table.strip
        for token_id, is_shown in zip(prompt_ids, shown, strict=True):
            token = self.token_bytes(token_id)
            if not is_shown:
                yield len(token)
                continue
            cut = min(spaces, len(token) - len(token.lstrip(b" ")))
            spaces = spaces - cut if cut == len(token) else 0
            yield cut

    def token_logprob(
        self,
        token_id: int,
        logprob: float | None,
        top: Iterable[tuple[int, float]] = (),
        unwritten: int | None = None,
    ) -> TokenLogprob:
        """A log-probability with the token's text; `top` holds pairs of id and log-probability.

        Args:
            unwritten: of a prompt's token; None: it is one of an output, of which special ones are not in the text.
        """
        token = self.token_bytes(token_id)
        if unwritten is None:
            unwritten = len(token) if token_id in self._special_ids else 0
        return TokenLogprob(
            token_id=token_id,
            token=self.token_text(token_id),
            token_bytes=token,
            logprob=logprob,
            top=tuple(self.token_logprob(*pair) for pair in top),
            unwritten=unwritten,
        )

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

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
        try:
            try:
                return self._apply_template(prompt, prompt.messages)
            except TypeError:  # DeepSeek's templates add the arguments of tool calls to a string
                return self._apply_template(prompt, _with_arguments_as_text(prompt.messages))
        # A template is a program over the caller's messages: what it stumbles over, they sent.
        except _STUMBLES as exc:
            raise InvalidRequest(f"the chat template refused: {exc}", "messages") from exc

    def _apply_template(self, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
        options: dict[str, Any] = dict(prompt.template_kwargs)
        tools: list[Any] | None = (
            None if prompt.tools is None else [dict(tool) for tool in prompt.tools]
        )
        template = self._tokenizer.get_chat_template(tools=tools)
        if _ASKS_FOR_NONE.search(template):
            return _render_with_none(
                template, prompt, messages, tools, self._tokenizer.special_tokens_map | options
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            add_generation_prompt=prompt.add_generation_prompt,
            tokenize=False,
            **options,
        )
        assert isinstance(text, str)
        return text


def _read_tokenizer(directory: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """See `TextCodec.load`. Where no file has one, transformers makes one up that knows special tokens alone."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, config=config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever the library for its kind raises
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"the tokenizer in {directory} is unreadable ({told})") from error
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise ValueError(f"there is no tokenizer in {directory}; as a rule, tokenizer.json has it")
    return tokenizer


def _hidden_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Those that `decode` leaves out."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _render_with_none(
    template: str,
    prompt: ChatPrompt,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None,
    options: Mapping[str, Any],
) -> str:
    """As `apply_chat_template`, which leaves out what is None (5.23), and such a template then every call."""
    if prompt.continues and prompt.add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    last = len(messages) - 1
    given = [
        dict(message) if prompt.continues and i == last else _without_empty_content(message)
        for i, message in enumerate(messages)
    ]
    rendered: Any = render_jinja_template(
        [given],
        tools=tools,
        chat_template=template,
        add_generation_prompt=prompt.add_generation_prompt,
        **options,
    )
    return str(rendered[0][0])


def _without_empty_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """None beside tool calls, as OpenAI's API has it."""
    is_call = bool(message.get("tool_calls")) and not message.get("content")
    return {**message, "content": None} if is_call else dict(message)


def _with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _all_templates(tokenizer: PreTrainedTokenizerBase) -> str:
    """One after the other, where there are several by name."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
