"""Messages and tools of a request body, as chats and /tokenize have them.

What is converted is documented in the form in which clients send it: `_TextPart`, `_ToolCall`, `_Tool`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)

from actors.errors import InvalidRequest
from actors.protocol import ChatPrompt
from serve_app.openai.fields import (
    MAX_MESSAGES,
    MAX_OPTIONS,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    shown,
    small_inside,
    to_text,
    to_tool_calls,
    to_tools,
    wrong,
)


class Part(BaseModel):
    """A piece of a request body: JSON types as they are, nothing converted."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class _TextPart(Part):
    type: Literal["text"]
    text: str


class _CalledFunction(Part):
    name: str = Field(min_length=1)
    arguments: str


class _ToolCall(Part):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Function(Part):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = {}  # a JSON schema, whatever it has


class _Tool(Part):
    type: Literal["function"]
    function: _Function


_Parts = Annotated[list[_TextPart], Field(max_length=MAX_PARTS)]
_ToolCalls = Annotated[list[_ToolCall], Field(max_length=MAX_TOOL_CALLS)]
_Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS)]


class _Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(to_text, json_schema_input_type=str | _Parts | None)
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: (
        Annotated[
            list[dict[str, Any]],
            PlainValidator(to_tool_calls, json_schema_input_type=_ToolCalls),
        ]
        | None
    ) = None
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
        if not message.get("tool_calls", True):
            del message["tool_calls"]  # templates ask whether there is a list
        if self.role == "developer":
            message["role"] = "system"
        return message


class ChatForm(Part):
    """Messages, and how the chat template is to read them."""

    messages: Annotated[
        list[_Message],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        small_inside(lambda messages: [message.tool_calls for message in messages]),
    ]
    tools: Annotated[
        tuple[Mapping[str, Any], ...], PlainValidator(to_tools, json_schema_input_type=_Tools)
    ] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], small_inside()] = Field(
        default={}, max_length=MAX_OPTIONS
    )

    def prompt(self, *, with_tools: bool = True, must_call: tuple[str, ...] = ()) -> ChatPrompt:
        effort = self.reasoning_effort
        template_kwargs = {} if effort is None else thinking(effort != "none")
        template_kwargs |= self.chat_template_kwargs
        if self.continue_final_message:
            template_kwargs["continue_final_message"] = True
        return ChatPrompt(
            messages=tuple(message.for_template() for message in self.messages),
            tools=(self.tools if with_tools else None) or None,
            template_kwargs=template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            must_call=must_call,
        )


def thinking(wanted: bool) -> dict[str, Any]:
    """Whether there is to be any: as Qwen's templates call it, and as DeepSeek's do."""
    return dict.fromkeys(("enable_thinking", "thinking"), wanted)


def must_call(tools: Sequence[Mapping[str, Any]], name: str | None) -> tuple[str, ...]:
    """The names of the tools of which the answer must call one, as `tool_choice` wants it.

    Args:
        tools: those of the request, as OpenAI has them.
        name: of the tool to be called; None: any of them.

    Raises:
        InvalidRequest: it is not there.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    found = tuple(each for each in names if name in (None, each))
    if found:
        return found
    wanted = "" if name is None else f" with the name {shown(name)}"
    raise InvalidRequest(f"tool_choice wants a call, but there is no tool{wanted}", "tool_choice")
