"""The grammar of an answer that must call a tool, in the form in which the model writes calls."""

import json
from collections.abc import Mapping
from typing import Any

from actors.errors import UnsupportedParameter
from actors.protocol import ChatPrompt, Grammar, GrammarKind, MessageForm
from actors.text.json_schemas import without_unknown_formats

_PARAM = "tool_choice"
_REASONING = 'reasoning[suffix="</think>"]: /(?s:.*)/'
# Without a bound, a model that has nothing to say goes on with white space inside of JSON.
_WITHIN_JSON = {"x-guidance": {"whitespace_pattern": " "}}
_SPACE = r"SPACE: /[ \t\r\n]{1,16}/"


def forced_call(form: MessageForm, prompt: ChatPrompt) -> Grammar:
    """One call of one of the tools in `prompt.must_call`, behind the reasoning that the model may begin with.

    Raises:
        UnsupportedParameter: nobody knows how this model writes calls.
    """
    if form.tools is None:
        raise UnsupportedParameter(
            f"{_PARAM} cannot force a call: the chat template of this model has no form of calls that this "
            "server knows (chat.tool_parser)",
            _PARAM,
        )
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") or {}
        for tool in prompt.tools or ()
        if tool["function"]["name"] in prompt.must_call
    }
    calls = " | ".join(
        _call(form.tools, name, f"arguments{index}") for index, name in enumerate(schemas)
    )
    rules = [
        f"{_beginning(form)} ({calls})",
        *(
            f"arguments{index}: %json {_object(schema)}"
            for index, schema in enumerate(schemas.values())
        ),
    ]
    if form.reasoning is not None:
        rules += [_REASONING, _SPACE]
    return Grammar(GrammarKind.CFG, "\n".join(rules), _PARAM)


def _beginning(form: MessageForm) -> str:
    """The reasoning ends before the call; where it is open already, it is not opened again."""
    if form.reasoning is None:
        return "start:"
    if form.in_reasoning:
        return "start: reasoning SPACE?"
    return 'start: (SPACE? "<think>" reasoning SPACE?)?'


def _call(form: str, name: str, arguments: str) -> str:
    """A call as `serve_app.openai.tool_calls` reads it back."""
    quoted = json.dumps(name, ensure_ascii=False)
    if form == "llama":
        return _around(arguments, f'{{"name": {quoted}, "parameters": ', "}")
    if form == "deepseek":
        r1 = _around(arguments, f"function<｜tool▁sep｜>{name}\n```json\n", "\n```")
        v31 = _around(arguments, f"{name}<｜tool▁sep｜>", "")
        begin, end = (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        )
        return _around(f"({r1} | {v31})", begin, end)
    assert form == "qwen", form
    return _around(arguments, f'<tool_call>\n{{"name": {quoted}, "arguments": ', "}\n</tool_call>")


def _around(rule: str, before: str, behind: str) -> str:
    """A rule between texts."""
    return " ".join((_text(before), rule, *([_text(behind)] if behind else ())))


def _text(text: str) -> str:
    """As a grammar has it."""
    return json.dumps(text, ensure_ascii=False)


def _object(schema: Mapping[str, Any]) -> str:
    """A tool's arguments are an object, whatever its schema says."""
    found = json.dumps({**_WITHIN_JSON, **schema, "type": "object"}, ensure_ascii=False)
    return without_unknown_formats(found)
