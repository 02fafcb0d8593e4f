"""OpenAI request bodies -> `actors.protocol`.

`null` means absent wherever a field is optional, and unknown fields are ignored: clients send many
that ask for nothing we could refuse (`user`, `store`, `metadata`, `service_tier`, `prediction`, ...).
Fields that would change the output and that we cannot honour are refused with
`unsupported_parameter`, never silently dropped. Beyond OpenAI's own fields the names are vLLM's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import ChatPrompt, GenerateRequest, Prompt, SamplingParams, SleepMode
from serve_app.fields import (
    MAX_COUNT,
    parse_form,
    shown,
    to_list,
    to_logit_bias,
    to_prompts,
    to_stop,
    to_text,
    to_token_ids,
    to_tool_choice,
    wrong,
)

MAX_N = 128
MAX_INT64 = 2**63 - 1

SEED_PROMPT = "The future of artificial intelligence is"

# Fields that we know and cannot honour -> the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "audio": (),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client asked for: prompts for the model, and the form of the answer."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    n: int
    echo: bool
    stream: bool
    include_usage: bool

    def requests(self, answer_id: str) -> list[GenerateRequest]:
        """One request per prompt. Their ids are ours: callers may use theirs twice."""
        return [
            GenerateRequest(
                request_id=f"{answer_id}-{index}",
                prompt=prompt,
                sampling=self.sampling,
                n=self.n,
                echo=self.echo,
                stream=self.stream,
            )
            for index, prompt in enumerate(self.prompts)
        ]


class _Part(BaseModel):
    """A piece of a request body: JSON types as they are, nothing converted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class _StreamOptions(_Part):
    include_usage: bool | None = None


class _ResponseFormat(_Part):
    type: str


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(to_text)] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise wrong(f"needs content, because its role is {self.role}")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: `developer`, which most do not know, is `system`."""
        message = self.model_dump(exclude_none=True)
        message.setdefault("content", "")
        if self.role == "developer":
            message["role"] = "system"
        return message


class _Body(_Part):
    """What all three forms have in common."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_N)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=MAX_COUNT)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    stop: Annotated[tuple[str, ...], PlainValidator(to_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(to_token_ids)] = ()
    ignore_eos: bool = False
    # As vLLM: one token at least, although OpenAI's completions take 0 together with echo.
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    min_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], PlainValidator(to_logit_bias)] = {}

    def ask(
        self,
        prompts: tuple[Prompt, ...],
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        echo: bool = False,
    ) -> Ask:
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({max_tokens}), found {self.min_tokens}",
                "min_tokens",
            )
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
        )
        return Ask(
            model=self.model,
            prompts=prompts,
            sampling=sampling,
            n=self.n,
            echo=echo,
            stream=self.stream,
            include_usage=self.stream and bool(self.stream_options.include_usage),
        )


class _ChatBody(_Body):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Annotated[str, PlainValidator(to_tool_choice)] = "auto"
    response_format: _ResponseFormat = _ResponseFormat(type="text")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class _CompletionBody(_Body):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(to_prompts)]
    max_tokens: int = Field(default=16, ge=1, le=MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int = Field(default=1, ge=1)


class _SeedBody(_Body):
    prompt: str = SEED_PROMPT
    max_tokens: int = Field(default=50, ge=1, le=MAX_COUNT)
    n: Literal[1] = 1
    stream: bool = True
    temperature: float = Field(default=0.0, ge=0, le=2)


class SleepForm(BaseModel):
    """POST /sleep; from a query, so strings are read as what they stand for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    level: int = Field(default=1, ge=1, le=2)
    mode: SleepMode = SleepMode.WAIT
    hold: bool = False


class WakeForm(BaseModel):
    """POST /wake_up; no tags means everything."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    tags: Annotated[tuple[Literal["weights", "kv_cache"], ...], BeforeValidator(to_list)] = ()


class ScaleForm(BaseModel):
    """POST /scaleout and /scalein."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    replicas: int | None = Field(default=None, ge=0)


def parse_chat(fields: Mapping[str, Any]) -> Ask:
    """POST /v1/chat/completions."""
    _refuse_unsupported(fields)
    body = parse_form(_ChatBody, fields)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.response_format.type != "text":
        kind = shown(body.response_format.type)
        raise UnsupportedParameter(
            f'response_format must be {{"type": "text"}}, found {kind}', "response_format"
        )
    template_kwargs = dict(body.chat_template_kwargs)
    if body.continue_final_message:
        template_kwargs["continue_final_message"] = True
    prompt = ChatPrompt(
        messages=tuple(message.for_template() for message in body.messages),
        tools=tuple(body.tools) or None,
        template_kwargs=template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = body.top_logprobs if body.logprobs else None
    return body.ask((prompt,), max_tokens=max_tokens, logprobs=logprobs)


def parse_completion(fields: Mapping[str, Any], max_continuations: int) -> Ask:
    """POST /v1/completions."""
    _refuse_unsupported(fields)
    body = parse_form(_CompletionBody, fields)
    if body.best_of > body.n:
        raise UnsupportedParameter(
            f"best_of must be at most n ({body.n}), found {body.best_of}", "best_of"
        )
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter("echo together with logprobs is not supported yet", "echo")
    if (asked := len(body.prompt) * body.n) > max_continuations:
        raise InvalidRequest(
            f"prompts times n is {asked}; the limit is {max_continuations} "
            "(http.max_continuations)",
            "prompt",
        )
    return body.ask(body.prompt, max_tokens=body.max_tokens, logprobs=body.logprobs, echo=body.echo)


def parse_seed(fields: Mapping[str, Any]) -> Ask:
    """POST /completions, the form of the project this one started from: greedy unless told."""
    body = parse_form(_SeedBody, fields)
    return body.ask((body.prompt,), max_tokens=body.max_tokens)


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            raise UnsupportedParameter(f"{name} is not supported, found {shown(value)}", name)
