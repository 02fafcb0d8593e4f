"""Anthropic's bodies become what chats ask for, or are refused with the field and what was found."""

from typing import Any

import pytest

from actors.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from actors.protocol import ChatPrompt, SamplingParams
from serve_app.anthropic.requests import parse_count_tokens, parse_messages
from serve_app.openai.requests import Ask, TokenizeAsk, parse_chat

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"name": "weather", "description": "Today's.", "input_schema": SCHEMA},
    {"name": "time", "type": "custom", "input_schema": {"type": "object"}},
]


def ask(**fields: Any) -> Ask:
    return parse_messages({"model": "m", "max_tokens": 9, "messages": HI, **fields})


def prompt(**fields: Any) -> ChatPrompt:
    (found,) = ask(**fields).prompts
    assert isinstance(found, ChatPrompt)
    return found


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def called(name: str, given: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": name, "input": given or {}}


def result(**fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", **fields}


def test_plain_message_is_what_the_same_chat_is() -> None:
    chat = {"model": "m", "messages": HI, "max_tokens": 9, "stop": ["END"], "stream": True}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": -1}
    theirs = ask(stop_sequences=["END"], stream=True, **sampling)
    assert theirs == parse_chat(chat | sampling)
    assert theirs.sampling == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=0, stop=("END",)
    )


def test_a_conversation_with_tools_is_what_templates_read() -> None:
    found = prompt(
        system=[text("Be brief."), {**text("Be kind."), "cache_control": {"type": "ephemeral"}}],
        messages=[
            said(text("How is"), text("Köln?")),
            said(
                {"type": "thinking", "thinking": "I ask.", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("Let me see."),
                called("weather", {"city": "Köln"}),
                called("time"),
                role="assistant",
            ),
            said(
                result(content="Rain."),
                result(content=[text("12"), text("o'clock")], is_error=False),
                text("And?"),
            ),
            {"role": "system", "content": "Now in German."},
            said(result(is_error=True)),
        ],
        tools=TOOLS,
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in (("weather", {"city": "Köln"}), ("time", {}))
    ]
    assert found == ChatPrompt(
        messages=(
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "How is\nKöln?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "I ask.",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "t1", "content": "Rain."},
            {"role": "tool", "tool_call_id": "t1", "content": "12\no'clock"},
            {"role": "user", "content": "And?"},
            {"role": "system", "content": "Now in German."},
            {"role": "tool", "tool_call_id": "t1", "content": "", "is_error": True},
        ),
        tools=(
            {
                "type": "function",
                "function": {"name": "weather", "description": "Today's.", "parameters": SCHEMA},
            },
            {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
        ),
    )


def test_last_message_of_the_assistant_is_continued() -> None:
    found = prompt(messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert found.messages[-1] == {"role": "assistant", "content": "Well,"}
    assert found.template_kwargs == {"continue_final_message": True}
    assert not found.add_generation_prompt


@pytest.mark.parametrize(
    ("choice", "with_tools", "must_call", "parallel"),
    [
        (None, True, (), True),
        ({"type": "auto"}, True, (), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, (), False),
        ({"type": "none"}, False, (), True),
        ({"type": "any"}, True, ("weather", "time"), True),
        (
            {"type": "tool", "name": "time", "disable_parallel_tool_use": False},
            True,
            ("time",),
            True,
        ),
    ],
)
def test_tool_choice(choice: Any, with_tools: bool, must_call: Any, parallel: bool) -> None:
    found = ask(tools=TOOLS, tool_choice=choice)
    (chat,) = found.prompts
    assert isinstance(chat, ChatPrompt)
    assert (chat.tools is not None, chat.must_call) == (with_tools, must_call)
    assert found.parallel_tool_calls is parallel


def test_null_inside_means_absent_as_well() -> None:
    talk = [*HI, said(called("time"), role="assistant")]
    choice = {"type": "any", "disable_parallel_tool_use": None}
    null = ask(messages=[*talk, said(result(content=None))], tools=TOOLS, tool_choice=choice)
    absent = ask(messages=[*talk, said(result())], tools=TOOLS, tool_choice={"type": "any"})
    assert null == absent
    assert null.parallel_tool_calls


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_the_template_s(thinking: Any, on: bool) -> None:
    assert prompt(thinking=thinking).template_kwargs == {"enable_thinking": on, "thinking": on}
    assert prompt().template_kwargs == {}


def test_what_asks_for_nothing_is_ignored() -> None:
    fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "output_config": {"effort": "low"},
        "mcp_servers": [],
        "container": None,
        "temperature": None,
        "of_tomorrow": 1,
    }
    assert ask(**fields) == ask()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1, found 0"),
        ({"max_tokens": "9"}, "max_tokens", 'must be an integer, found "9"'),
        ({"messages": None}, "messages", "messages is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [1]}, "messages[0]", "must be an object, found 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be 'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [said()]}, "messages[0].content", "must not be empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "found 5"),
        ({"messages": [said({})]}, "messages[0].content[0]", "must be an object with a type"),
        ({"messages": [said(called("f"))]}, "messages[0]", "of type tool_use, because its role"),
        (
            {"messages": [*HI, said(result(content="x"), role="assistant")]},
            "messages[1]",
            "must have no block of type tool_result, because its role is assistant",
        ),
        (
            {"messages": [*HI, said(called("f"), role="assistant")]},
            "messages",
            "it must end with text",
        ),
        (
            {"messages": [said({"type": "tool_result", "content": "x"})]},
            "messages[0].content[0].tool_use_id",
            "is required",
        ),
        (
            {"messages": [said({"type": "text"})]},
            "messages[0].content[0].text",
            "messages[0].content[0].text is required",
        ),
        (
            {"messages": [said({"type": "text", "text": {"a": 1}})]},
            "messages[0].content[0].text",
            "messages[0].content[0].text must be a string",
        ),
        (
            {"messages": [*HI, said({**called("f"), "input": None}, role="assistant"), *HI]},
            "messages[1].content[0].input",
            "messages[1].content[0].input must be an object, found null",
        ),
        ({"system": 1}, "system", "must be a string, found 1"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": 3}, "temperature", "must be at most 2, found 3"),
        ({"stop_sequences": "END"}, "stop_sequences", "must be an array"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "must have at least 1 characters"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name", "at least 1"),
        ({"tool_choice": "any"}, "tool_choice", "must be an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "there is no tool"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice",
            'no tool with the name "x"',
        ),
    ],
)
def test_wrong_value_is_named_with_what_was_found(fields: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    assert message in str(caught.value)
    assert caught.value.param == param
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [said({"type": "image", "source": {}})]}, "messages[0].content[0]"),
        ({"messages": [said({"type": "document", "source": {}})]}, "messages[0].content[0]"),
        (
            {"messages": [said(result(content=[{"type": "image"}]))]},
            "messages[0].content[0].content",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": "x"}, "stop"),
        ({"seed": 0}, "seed"),
        ({"n": 2}, "n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_known_but_unsupported(fields: Any, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        ask(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HI * 4097},
        {"messages": [said(*[text("")] * 1025)]},
        {"system": [text("")] * 1025},
        {"tools": [TOOLS[0]] * 1025},
        {"tools": [{"name": "f", "input_schema": {"enum": [0] * 2**16}}]},
        {"messages": [*HI, said(called("f", {"a": [0] * 2**16}), role="assistant"), *HI]},
        {"stop_sequences": ["x"] * 33},
        {"stop_sequences": ["x" * 1025]},
        {"stop_sequences": ["x" * 1024] * 9},
    ],
)
def test_everything_has_a_limit(fields: Any) -> None:
    with pytest.raises((InvalidRequest, PayloadTooLarge), match="must have at most"):
        ask(**fields)


def test_tokens_are_counted_of_the_same_prompt() -> None:
    fields = {
        "messages": HI,
        "system": "Be brief.",
        "tools": TOOLS,
        "tool_choice": {"type": "none"},
    }
    assert parse_count_tokens({"model": "m", **fields}) == TokenizeAsk(
        "m", prompt(**fields), add_special_tokens=None, return_token_strs=False
    )
