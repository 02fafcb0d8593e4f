"""Bodies of /v1/responses -> `Ask`, as chats have it: items become the messages that chat templates read.

Nothing is kept here, so what asks for an earlier response is refused. Fields that ask for nothing we could refuse
are ignored (`user`, `service_tier`, `prompt_cache_key`, `reasoning.summary`, ...), and `null` means absent, as in
chats. Of `reasoning.effort` only whether there is to be any reaches the chat template.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import ChatPrompt, Grammar, GrammarKind, SamplingParams
from actors.text.validation import check_grammar
from serve_app.openai.chat import Part, must_call, thinking
from serve_app.openai.fields import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_OPTIONS,
    MAX_PARTS,
    MAX_TOOLS,
    only,
    parse_form,
    parsed,
    shown,
    small_inside,
    to_text,
    unsupported,
    wrong,
)
from serve_app.openai.grammar import JsonSchema, any_object
from serve_app.openai.keep_alive import KeepAlive
from serve_app.openai.requests import Ask, ModelName, SamplingFields, refuse_of_chats

# Fields that we know and cannot honour -> the values that ask for nothing, and why.
_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "previous_response_id": ((), "nothing is kept here; send the whole conversation as input"),
    "conversation": ((), "nothing is kept here; send the whole conversation as input"),
    "store": ((False,), "nothing is kept here; leave it out, or say false"),
    "background": ((False,), "nothing is kept here; wait for the answer, or stream it"),
    "prompt": ((), "there are no prompts with names here"),
    "truncation": (("disabled",), "too long a prompt is refused"),
    "context_management": (([],), "nothing is left out of a prompt"),
    "top_logprobs": ((0,), "chats have them"),
}
# Of chats' fields -> those that are here in their place.
_INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "structured_outputs": "text.format",
    "guided_json": "text.format",
    "chat_template_kwargs": "reasoning.effort",
    "reasoning_effort": "reasoning.effort",
}
# Of `include`; what else can be included is of tools not here.
_LOGPROBS = "message.output_text.logprobs"

# Of what an answer repeats, three times where it is streamed.
MAX_TOLD_CHARS = 2**18
_TOLD_AS_THEY_CAME = ("metadata", "text", "tool_choice", "tools")

_TextKind = Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
_TEXT_OF = {**dict.fromkeys(get_args(_TextKind), "text"), "refusal": "refusal"}


class _TextPart(Part):
    type: _TextKind
    text: str


_Texts = Annotated[
    str,
    BeforeValidator(
        partial(to_text, text_of=_TEXT_OF, kinds="text"),
        json_schema_input_type=str | Annotated[list[_TextPart], Field(max_length=MAX_PARTS)],
    ),
]


def _to_arguments(value: object) -> dict[str, Any]:
    """What a function was called with, parsed: so most chat templates want it."""
    try:
        found = parsed((value or "{}").encode(), "arguments") if isinstance(value, str) else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise wrong("must be a JSON object, as text")
    return found


class MessageItem(Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts


class FunctionCallItem(Part):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    arguments: Annotated[dict[str, Any], PlainValidator(_to_arguments, json_schema_input_type=str)]


class FunctionCallOutputItem(Part):
    type: Literal["function_call_output"]
    call_id: str
    output: _Texts


class ReasoningItem(Part):
    """Of an earlier answer; the template decides what becomes of it. Somebody else's is encrypted, and dropped."""

    type: Literal["reasoning"]
    content: _Texts | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of(item: object) -> str | None:
    """The tag of an item; a message may do without."""
    if not isinstance(item, dict):
        raise wrong("must be an object")
    kind = item.get("type") or "message"
    if kind == "item_reference":
        raise unsupported("nothing is kept here, so send the item itself, found item_reference")
    if isinstance(kind, str) and kind not in _KINDS:
        raise unsupported(f"may only be of type {', '.join(_KINDS)}, found {shown(kind)}")
    if not isinstance(kind, str):
        raise wrong("must have a string as type")
    return kind


_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of),
]


def _known(item: object) -> object:
    """Refuses what is no text and no tool, before pydantic looks for it."""
    _kind_of(item)
    return item


Item = Annotated[_Item, BeforeValidator(_known)]
_Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def _as_items(value: object) -> object:
    """A string is short for one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _arguments(items: list[Any]) -> list[dict[str, Any]]:
    return [item.arguments for item in items if isinstance(item, FunctionCallItem)]


class FunctionTool(Part):
    type: Annotated[Literal["function"], only("function")]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def function(self) -> dict[str, Any]:
        """As chats have it, and their templates read it."""
        given = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": {"parameters": {}, **given}}


class NamedTool(Part):
    type: Annotated[Literal["function"], only("function")]
    name: str = Field(min_length=1)


def _known_choice(value: object) -> object:
    """Refuses what is neither, before pydantic names both."""
    if value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict):
        raise wrong(_TOOL_CHOICES)
    kind, name = value.get("type"), value.get("name")
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"{_TOOL_CHOICES}, found type {shown(kind)}")
    if kind != "function" or not isinstance(name, str) or not name:
        raise wrong(_TOOL_CHOICES)
    return value


_TOOL_CHOICES = 'must be "none", "auto", "required" or {"type": "function", "name": ...}'


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_text: JsonSchema | None = Field(default=None, alias="schema")


class TextOptions(Part):
    format: TextFormat | None = None


class ReasoningOptions(Part):
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseAsk(Ask):
    """With what the answer repeats of its request, and about how long that is."""

    told: Mapping[str, Any] = field(default_factory=dict)
    told_chars: int = 0


class ResponsesBody(SamplingFields, KeepAlive):
    model: ModelName | None = None
    input: Annotated[
        _Items,
        BeforeValidator(_as_items, json_schema_input_type=str | _Items),
        small_inside(_arguments),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    stream: bool = False
    tools: Annotated[
        list[FunctionTool],
        Field(max_length=MAX_TOOLS, fail_fast=True),
        small_inside(lambda tools: [tool.parameters for tool in tools]),
    ] = Field(default=[])
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool, BeforeValidator(_known_choice)
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] = Field(default=[], max_length=MAX_OPTIONS)
    metadata: Annotated[dict[str, Any], small_inside()] = Field(default={}, max_length=MAX_OPTIONS)

    def prompt(self) -> ChatPrompt:
        """What the chat template reads."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools = tuple(tool.function for tool in self.tools)
        options: dict[str, Any] = {}
        if self.reasoning.effort is not None:
            options = thinking(self.reasoning.effort != "none")
        return ChatPrompt(
            messages=(*system, *_messages(self.input)),
            # "none" keeps the tools from the model: it cannot call what it does not know.
            tools=(tools if self.tool_choice != "none" else None) or None,
            template_kwargs=options,
            must_call=self._must_call(tools),
        )

    def _must_call(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return ()
        if self.grammar() is not None:
            raise InvalidRequest("tool_choice and text.format exclude each other", "text.format")
        return must_call(tools, choice.name if isinstance(choice, NamedTool) else None)

    def grammar(self) -> Grammar | None:
        """The form that the text must have.

        Raises:
            InvalidRequest: there is no schema.
            UnsupportedParameter: the schema is longer than those that this server compiles.
        """
        asked, param = self.text.format, "text.format"
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return any_object(param)
        if asked.schema_text is None:
            raise InvalidRequest("text.format.schema is required", "text.format.schema")
        grammar = Grammar(GrammarKind.JSON_SCHEMA, asked.schema_text, param)
        check_grammar(grammar)
        return grammar

    def ask(self, fields: Mapping[str, Any]) -> ResponseAsk:
        """For a replica.

        Args:
            fields: the body as it came; what of it is in the answer, is there as it came.
        """
        return ResponseAsk(
            model=self.model,
            prompts=(self.prompt(),),
            sampling=SamplingParams(
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.num_candidates,
                grammar=self.grammar(),
            ),
            stream=self.stream,
            parallel_tool_calls=self.parallel_tool_calls,
            keep_alive_s=self.keep_alive,
            field_names={"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens"},
            told={
                "instructions": self.instructions,
                "max_output_tokens": self.max_output_tokens,
                "metadata": self.metadata,
                "parallel_tool_calls": self.parallel_tool_calls,
                "reasoning": {"effort": self.reasoning.effort, "summary": None},
                "temperature": self.temperature,
                "text": {"format": (fields.get("text") or {}).get("format") or {"type": "text"}},
                "tool_choice": fields.get("tool_choice") or "auto",
                # OpenAI's types want these two of every tool.
                "tools": [
                    {"strict": False, "parameters": None, **tool}
                    for tool in fields.get("tools") or ()
                ],
                "top_p": self.top_p,
            },
        )


def parse_responses(fields: Mapping[str, Any]) -> ResponseAsk:
    """POST /v1/responses."""
    for name, (harmless, why) in _UNSUPPORTED.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            text = f"{name} is not supported, found {shown(value)}: {why}"
            raise UnsupportedParameter(text, name)
    refuse_of_chats(fields, ResponsesBody, _INSTEAD)
    body = parse_form(ResponsesBody, fields)
    if _LOGPROBS in body.include:
        raise UnsupportedParameter(
            f"include {_LOGPROBS} is not supported: chats have them", "include"
        )
    ask = body.ask(fields)
    told = 0
    for name in _TOLD_AS_THEY_CAME:
        try:
            told += len(json.dumps(ask.told[name], ensure_ascii=False, allow_nan=False))
        except ValueError:  # 1e400 is read as infinity, which the answer cannot repeat
            raise InvalidRequest(f"{name} must only have finite numbers", name) from None
        if told > MAX_TOLD_CHARS:
            raise InvalidRequest(
                f"{', '.join(_TOLD_AS_THEY_CAME)} must have at most {MAX_TOLD_CHARS} characters of JSON together: the "
                "answer repeats them",
                name,
            )
    return replace(ask, told_chars=told + len(body.instructions or ""))


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """As chat templates read them: what an assistant thought, said and called in a row is one message."""
    messages: list[dict[str, Any] | _Turn] = []
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            result = {"tool_call_id": item.call_id, "content": item.output}
            messages.append({"role": "tool", **result})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            # Most templates do not know `developer`.
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": item.content})
        elif not isinstance(item, ReasoningItem) or item.content:
            turn = messages[-1] if messages else None
            if not isinstance(turn, _Turn):
                turn = _Turn()
                messages.append(turn)
            turn.add(item)
    return [each.message() if isinstance(each, _Turn) else each for each in messages]


class _Turn:
    """Of an assistant: its items, until somebody else has a say."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
        if isinstance(item, FunctionCallItem):
            function = {"name": item.name, "arguments": item.arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
        elif item.content:
            where = self._thoughts if isinstance(item, ReasoningItem) else self._texts
            where.append(item.content)

    def message(self) -> dict[str, Any]:
        """Texts are lines of it."""
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(self._texts)}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message
