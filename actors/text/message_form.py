"""How a model writes reasoning and tool calls: as configured, or as its chat template shows."""

from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from pydantic import BaseModel, ConfigDict, Field, field_validator

from actors.protocol import ChatPrompt, MessageForm

_OPEN, _CLOSE = "<think>", "</think>"
_JINJA = ("{{", "{%", "{#")


class ChatConfig(BaseModel):
    """What a model's messages are made of, where its chat template does not show it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reasoning_parser: Literal["auto", "none", "think"] = Field(
        default="auto",
        description="How reasoning is told from the answer, to be sent as `reasoning_content`: `think` for "
        "`<think>` tags (DeepSeek-R1, Qwen3, QwQ); `auto` looks for them in the chat template.",
    )
    tool_parser: Literal["auto", "none", "qwen", "deepseek", "llama"] = Field(
        default="auto",
        description="How the model writes tool calls: `qwen` between `<tool_call>` tags (Hermes, too), "
        "`deepseek` (R1, V3, V3.1), `llama` (3.x) as bare JSON; `auto` looks for them in the chat "
        "template. Without a parser they stay text.",
    )
    template: str | None = Field(
        default=None,
        description="Chat template in place of the checkpoint's: Jinja, or the path of a file with it (relative "
        "ones are looked up from the configuration file's project). The file is read when the configuration is.",
    )

    @field_validator("template")
    @classmethod
    def _is_jinja(cls, template: str | None) -> str | None:
        if template is not None and not is_template_path(template):
            check_template(template)
        return template


def is_template_path(template: str) -> bool:
    """Whether it is no template, but the path of one: there is nothing of Jinja in it."""
    return not any(mark in template for mark in _JINJA)


class _Generation(Extension):
    """Marks of transformers' around what an assistant says; they change nothing of the text."""

    tags = {"generation"}  # noqa: RUF012 - as its base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(template: str) -> None:
    """Raises ValueError, with the line, if it is no Jinja. What its names stand for is not looked at."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(template)
    except TemplateSyntaxError as exc:
        raise ValueError(f"no chat template: line {exc.lineno}: {exc.message}") from None


def form_of(config: ChatConfig, template: str) -> MessageForm:
    """The form of a model's messages.

    Args:
        config: what it says goes before what the template shows.
        template: the chat template, "" for none.
    """
    reasoning: str | None = config.reasoning_parser
    tools: str | None = config.tool_parser
    if reasoning == "auto":
        reasoning = "think" if _OPEN in template or _CLOSE in template else "none"
    if tools == "auto":
        tools = _tools_in(template)
    return MessageForm(
        reasoning=None if reasoning == "none" else reasoning,
        tools=None if tools == "none" else tools,
    )


def ends_in_reasoning(prompt: ChatPrompt, end: str) -> bool:
    """Whether the model goes on inside its reasoning.

    DeepSeek-R1's template ends with the opening tag. Tags elsewhere in the prompt are somebody's text.

    Args:
        prompt: the messages.
        end: of the rendered prompt; more characters than the tag.
    """
    if prompt.continues:
        last: Mapping[str, Any] = prompt.messages[-1]
        content = str(last.get("content") or "")
        return content.rfind(_OPEN) > content.rfind(_CLOSE)
    return end.rstrip().endswith(_OPEN)


def _tools_in(template: str) -> str:
    if "<tool_call>" in template:
        return "qwen"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama"
    return "none"
