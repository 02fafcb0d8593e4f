"""Anthropic's request bodies -> `Ask`, as chats have it: blocks become the messages that chat templates read.

Fields that ask for nothing we could refuse are ignored (`metadata`, `service_tier`, `cache_control`, ...), and
`null` means absent, as in OpenAI's bodies. Of `thinking` only whether there is to be any reaches the chat
template: `max_tokens` is the bound of all that is generated, whatever `budget_tokens` says.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import ChatPrompt, SamplingParams
from serve_app.openai.chat import Part, must_call, thinking
from serve_app.openai.fields import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    only,
    parse_form,
    shown,
    small_inside,
    to_text,
    unsupported,
    wrong,
)
from serve_app.openai.keep_alive import KeepAlive
from serve_app.openai.requests import (
    Ask,
    ModelName,
    SamplingFields,
    Stops,
    TokenizeAsk,
    refuse_of_chats,
)

# Fields that we know and cannot honour.
_UNSUPPORTED = ("container", "mcp_servers", "context_management", "output_format")
# Of chats' fields -> those that are here in their place.
_INSTEAD = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "chat_template_kwargs": "thinking",
    "reasoning_effort": "thinking",
}

_Texts = Annotated[
    str,
    BeforeValidator(
        to_text,
        json_schema_input_type=str | Annotated[list["TextBlock"], Field(max_length=MAX_PARTS)],
    ),
]


class TextBlock(Part):
    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """Of an earlier answer; the template decides what becomes of it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Somebody else's, which nobody here can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _Texts | None = None
    is_error: bool | None = None


_ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_KINDS = sorted({kind for kinds in _ROLES.values() for kind in kinds})


def _known(block: object) -> object:
    """Refuses images and all else that is no text and no tool, before pydantic looks for it."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in _KINDS:
        raise unsupported(f"may only be of type {', '.join(_KINDS)}, found {shown(kind)}")
    if not isinstance(kind, str):
        raise wrong("must be an object with a type")
    return block


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
        Field(discriminator="type"),
    ],
    BeforeValidator(_known),
]
_Blocks = Annotated[list[Block], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


def _as_blocks(value: object) -> object:
    """A string is short for one block of text."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessageParam(Part):
    role: Literal["user", "assistant", "system"]
    content: Annotated[_Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | _Blocks)]

    @model_validator(mode="after")
    def _has_its_role_s_blocks(self) -> Self:
        for block in self.content:
            if block.type not in _ROLES[self.role]:
                raise wrong(
                    f"must have no block of type {block.type}, because its role is {self.role}"
                )
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates read it: results of tools are messages of their own, in their place."""
        if self.role == "assistant":
            return [self._of_assistant()]
        messages: list[dict[str, Any]] = []
        for kind, group in itertools.groupby(self.content, key=type):
            blocks = list(group)
            if kind is TextBlock:
                texts = [block.text for block in blocks if isinstance(block, TextBlock)]
                messages.append({"role": self.role, "content": "\n".join(texts)})
            messages += [
                _of_result(block) for block in blocks if isinstance(block, ToolResultBlock)
            ]
        return messages

    def _of_assistant(self) -> dict[str, Any]:
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message


def _of_result(block: ToolResultBlock) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": block.content or "",
    }
    if block.is_error:
        message["is_error"] = True  # for templates that tell; what went wrong is in the content
    return message


class ToolParam(Part):
    name: str = Field(min_length=1)
    # Those that Anthropic's servers run have others.
    type: Annotated[Literal["custom"] | None, only("custom")] = None
    description: str | None = None
    input_schema: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """As OpenAI has it, and chat templates read it."""
        description = {} if self.description is None else {"description": self.description}
        return {
            "type": "function",
            "function": {"name": self.name, **description, "parameters": self.input_schema},
        }


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Part):
    type: Literal["enabled", "disabled", "adaptive"]


def _inputs(messages: list[MessageParam]) -> list[dict[str, Any]]:
    blocks = (block for message in messages for block in message.content)
    return [block.input for block in blocks if isinstance(block, ToolUseBlock)]


class CountTokensBody(Part):
    """What makes the prompt."""

    model: ModelName | None = None
    system: _Texts = ""
    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        small_inside(_inputs),
    ]
    tools: Annotated[
        list[ToolParam],
        Field(max_length=MAX_TOOLS, fail_fast=True),
        small_inside(lambda tools: [tool.input_schema for tool in tools]),
    ] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingConfig | None = None

    def prompt(self) -> ChatPrompt:
        """What the chat template reads. A last message of the assistant is continued.

        Raises:
            InvalidRequest: such a message ends with no text; `tool_choice` wants a tool that is not there.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [each for message in self.messages for each in message.for_template()]
        tools = tuple(tool.function for tool in self.tools)
        options: dict[str, Any] = {}
        if self.thinking is not None:
            options = thinking(self.thinking.type != "disabled")
        if continues := self.messages[-1].role == "assistant":
            if not isinstance(self.messages[-1].content[-1], TextBlock):
                raise InvalidRequest(
                    "a last message of the assistant is continued, so it must end with text",
                    "messages",
                )
            options["continue_final_message"] = True
        return ChatPrompt(
            messages=(*system, *messages),
            # "none" keeps the tools from the model: it cannot call what it does not know.
            tools=(tools if self.tool_choice.type != "none" else None) or None,
            template_kwargs=options,
            add_generation_prompt=not continues,
            must_call=self._must_call(tools),
        )

    def _must_call(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        choice = self.tool_choice
        if choice.type == "any":
            return must_call(tools, None)
        if choice.type != "tool":
            return ()
        if choice.name is None:
            raise InvalidRequest("tool_choice.name is required", "tool_choice.name")
        return must_call(tools, choice.name)


class MessagesBody(CountTokensBody, SamplingFields, KeepAlive):
    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: Stops = Field(default=[])
    stream: bool = False

    def ask(self) -> Ask:
        return Ask(
            model=self.model,
            prompts=(self.prompt(),),
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.num_candidates,
                stop=tuple(self.stop_sequences),
            ),
            stream=self.stream,
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            keep_alive_s=self.keep_alive,
            field_names={"prompt": "messages"},
        )


def parse_messages(fields: Mapping[str, Any]) -> Ask:
    """POST /v1/messages."""
    _refuse_unsupported(fields)
    refuse_of_chats(fields, MessagesBody, _INSTEAD)
    return parse_form(MessagesBody, fields).ask()


def parse_count_tokens(fields: Mapping[str, Any]) -> TokenizeAsk:
    """POST /v1/messages/count_tokens."""
    _refuse_unsupported(fields)
    body = parse_form(CountTokensBody, fields)
    return TokenizeAsk(body.model, body.prompt(), add_special_tokens=None, return_token_strs=False)


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise UnsupportedParameter(f"{name} is not supported", name)
    output = fields.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        raise UnsupportedParameter("output_config.format is not supported", "output_config.format")
