"""Reasoning and tool calls in a model's text, however it is cut into pieces."""

import itertools
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol import MessageForm
from serve_app.openai import tool_calls
from serve_app.openai.growing_object import GrowingObject
from serve_app.openai.held_text import HeldText
from serve_app.openai.message import MessageParser
from serve_app.openai.open_call import OpenCall
from serve_app.openai.tool_calls import ToolCall
from tests.unit.serve_app.openai.parts import Parts, feed

THINK = MessageForm(reasoning="think")
OPENED = MessageForm(reasoning="think", in_reasoning=True)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
SUN = ToolCall("weather", '{"city": "Köln", "days": 2}')
TIME = ToolCall("time", "{}")


def parse(form: MessageForm, *pieces: str, tools: Any = TOOLS) -> Parts:
    parser = MessageParser(form, tools)
    parts = [feed(parser, piece) for piece in pieces]
    parts.append(feed(parser, "", last=True))
    return Parts(
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        tuple(call for part in parts for call in part.calls),
    )


# --- reasoning ---


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "content"),
    [
        (OPENED, "I add.\n</think>\n\n4", "I add.", "4"),
        (OPENED, "\nI add.</think>4", "I add.", "4"),
        (OPENED, "<think>\nI add.\n</think>\n4", "I add.", "4"),  # opened twice
        (OPENED, "</think>4", "", "4"),
        (OPENED, "I add", "I add", ""),  # cut off
        (OPENED, "I add </thi", "I add </thi", ""),
        (OPENED, "", "", ""),
        (OPENED, " <thi", "<thi", ""),
        (OPENED, "a\n\nb</think>c </think> d", "a\n\nb", "c </think> d"),
        (THINK, "<think>\nI add.\n</think>\n\n4\n", "I add.", "4\n"),
        (THINK, "\n<think>x</think>", "x", ""),
        (THINK, "  4 <think>x</think>", "", "  4 <think>x</think>"),
        (THINK, "<thi", "", "<thi"),
        (THINK, "\n\n", "", "\n\n"),
        (MessageForm(), "<think>x</think>\n4", "", "<think>x</think>\n4"),
    ],
)
def test_reasoning(form, text, reasoning, content):
    assert parse(form, text) == Parts(reasoning, content, ())
    assert parse(form, *text) == Parts(reasoning, content, ())


def test_reasoning_is_told_as_it_comes():
    parser = MessageParser(OPENED, ())
    assert feed(parser, "I ") == Parts("I", "", ())
    assert feed(parser, "add") == Parts(" add", "", ())
    assert feed(parser, "\n</thi") == Parts("", "", ())
    assert feed(parser, "nk>\n") == Parts("", "", ())
    assert feed(parser, "4") == Parts("", "4", ())
    assert feed(parser, " ", last=True) == Parts("", " ", ())


# --- tool calls ---

QWEN = MessageForm(tools="qwen")
DEEPSEEK = MessageForm(tools="deepseek")
LLAMA = MessageForm(tools="llama")

SUN_JSON = '{"name": "weather", "arguments": {"city": "Köln", "days": 2}}'
TIME_JSON = '{"name": "time", "arguments": {}}'
SUN_XML = (
    "<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>"
)
DEEPSEEK_R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln", "days": 2}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
LLAMA_SUN = '{"name": "weather", "parameters": {"city": "Köln", "days": 2}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (QWEN, f"<tool_call>\n{SUN_JSON}\n</tool_call>", "", (SUN,)),
        (
            QWEN,
            f"Let me see.\n\n<tool_call>\n{SUN_JSON}\n</tool_call>\n<tool_call>{TIME_JSON}</tool_call>\n",
            "Let me see.",
            (SUN, TIME),
        ),
        (QWEN, f"<tool_call>\n{SUN_XML}\n</tool_call>", "", (SUN,)),
        (QWEN, f"a <tool_call>{TIME_JSON}</tool_call> b ", "ab ", (TIME,)),
        (QWEN, "a < b, <tool> \n", "a < b, <tool> \n", ()),
        (QWEN, "<tool_call>rain?</tool_call>", "<tool_call>rain?</tool_call>", ()),
        (
            QWEN,
            '<tool_call>{"name": "time"}</tool_call>',
            '<tool_call>{"name": "time"}</tool_call>',
            (),
        ),
        (QWEN, f"<tool_call>{SUN_JSON[:-1]}", f"<tool_call>{SUN_JSON[:-1]}", ()),  # cut off
        (QWEN, "<tool_c", "<tool_c", ()),
        (DEEPSEEK, DEEPSEEK_R1, "", (SUN, TIME)),
        (DEEPSEEK, f"Hm.\n{DEEPSEEK_V31}", "Hm.", (SUN, TIME)),
        (LLAMA, LLAMA_SUN, "", (SUN,)),
        (LLAMA, f"\n{LLAMA_SUN}; {TIME_JSON}\n", "", (SUN, TIME)),
        (LLAMA, f"<|python_tag|>{LLAMA_SUN}", "", (SUN,)),
        (LLAMA, f"Sure: {LLAMA_SUN}", f"Sure: {LLAMA_SUN}", ()),
        (LLAMA, f"{LLAMA_SUN} and", f"{LLAMA_SUN} and", ()),
        (LLAMA, '{"answer": 4}', '{"answer": 4}', ()),
        (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', ()),
        (LLAMA, '{"name": "time", "para', '{"name": "time", "para', ()),
        (LLAMA, "<|py", "<|py", ()),
        (LLAMA, "", "", ()),
        (
            MessageForm(),
            f"<tool_call>{TIME_JSON}</tool_call>",
            f"<tool_call>{TIME_JSON}</tool_call>",
            (),
        ),
    ],
)
def test_tool_calls(form, text, content, calls):
    assert parse(form, text) == Parts("", content, calls)
    assert parse(form, *text) == Parts("", content, calls)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_arguments_may_nest(depth):
    nested = "[" * depth + "]" * depth
    text = f'<tool_call>{{"name": "time", "arguments": {{"a": {nested}}}}}</tool_call>'
    found = parse(QWEN, text)
    assert (len(found.calls) == 1) or found.content == text


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_call_with_a_value_that_no_answer_can_hold_stays_text(value):
    call = f'{{"name": "time", "arguments": {{"a": {value}}}}}'
    for form, text in (
        (QWEN, f"<tool_call>{call}</tool_call>"),
        (
            QWEN,
            f"<tool_call><function=time><parameter=a>{value}</parameter></function></tool_call>",
        ),
        (DEEPSEEK, f'<｜tool▁call▁begin｜>time<｜tool▁sep｜>{{"a": {value}}}<｜tool▁call▁end｜>'),
        (LLAMA, call),
    ):
        assert parse(form, text) == Parts("", text, ())


@pytest.mark.parametrize(
    ("value", "told"),
    [('["\\ud83d"]', ["?"]), ('{"\\ud83d": 1}', {"?": 1}), ("-1e999", -sys.float_info.max)],
)
def test_call_with_half_a_pair_or_too_large_a_number_has_what_can_be_told(value, told):
    (call,) = parse(LLAMA, f'{{"name": "time", "arguments": {{"a": {value}}}}}').calls
    assert json.loads(call.arguments) == {"a": told}


def test_call_of_a_name_that_no_answer_can_hold_stays_text():
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert parse(QWEN, text) == Parts("", text, ())


def test_values_between_tags_have_the_type_of_the_schema():
    values = {"city": "12", "days": "two", "more": '{"a": [1]}', "none": "null", "text": "a\nb"}
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    (call,) = parse(QWEN, f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>").calls
    expected = {"city": "12", "days": "two", "more": {"a": [1]}, "none": None, "text": "a\nb"}
    assert json.loads(call.arguments) == expected


STRING, NULL = {"type": "string"}, {"type": "null"}
ITSELF = {"anyOf": [NULL, {"$ref": "#/$defs/Itself"}]}


@pytest.mark.parametrize(
    "inside",
    [
        {"anyOf": [{}] * 100_000},
        {"anyOf": [5] * 100_000},
        {"enum": [1] * 100_000},
        {"type": ["integer"] * 100_000},
        {"$ref": "#" + "/a" * 100_000},
    ],
    ids=["schemas", "none", "values", "types", "reference"],
)
def test_parameters_without_number_share_no_work_of_their_schema(inside: Any) -> None:
    count = 2000
    properties = {str(i): {"$ref": "#/d"} for i in range(count)}
    tool = {"name": "f", "parameters": {"properties": properties, "d": inside}}
    tags = "".join(f"<parameter={i}>1</parameter>" for i in range(count))
    text = f"<tool_call><function=f>{tags}</function></tool_call>"
    began_s = time.process_time()
    (call,) = parse(QWEN, text, tools=[{"type": "function", "function": tool}]).calls
    assert time.process_time() - began_s < 2  # each looking at all of it would take 20 s and more
    assert json.loads(call.arguments).keys() == properties.keys()


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [STRING, NULL]}, "10001", "10001"),
        ({"anyOf": [STRING, NULL]}, '{"a": 1}', '{"a": 1}'),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"oneOf": [NULL, {"anyOf": [STRING]}]}, "1.5", "1.5"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, "\nnull\n", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", None]}, "null", None),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"enum": ["auto", 1]}, "auto", "auto"),
        ({"type": "string", "enum": []}, "1", "1"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["boolean", "null"]}, " FALSE ", False),
        ({"enum": [True, False]}, "True", True),
        ({"type": "boolean"}, "None", "None"),
        ({"type": "integer"}, "True", "True"),
        ({"anyOf": [{"type": "integer"}, NULL]}, "7", 7),
        ({"anyOf": [{"type": "object"}, NULL]}, '{"a": 1}', {"a": 1}),
        ({"const": "1"}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/Text"}, "10001", "10001"),
        ({"allOf": [{"$ref": "#/$defs/Text"}], "default": "a"}, "10001", "10001"),
        ({"anyOf": [{"$ref": "#/$defs/Text"}, NULL]}, "null", None),
        ({"$ref": "#/$defs/Whole~1part~0"}, "7", 7),
        ({"anyOf": [{"$ref": "#/$defs/Itself"}, STRING]}, "7", "7"),
        ({"$ref": "#/$defs/Nothing"}, "7", 7),
        ({"$ref": "#/$defs/Text/type/a"}, "7", 7),
        ({"$ref": "elsewhere#/$defs/Text"}, "7", 7),
        ({"$ref": 3, "allOf": "x"}, "7", 7),
        ({"type": 3, "anyOf": "x", "enum": {}}, "7", 7),
        (True, "7", 7),
    ],
)
def test_value_between_tags_is_one_that_its_schema_allows(schema, written, value):
    named = {"Text": STRING, "Whole/part~": {"type": "integer"}, "Itself": ITSELF}
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": named}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<tool_call><function=f><parameter=a>\n{written}\n</parameter></function></tool_call>"
    (call,) = parse(QWEN, text, tools=tools).calls
    assert json.loads(call.arguments) == {"a": value}


@given(
    st.lists(
        st.sampled_from(["<parameter=", "<parameter=a>", "</parameter>", "\n", ">", "b", "<"]),
        max_size=20,
    ).map("".join)
)
def test_parameters_are_those_of_the_pattern(text):
    """The pattern says it best, but takes quadratic time."""
    expected = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", text, re.DOTALL)
    strings = {"type": "object", "properties": {key: {"type": "string"} for key, _ in expected}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": strings}}]
    message = f"<tool_call><function=f>{text}</function></tool_call>"
    (call,) = parse(QWEN, message, tools=tools).calls
    assert json.loads(call.arguments) == dict(expected)


@pytest.mark.parametrize("form", [QWEN, DEEPSEEK, LLAMA])
def test_without_tools_all_is_text(form):
    for text in (f"<tool_call>{TIME_JSON}</tool_call>", DEEPSEEK_R1, LLAMA_SUN):
        assert parse(form, text, tools=()) == Parts("", text, ())


def test_text_in_front_of_a_call_is_told_as_it_comes():
    parser = MessageParser(QWEN, TOOLS)
    assert feed(parser, "Let me see.\n").content == "Let me see."
    assert feed(parser, "<tool_call>" + TIME_JSON) == Parts("", "", ())
    assert feed(parser, "</tool_call>").calls == (TIME,)


# --- calls with marks in them, without a mark behind them, and behind marks of none ---

OPEN, CLOSE = "<tool_call>", "</tool_call>"
DEEP_OPEN, DEEP_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
TAGS = f'use {OPEN} and {CLOSE} tags, "as" {CLOSE}{{\\'
TAGS_JSON = json.dumps({"name": "time", "arguments": {"text": TAGS}})
TAGGED = ToolCall("time", json.dumps({"text": TAGS}))
TAGS_XML = f"<function=time>\n<parameter=text>\n{TAGS}\n</parameter>\n</function>"
UNCLOSED = f"{OPEN}<function=time><parameter=text>\nIt is\n</function>{CLOSE}"
DEEP_SEP = "<｜tool▁sep｜>"
DEEP_TAGS = f'{DEEP_OPEN}, {DEEP_SEP} and "{DEEP_CLOSE}", ```{{\n```'
DEEP_TAGGED = ToolCall("time", json.dumps({"text": DEEP_TAGS}, ensure_ascii=False))
DEEP_R1, DEEP_V31 = (
    f"{DEEP_OPEN}{before}{DEEP_TAGGED.arguments}{after}"
    for before, after in (
        (f"function{DEEP_SEP}time\n```json\n", "\n```"),
        (f"time{DEEP_SEP}", ""),
    )
)


def parse_at_each_cut(form: MessageForm, text: str) -> Parts:
    """What a text becomes, which is the same wherever it is cut."""
    whole = parse(form, text)
    for at in range(len(text) + 1):
        assert parse(form, text[:at], text[at:]) == whole
    assert parse(form, *text) == whole
    return whole


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        # Marks in a string.
        (QWEN, f"{OPEN}{TAGS_JSON}{CLOSE}", "", (TAGGED,)),
        (QWEN, f"{OPEN}\n {TAGS_JSON}\n{CLOSE}\n", "", (TAGGED,)),
        (
            QWEN,
            f"a {OPEN}{TAGS_JSON}{CLOSE} {OPEN}{TIME_JSON}{CLOSE}{OPEN}{TAGS_JSON}{CLOSE}",
            "a",
            (TAGGED, TIME, TAGGED),
        ),
        (QWEN, f"{OPEN}{TAGS_JSON}", "", (TAGGED,)),
        (DEEPSEEK, f"a {DEEP_R1}{DEEP_CLOSE}\n{DEEP_R1}{DEEP_CLOSE}", "a", (DEEP_TAGGED,) * 2),
        (DEEPSEEK, f"a {DEEP_V31}{DEEP_CLOSE}{DEEP_V31}{DEEP_CLOSE}", "a", (DEEP_TAGGED,) * 2),
        (DEEPSEEK, DEEP_R1, "", (DEEP_TAGGED,)),
        # Marks in a parameter.
        (QWEN, f"{OPEN}{TAGS_XML}{CLOSE} b", "b", (TAGGED,)),
        (QWEN, f"{OPEN}\n{TAGS_XML}\n{CLOSE}\n{OPEN}{SUN_XML}{CLOSE}", "", (TAGGED, SUN)),
        (QWEN, f"{OPEN}{TAGS_XML}", "", (TAGGED,)),
        (
            QWEN,
            f"{OPEN}<function=time><parameter=a>{CLOSE}</parameter><parameter=b></function>{CLOSE}"
            f"</parameter></function>{CLOSE}{OPEN}{TIME_JSON}{CLOSE}",
            "",
            (ToolCall("time", json.dumps({"a": CLOSE, "b": f"</function>{CLOSE}"})), TIME),
        ),
        # A parameter that nothing closes.
        (QWEN, f"{UNCLOSED} a", "a", (TIME,)),
        (QWEN, f"{UNCLOSED} {OPEN}{SUN_JSON}{CLOSE}", "", (TIME, SUN)),
        (QWEN, f"{UNCLOSED}{OPEN}{SUN_XML}{CLOSE}", "", (TIME, SUN)),
        (QWEN, UNCLOSED * 3 + f"{OPEN}{TAGS_XML}{CLOSE}", "", (TIME, TIME, TIME, TAGGED)),
        (
            QWEN,
            f"{OPEN}<function=time><parameter=a>{CLOSE} {OPEN}{SUN_JSON}{CLOSE}",
            f"{OPEN}<function=time><parameter=a>{CLOSE}",
            (SUN,),
        ),
        # No call, with the mark of one in it.
        (
            QWEN,
            f"I use the {OPEN} tag now. {OPEN}{SUN_JSON}{CLOSE}",
            f"I use the {OPEN} tag now.",
            (SUN,),
        ),
        (QWEN, f"The {OPEN}\n\n{OPEN}\n{TIME_JSON}\n{CLOSE}", f"The {OPEN}", (TIME,)),
        (
            QWEN,
            f"{OPEN}{OPEN}x{CLOSE} {OPEN}{TAGS_JSON}{CLOSE}",
            f"{OPEN}{OPEN}x{CLOSE}",
            (TAGGED,),
        ),
        (
            QWEN,
            f'{OPEN}{{"name": "time", "arguments": {{{CLOSE}\n{OPEN}{TIME_JSON}{CLOSE}',
            f'{OPEN}{{"name": "time", "arguments": {{{CLOSE}',
            (TIME,),
        ),
        (
            QWEN,
            f'{OPEN}{{"name": "ti{CLOSE}\n{OPEN}{TIME_JSON}{CLOSE}',
            f'{OPEN}{{"name": "ti{CLOSE}',
            (TIME,),
        ),
        (
            QWEN,  # a string that does not end, but with the message
            f'{OPEN}{{"name": "ti{CLOSE} {OPEN}{TIME_JSON.replace(chr(34), chr(39))}{CLOSE}',
            f'{OPEN}{{"name": "ti{CLOSE} {OPEN}{TIME_JSON.replace(chr(34), chr(39))}{CLOSE}',
            (),
        ),
        (
            QWEN,
            f"{OPEN}<function=time> {OPEN}\n{SUN_JSON}{CLOSE}",
            f"{OPEN}<function=time>",
            (SUN,),
        ),
        (
            QWEN,
            f"{OPEN}<function=time><parameter=text>{OPEN}</parameter></function>{CLOSE}",
            "",
            (ToolCall("time", json.dumps({"text": OPEN})),),
        ),
        # The mark of the next one behind it.
        (QWEN, f"{OPEN}{TIME_JSON}{OPEN}{SUN_JSON}{CLOSE}", "", (TIME, SUN)),
        (QWEN, f"{OPEN}{SUN_JSON}\n{OPEN}\n{TIME_JSON}\n{OPEN}{SUN_JSON}", "", (SUN, TIME, SUN)),
        (QWEN, f"{OPEN}{TIME_JSON}{OPEN}b", f"{OPEN}b", (TIME,)),
        (QWEN, f"{OPEN}{{}}{OPEN}{TIME_JSON}", f"{OPEN}{{}}", (TIME,)),
        (QWEN, f"{OPEN}{SUN_XML}{OPEN}{TAGS_XML}\n{OPEN}{TIME_JSON}", "", (SUN, TAGGED, TIME)),
        (
            QWEN,
            f"{OPEN}{SUN_XML}<{OPEN}{TIME_JSON}",
            f"{OPEN}{SUN_XML}<",
            (TIME,),
        ),
        (DEEPSEEK, f"{DEEP_V31}{DEEP_V31}\n{DEEP_R1}{DEEP_R1}", "", (DEEP_TAGGED,) * 4),
        (
            DEEPSEEK,
            f"{DEEP_OPEN}time{DEEP_SEP}{DEEP_OPEN}time{DEEP_SEP}{{}}",
            f"{DEEP_OPEN}time{DEEP_SEP}",
            (TIME,),
        ),
        (
            DEEPSEEK,
            f"The {DEEP_OPEN} mark: {DEEP_OPEN}time<｜tool▁sep｜>{{}}{DEEP_CLOSE}",
            f"The {DEEP_OPEN} mark:",
            (TIME,),
        ),
        # Nothing behind it.
        (QWEN, f"{OPEN}{TIME_JSON}", "", (TIME,)),
        (QWEN, f"So:\n{OPEN}\n{TIME_JSON}\n", "So:", (TIME,)),
        (QWEN, f"{OPEN}\n{TIME_JSON}\n</tool_", "", (TIME,)),
        (QWEN, f"{OPEN}{TIME_JSON}{CLOSE}\n{OPEN}{SUN_JSON}", "", (TIME, SUN)),
        (QWEN, f"{OPEN}{SUN_XML}", "", (SUN,)),
        (QWEN, f"{OPEN}{SUN_XML}\n<", "", (SUN,)),
        (QWEN, f"{OPEN}{TIME_JSON} and", f"{OPEN}{TIME_JSON} and", ()),
        (QWEN, f"{OPEN}{SUN_XML[:-1]}", f"{OPEN}{SUN_XML[:-1]}", ()),
        (QWEN, f"{OPEN} {OPEN}{TIME_JSON}", OPEN, (TIME,)),
        (QWEN, f"{OPEN}<function=a {OPEN}{TIME_JSON}", f"{OPEN}<function=a", (TIME,)),
        (DEEPSEEK, f"{DEEP_OPEN}time<｜tool▁sep｜>{{}}", "", (TIME,)),
        (DEEPSEEK, f"{DEEP_OPEN}function<｜tool▁sep｜>time\n```json\n{{}}\n```<｜", "", (TIME,)),
    ],
)
def test_calls_among_marks(form, text, content, calls):
    assert parse_at_each_cut(form, text) == Parts("", content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN, f"Write it as\n\n{OPEN}\nname and args\n{CLOSE}\n\nlike this."),
        (QWEN, f'Sure.\n\n{OPEN}\n{{"name": "ad'),
        (QWEN, f"\n {OPEN} \n"),
        (QWEN, f" a {OPEN} b {CLOSE} c {OPEN}\n{{}}\n{CLOSE} \n d \n"),
        (QWEN, f" {OPEN}\n<function=f>\n{CLOSE}\n\n{OPEN}<function=g>\n"),
        (QWEN, f' {OPEN} {{"a": "{CLOSE} " }} {CLOSE} b'),
        (DEEPSEEK, f"Hi\n\n<｜tool▁calls▁begin｜>\n{DEEP_OPEN} it {DEEP_CLOSE}\n"),
        (
            DEEPSEEK,
            "Hi\n\n<｜tool▁calls▁begin｜>\n <｜tool▁calls▁end｜> or\n<｜tool▁calls▁begin｜> ",
        ),
        (LLAMA, f"\n {LLAMA_SUN[:-1]} \n"),
    ],
)
def test_what_is_no_call_comes_back_as_it_was_written(form, text):
    assert parse_at_each_cut(form, text) == Parts("", text, ())


def test_white_space_goes_around_calls_only():
    text = f" a \n{OPEN}{TIME_JSON}{CLOSE}\n \n{OPEN} b {CLOSE} \n{OPEN}{TIME_JSON}{CLOSE} c \n"
    found = parse_at_each_cut(QWEN, text)
    assert found == Parts("", f" a{OPEN} b {CLOSE}c \n", (TIME, TIME))
    text = f" a \n<｜tool▁calls▁begin｜>\n{DEEP_OPEN}time<｜tool▁sep｜>{{}}{DEEP_CLOSE}\n<｜tool▁calls▁end｜>\n b"
    assert parse_at_each_cut(DEEPSEEK, text) == Parts("", " ab", (TIME,))


def test_what_can_be_no_call_is_told_as_soon_as_that_is_clear():
    parser = MessageParser(QWEN, TOOLS)
    assert feed(parser, f"The {OPEN}").content == "The"
    assert feed(parser, " ").content == ""
    assert feed(parser, "tag ").content == f" {OPEN} tag"
    assert feed(parser, f'{OPEN}{{"a": "{CLOSE}').content == ""
    assert feed(parser, "\n").content == f' {OPEN}{{"a": "{CLOSE}'
    assert feed(parser, f'{OPEN}{{"a": "{CLOSE}"}} ').content == ""
    assert feed(parser, ".").content == f'\n{OPEN}{{"a": "{CLOSE}"}} .'
    assert feed(parser, "\n", last=True).content == "\n"


def test_marks_that_begin_nothing_hide_no_call_but_many_in_a_row():
    """All are tried that can begin JSON, and some that can begin calls of other forms."""
    call = f"{OPEN}{TIME_JSON}{CLOSE}"
    for begin in (OPEN, f'{OPEN}{{"'):
        assert parse(QWEN, begin * 100 + call).calls == (TIME,)
    assert parse(QWEN, f"{OPEN}{TIME_JSON}" * 100 + call).calls == (TIME,) * 101
    assert parse(QWEN, f"{OPEN}<function=" * 5 + call).calls == (TIME,)
    text = f"{OPEN}<function=" * 100 + call
    assert parse_at_each_cut(QWEN, text + call) == Parts("", text, (TIME,))


# --- any text, any cut ---

MARKS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|python_tag|>",
        "function",
        "```json",
    ),
    *(SUN_JSON, TIME_JSON, LLAMA_SUN, SUN_XML, DEEPSEEK_R1, DEEPSEEK_V31),
    *(" ", "\n", ";", "{", "<", "</", "think>", "tool_call>", "a", "bc"),
    *(TAGS_JSON, '"', "\\", '{"a": "', '"}', "<function=f>"),
    *("<parameter=a>", "</parameter>", "</function>", "```", TAGS_XML, DEEP_V31),
)
FORMS = [
    MessageForm(reasoning, tools, opened)
    for reasoning in (None, "think")
    for tools in (None, "qwen", "deepseek", "llama")
    for opened in (False, True)
]


@given(
    form=st.sampled_from(FORMS),
    text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
def test_cuts_make_no_difference(form, text, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(form, *pieces) == parse(form, text) == parse(form, *text)


@given(
    form=st.sampled_from(FORMS),
    text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
)
def test_nothing_is_lost_but_marks_white_space_and_calls(form, text):
    found = parse(form, text)
    rest = found.reasoning + found.content
    if not found.calls:
        without = [text, rest]
        for mark in (*MARKS[:10], " ", "\n"):
            without = [each.replace(mark, "") for each in without]
        assert without[0] == without[1]


@given(
    form=st.sampled_from([QWEN, DEEPSEEK, LLAMA]),
    text=st.lists(st.sampled_from(MARKS), max_size=12).map("".join),
)
def test_nothing_is_lost_without_calls(form, text):
    found = parse(form, text)
    assert found.calls or found.content == text


@given(
    text=st.recursive(
        st.sampled_from([OPEN, CLOSE, TAGS, "", "a"]) | st.none() | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([OPEN, CLOSE, "a"]), inner)
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps({"name": "time", "arguments": {"a": value}})),
    before=st.sampled_from(["", OPEN, f"{OPEN} a", f'{OPEN}{{"', f"{OPEN}{{}}", CLOSE]),
    after=st.sampled_from(["", f"{CLOSE}", f"\n{CLOSE}\n"]),
)
def test_call_is_found_whatever_its_arguments_are(text, before, after):
    (call,) = parse(QWEN, f"{before}{OPEN}{text}{after}").calls
    assert json.loads(call.arguments) == json.loads(text)["arguments"]


@pytest.mark.parametrize(
    ("form", "marks", "written", "closing"),
    [
        (
            QWEN,
            (OPEN, CLOSE, "</function>"),
            "<function=f><parameter=a>{}</parameter></function>",
            CLOSE,
        ),
        (
            DEEPSEEK,
            (DEEP_OPEN, DEEP_CLOSE, DEEP_SEP),
            f'f{DEEP_SEP}{{{{"a": "{{}}"}}}}',
            DEEP_CLOSE,
        ),
        (
            DEEPSEEK,
            (DEEP_OPEN, DEEP_CLOSE, "```"),
            f'function{DEEP_SEP}f\n```json\n{{{{"a": "{{}}"}}}}\n```',
            DEEP_CLOSE,
        ),
    ],
)
@given(data=st.data())
def test_call_is_found_whatever_marks_are_in_its_text(
    form: MessageForm, marks: tuple[str, ...], written: str, closing: str, data: st.DataObject
) -> None:
    opening = marks[0]
    texts = st.lists(st.sampled_from([*marks, "{", "a", " ", "<"])).map("".join)
    values = data.draw(st.lists(texts, min_size=1, max_size=3))
    ends = data.draw(st.lists(st.sampled_from(["", closing, f"\n{closing}\n"]), min_size=3))
    calls = [
        f"{opening}{written.format(each)}{end}" for each, end in zip(values, ends, strict=False)
    ]
    found = parse(form, data.draw(st.sampled_from(["", "b", opening])) + "".join(calls)).calls
    assert [json.loads(each.arguments) for each in found] == [{"a": each} for each in values]


# --- how long it takes ---

LONG = 8  # times as long
SPACES = " " * 64


def pieces_of(*first: str, then: str) -> Callable[[int], list[str]]:
    return lambda n: [*first, *[then] * n]


def at_once(before: str, each: str, after: str) -> Callable[[int], list[str]]:
    return lambda n: [before + each * n + after]


@pytest.mark.parametrize(
    ("form", "text", "n"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "unclosed parameters": (
                QWEN,
                at_once("<tool_call><function=time>", "<parameter=a>", "</function></tool_call>"),
                500,
            ),
            "unclosed names": (
                QWEN,
                at_once("<tool_call><function=time>", "<parameter=", "</function></tool_call>"),
                500,
            ),
            "names in two lines": (
                QWEN,
                at_once("<tool_call><function=time>", "<parameter=\n", "></function></tool_call>"),
                500,
            ),
            "white space before an answer": (QWEN, pieces_of(then=SPACES), 1000),
            "white space before a thought": (THINK, pieces_of(then=SPACES), 1000),
            "white space in a thought": (OPENED, pieces_of("a", then=SPACES), 1000),
            "white space before bare calls": (LLAMA, pieces_of(then=SPACES), 1000),
            "a long call": (QWEN, pieces_of("<tool_call>", then="a" * 64), 2000),
            "a long call of JSON": (QWEN, pieces_of('<tool_call>{"a": "', then="a" * 64), 2000),
            "a long call of tags": (
                QWEN,
                pieces_of("<tool_call><function=f>", then="a" * 64),
                2000,
            ),
            "a long bare call": (LLAMA, pieces_of("{", then="a" * 64), 1000),
            "many marks of several kinds": (
                DEEPSEEK,
                at_once("", "<｜tool▁call▁begin｜><｜tool▁call▁end｜>", ""),
                4000,
            ),
        }.items()
    ],
)
def test_time_grows_as_the_message_does(form, text, n):
    """Quadratic work would take 64 times as long for 8 times the text."""

    def taken_s(n: int) -> float:
        pieces = text(n)
        begun_s = time.thread_time()
        parse(form, *pieces)
        return time.thread_time() - begun_s

    short_s, long_s = (min(taken_s(each) for _ in range(3)) for each in (n, LONG * n))
    assert long_s < 3 * LONG * short_s


@pytest.mark.parametrize("size", [4, 10**6])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "closing marks in a string": (QWEN, at_once(f'{OPEN}{{"a": "', CLOSE, "")),
            "closing marks in strings": (QWEN, at_once(f'{OPEN}{{"a": ["', f'{CLOSE}", "', "\n")),
            "closing marks in a string of no call": (
                QWEN,
                at_once(f'{OPEN}{{"a": "', CLOSE, f'"}}{CLOSE}'),
            ),
            "opening marks": (QWEN, at_once("", OPEN, "")),
            "opening marks of objects": (QWEN, at_once("", f'{OPEN}{{"a": "', "\n")),
            "opening marks of objects in strings": (QWEN, at_once("", f'{OPEN}{{", "', "\n")),
            "objects that are no calls": (QWEN, at_once("", f"{OPEN}{{}}", CLOSE)),
            "opening marks with tags": (QWEN, at_once("", f"{OPEN}<function=f>", "")),
            "opening marks with tags, closed": (QWEN, at_once("", f"{OPEN}<function=f>", CLOSE)),
            "opening marks of a call with tags that can be none": (
                QWEN,
                at_once(
                    "",
                    f"{OPEN}<function=f>",
                    f"<parameter=a>NaN</parameter></function>{CLOSE}",
                ),
            ),
            "closing marks in a parameter": (
                QWEN,
                at_once(f"{OPEN}<function=f><parameter=a>", CLOSE, ""),
            ),
            "closing marks in parameters": (
                QWEN,
                at_once("", f"{OPEN}<function=f><parameter=a>{CLOSE}", ""),
            ),
            "opening marks behind a parameter that nothing closes": (
                QWEN,
                at_once(f"{OPEN}<function=f><parameter=a>{CLOSE}", f"{OPEN}<function=f>", ""),
            ),
            "ends far away and near": (
                QWEN,
                at_once("", f"{OPEN}<function=f><parameter=a>{OPEN}<function=f</function>", "a"),
            ),
            "calls without closing marks": (QWEN, at_once("", f"{OPEN}{TIME_JSON}", "")),
            "opening marks of DeepSeek": (DEEPSEEK, at_once("", DEEP_OPEN, DEEP_CLOSE)),
            "separators of DeepSeek": (DEEPSEEK, at_once("", f"{DEEP_OPEN}f{DEEP_SEP}", "{\n]")),
            "objects of DeepSeek in strings": (
                DEEPSEEK,
                at_once("", f'{DEEP_OPEN}f{DEEP_SEP}{{", "', "\n"),
            ),
            "objects of DeepSeek that are no calls": (
                DEEPSEEK,
                at_once("", f"{DEEP_OPEN}{DEEP_SEP}{{}}", DEEP_CLOSE),
            ),
            "closing marks in an object of DeepSeek": (
                DEEPSEEK,
                at_once(f'{DEEP_OPEN}f{DEEP_SEP}{{"a": "', DEEP_CLOSE, ""),
            ),
        }.items()
    ],
)
def test_work_grows_as_the_message_does(
    monkeypatch: pytest.MonkeyPatch, form: MessageForm, text: Callable[[int], list[str]], size: int
) -> None:
    """Counted in characters that are looked at; each as often as it would be in a shorter message."""
    looked_at = 0

    def counted(look: Callable[..., Any]) -> Callable[..., Any]:
        def looks(*arguments: Any) -> Any:
            nonlocal looked_at
            looked_at += max(1, sum(len(each) for each in arguments if isinstance(each, str)))
            return look(*arguments)

        return looks

    for part in (HeldText, OpenCall, GrowingObject):
        monkeypatch.setattr(part, "feed", counted(part.feed))
    for name in ("_read_qwen", "_read_deepseek"):
        monkeypatch.setattr(tool_calls, name, counted(getattr(tool_calls, name)))

    def work(n: int) -> int:
        nonlocal looked_at
        looked_at = 0
        (whole,) = text(n)
        parse(form, *(whole[at : at + size] for at in range(0, len(whole), size)))
        return looked_at

    assert work(LONG * 1000) < 1.5 * LONG * work(1000)
