"""OpenAI request bodies -> `actors.protocol`.

`null` means absent wherever a field is optional, and unknown fields are ignored: clients send many
that ask for nothing we could refuse (`user`, `store`, `metadata`, `service_tier`, `prediction`, ...).
Fields that would change the output and that we cannot honour are refused with
`unsupported_parameter`, never silently dropped. Beyond OpenAI's own fields the names are vLLM's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
)

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import ChatPrompt, GenerateRequest, Prompt, SamplingParams, SleepMode
from actors.text.validation import MAX_FLOAT32, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from serve_app.config.http import MAX_NAME_CHARS
from serve_app.openai.chat import ChatForm, Part, must_call
from serve_app.openai.fields import (
    MAX_COUNT,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TEXT_TOKENS,
    bounded_stops,
    parse_form,
    shown,
    to_list,
    to_logit_bias,
    to_prompts,
    to_stop,
    to_token_ids,
    to_tool_choice,
)
from serve_app.openai.grammar import GrammarFields
from serve_app.openai.keep_alive import KeepAlive

MAX_N = 128
MAX_INT64 = 2**63 - 1

ModelName = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Ids = Annotated[list[_TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
_Prompts = (
    str
    | _Ids
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
)
_StopIds = Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
_Biases = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(bounded_stops)
]

SEED_PROMPT = "The future of artificial intelligence is"

# Fields that we know and cannot honour -> the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "guided_whitespace_pattern": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
}
_UNSUPPORTED_BY_TEMPLATES: Mapping[str, tuple[object, ...]] = {
    "chat_template": ("",),
    "documents": ([],),
}
_UNSUPPORTED_IN_CHATS: Mapping[str, tuple[object, ...]] = {
    **_UNSUPPORTED,
    **_UNSUPPORTED_BY_TEMPLATES,
    "echo": (False,),
    "include_reasoning": (True,),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for: prompts for the model, and the form of the answer."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk, not in the last alone
    parallel_tool_calls: bool = True
    add_special_tokens: bool | None = None
    keep_alive_s: float | None = None
    # What the client calls fields, by the names that later errors have for them; others have the same.
    field_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """What the model may call."""
        (prompt, *_) = self.prompts
        return (prompt.tools or ()) if isinstance(prompt, ChatPrompt) else ()

    def requests(self, answer_id: str, trace: str | None = None) -> list[GenerateRequest]:
        """One request per prompt. Their ids are ours: callers may use theirs twice."""
        return [
            GenerateRequest(
                request_id=f"{answer_id}-{index}",
                prompt=prompt,
                sampling=self.sampling,
                n=self.n,
                echo=self.echo,
                stream=self.stream,
                add_special_tokens=self.add_special_tokens,
                trace=trace,
                keep_alive_s=self.keep_alive_s,
            )
            for index, prompt in enumerate(self.prompts)
        ]


class _StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Part):
    """How to choose the next token, as far as all forms of a body have it."""

    # None: the model's default, which only a replica knows.
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MAX_COUNT)

    @property
    def num_candidates(self) -> int | None:
        """`top_k` as `SamplingParams` has it."""
        return None if self.top_k is None else max(0, self.top_k)


class Sampling(SamplingFields, GrammarFields):
    """How to choose the next token, in vLLM's names."""

    n: int = Field(default=1, ge=1, le=MAX_N)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    stop: Annotated[
        tuple[str, ...], PlainValidator(to_stop, json_schema_input_type=_Stop | Stops)
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        PlainValidator(
            partial(to_token_ids, most=MAX_STOP_TOKEN_IDS), json_schema_input_type=_StopIds
        ),
    ] = ()
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    # None: the model's default, as above
    repetition_penalty: float | None = Field(default=None, gt=0, le=MAX_FLOAT32)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[int, float], PlainValidator(to_logit_bias, json_schema_input_type=_Biases)
    ] = Field(default_factory=dict)

    def params(
        self, *, max_tokens: int | None, logprobs: int | None, limit: str = "max_tokens"
    ) -> SamplingParams:
        """For an engine.

        Args:
            limit: what the client calls `max_tokens`.

        Raises:
            InvalidRequest: fields that are right, each by itself, exclude each other.
            UnsupportedParameter: as `grammar`.
        """
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most {limit} ({max_tokens}), found {self.min_tokens}",
                "min_tokens",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.num_candidates,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
            grammar=self.grammar(),
        )


class _Body(Sampling, KeepAlive):
    """What all three forms have in common."""

    model: ModelName | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    add_special_tokens: bool | None = None

    def ask(
        self,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None,
        field_names: Mapping[str, str] = MappingProxyType({}),
        logprobs: int | None = None,
        echo: bool = False,
        parallel_tool_calls: bool = True,
    ) -> Ask:
        limit = field_names.get("max_tokens", "max_tokens")
        include_usage = self.stream and bool(self.stream_options.include_usage)
        return Ask(
            model=self.model,
            prompts=prompts,
            sampling=self.params(max_tokens=max_tokens, logprobs=logprobs, limit=limit),
            n=self.n,
            echo=echo,
            stream=self.stream,
            include_usage=include_usage,
            continuous_usage=include_usage and bool(self.stream_options.continuous_usage_stats),
            parallel_tool_calls=parallel_tool_calls,
            add_special_tokens=self.add_special_tokens,
            keep_alive_s=self.keep_alive,
            field_names=field_names,
        )


class _NamedFunction(Part):
    name: str = Field(min_length=1)


class _ToolToCall(Part):
    type: Literal["function"]
    function: _NamedFunction


class ChatBody(ChatForm, _Body):
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tool_choice: Annotated[
        str | dict[str, Any],
        PlainValidator(
            to_tool_choice,
            json_schema_input_type=Literal["auto", "none", "required"] | _ToolToCall,
        ),
    ] = "auto"
    parallel_tool_calls: bool = True

    def must_call(self) -> tuple[str, ...]:
        """The names of the tools of which the answer must call one; none, if it need not.

        Raises:
            InvalidRequest: there is no such tool, or the answer must have another form as well.
        """
        choice = self.tool_choice
        if choice in ("auto", "none"):
            return ()
        if (grammar := self.grammar()) is not None:
            raise InvalidRequest(
                f"tool_choice and {grammar.param} exclude each other", grammar.param
            )
        return must_call(
            self.tools, choice["function"]["name"] if isinstance(choice, dict) else None
        )


class CompletionBody(_Body):
    prompt: Annotated[
        tuple[str | tuple[int, ...], ...],
        PlainValidator(to_prompts, json_schema_input_type=_Prompts),
    ]
    # 0 is for echo: the prompt and its log-probabilities, and no token behind them, as OpenAI and vLLM have it.
    max_tokens: int = Field(default=16, ge=0, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int = Field(default=1, ge=1, le=MAX_COUNT)


class SeedBody(_Body):
    prompt: str = SEED_PROMPT
    max_tokens: int = Field(default=50, ge=1, le=MAX_COUNT)
    n: Literal[1] = 1
    stream: bool = True
    temperature: float = Field(default=0.0, ge=0, le=2)


class _TokenizeOptions(Part):
    model: ModelName | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class TokenizeText(_TokenizeOptions):
    prompt: str


class TokenizeChat(ChatForm, _TokenizeOptions):
    pass


class DetokenizeForm(Part):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[
        tuple[int, ...],
        PlainValidator(
            partial(to_token_ids, most=MAX_TEXT_TOKENS),
            json_schema_input_type=Annotated[list[_TokenId], Field(max_length=MAX_TEXT_TOKENS)],
        ),
    ]


@dataclass(frozen=True, slots=True)
class TokenizeAsk:
    """POST /tokenize."""

    model: str | None
    prompt: Prompt
    add_special_tokens: bool | None
    return_token_strs: bool


class NoQuery(BaseModel):
    """The query of routes that have none: whoever asks of one model learns that the answer is of all."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelQuery(NoQuery):
    """The query of routes that tell of one model, or of all."""

    model: ModelName | None = None


class SleepForm(ModelQuery):
    """POST /sleep; from a query, so strings are read as what they stand for."""

    level: int = Field(default=1, ge=1, le=2)
    mode: SleepMode = SleepMode.WAIT
    hold: bool = False
    deep: bool = False


_Tags = Annotated[list[str], Field(max_length=2)]


class WakeForm(ModelQuery):
    """POST /wake_up; no tags means everything."""

    tags: Annotated[
        tuple[Literal["weights", "kv_cache"], ...],
        Field(max_length=2, fail_fast=True),
        BeforeValidator(to_list, json_schema_input_type=str | _Tags),
    ] = ()


class ScaleForm(ModelQuery):
    """POST /scaleout and /scalein."""

    replicas: int | None = Field(default=None, ge=0, le=MAX_COUNT)


def parse_chat(fields: Mapping[str, Any]) -> Ask:
    """POST /v1/chat/completions."""
    _refuse(fields, _UNSUPPORTED_IN_CHATS)
    body = parse_form(ChatBody, fields)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    # "none" keeps the tools from the model: it cannot call what it does not know.
    prompt = body.prompt(with_tools=body.tool_choice != "none", must_call=body.must_call())
    field_names = {"prompt": "messages"}
    if body.max_completion_tokens:
        field_names["max_tokens"] = "max_completion_tokens"
    logprobs = body.top_logprobs if body.logprobs else None
    return body.ask(
        (prompt,),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        field_names=field_names,
        logprobs=logprobs,
        parallel_tool_calls=body.parallel_tool_calls,
    )


def parse_completion(fields: Mapping[str, Any], max_continuations: int) -> Ask:
    """POST /v1/completions."""
    _refuse(fields, _UNSUPPORTED)
    body = parse_form(CompletionBody, fields)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, found 0", "max_tokens")
    if body.best_of > body.n:
        raise UnsupportedParameter(
            f"best_of must be at most n ({body.n}), found {body.best_of}", "best_of"
        )
    if (asked := len(body.prompt) * body.n) > max_continuations:
        raise InvalidRequest(
            f"prompts times n is {asked}; the limit is {max_continuations} "
            "(http.max_continuations)",
            "prompt",
        )
    if body.echo and (chars := body.n * sum(map(_echoed_chars, body.prompt))) > MAX_ECHOED_CHARS:
        raise InvalidRequest(
            f"echo repeats the prompts n times, some {chars} characters; the limit is {MAX_ECHOED_CHARS}",
            "echo",
        )
    return body.ask(body.prompt, max_tokens=body.max_tokens, logprobs=body.logprobs, echo=body.echo)


# An answer is in memory as a whole, several times over.
MAX_ECHOED_CHARS = 2**24
_CHARS_OF_TOKEN = 8


def _echoed_chars(prompt: str | tuple[int, ...]) -> int:
    """The text of token ids is not known here."""
    return len(prompt) if isinstance(prompt, str) else _CHARS_OF_TOKEN * len(prompt)


def parse_tokenize(fields: Mapping[str, Any]) -> TokenizeAsk:
    """POST /tokenize: a text, or messages."""
    body: TokenizeText | TokenizeChat
    prompt: Prompt
    if fields.get("messages") is None:
        body = parse_form(TokenizeText, fields)
        prompt = body.prompt
    else:
        _refuse(fields, _UNSUPPORTED_BY_TEMPLATES)
        body = parse_form(TokenizeChat, fields)
        prompt = body.prompt()
    return TokenizeAsk(body.model, prompt, body.add_special_tokens, body.return_token_strs)


def parse_seed(fields: Mapping[str, Any]) -> Ask:
    """POST /completions, the form of the project this one started from: greedy unless told."""
    _refuse(fields, _UNSUPPORTED)
    body = parse_form(SeedBody, fields)
    return body.ask((body.prompt,), max_tokens=body.max_tokens)


# What of a chat's body is not looked at in other dialects: how an answer is told, not what is in it.
_TELL_NOTHING = ("stream_options",)


def refuse_of_chats(
    fields: Mapping[str, Any], form: type[BaseModel], instead: Mapping[str, str]
) -> None:
    """Refuse what another dialect's body does not have, and a chat honours or refuses.

    Args:
        form: of such a body.
        instead: what to use in the place of some fields.

    Raises:
        UnsupportedParameter: a field would change the answer.
    """
    for name, of in ChatBody.model_fields.items():
        if name in form.model_fields or name in _TELL_NOTHING:
            continue
        value = fields.get(name)
        if value is None or value == {"type": "text"}:
            continue
        default = of.get_default(call_default_factory=True, validated_data={})
        is_nothing = not value and not default and default is not None
        if value != default and not is_nothing:
            use = f"; use {instead[name]}" if name in instead else ""
            raise UnsupportedParameter(f"{name} is not supported, found {shown(value)}{use}", name)
    _refuse(
        fields,
        {n: each for n, each in _UNSUPPORTED_IN_CHATS.items() if n not in form.model_fields},
    )


def _refuse(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[object, ...]]) -> None:
    for name, harmless in unsupported.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            raise UnsupportedParameter(f"{name} is not supported, found {shown(value)}", name)
