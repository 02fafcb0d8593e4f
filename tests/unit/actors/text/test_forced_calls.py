"""Answers that must call a tool: whatever the model wants to write, a call comes out that is read back as one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.errors import UnsupportedParameter
from actors.protocol import ChatPrompt, MessageForm
from actors.text.codec import TextCodec
from actors.text.forced_calls import forced_call
from serve_app.openai.message import MessageParser
from tests.unit.actors.engine.sampling.test_grammar import generate, ids, make_codec, sequence
from tests.unit.serve_app.openai.parts import Parts, feed

KIND = {"enum": ["a", "bc"]}
SCHEMA = {
    "type": "object",
    "properties": {"kind": KIND},
    "required": ["kind"],
    "additionalProperties": False,
}
TOOLS: Any = tuple(
    {"type": "function", "function": function}
    for function in (
        {"name": "sort", "parameters": SCHEMA},
        {"name": 'say "x"', "parameters": {**SCHEMA, "properties": {"kind": {"const": "é"}}}},
        {"name": "other", "parameters": {"type": "object", "additionalProperties": False}},
        {"name": "bare"},
        {"name": "wrong", "parameters": {"type": "string"}},
        {"name": "o\x01\n\u2028\\/%json", "parameters": SCHEMA},
    )
)
FORMS = ["qwen", "deepseek", "llama"]
QWEN = '<tool_call>\n{"name": "sort", "arguments": {"kind": "a"}}\n</tool_call>'


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return make_codec("<eos>")


@pytest.fixture
def compiler(codec: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: codec)
    yield compiler
    compiler.close()


def prompt(*names: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": "hi"},), tools=TOOLS, must_call=names)


def read(form: MessageForm, text: str) -> Parts:
    return feed(MessageParser(form, TOOLS), text, last=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("names", [("sort",), ('say "x"',), ("other", "sort")])
@pytest.mark.parametrize("tools", FORMS)
def test_one_call_comes_out_whatever_the_logits_are(
    codec: TextCodec, compiler: GrammarCompiler, tools: str, names: tuple[str, ...], seed: int
) -> None:
    form = MessageForm(tools=tools)
    grammar = compiler.compile(forced_call(form, prompt(*names)))
    *tokens, last = generate(sequence(codec, grammar, seed), seed)
    assert last in codec.eos_ids
    parts = read(form, codec.decode(tokens))
    (call,) = parts.calls
    assert (parts.reasoning, parts.content) == ("", "")
    assert call.name in names
    kinds = {"sort": ("a", "bc"), 'say "x"': ("é",), "other": (None,)}
    assert json.loads(call.arguments).get("kind") in kinds[call.name]


@pytest.mark.parametrize("name", ["bare", "wrong"])
@pytest.mark.parametrize("tools", FORMS)
def test_arguments_are_an_object_whatever_the_schema_says(
    codec: TextCodec, compiler: GrammarCompiler, tools: str, name: str
) -> None:
    form = MessageForm(tools=tools)
    grammar = compiler.compile(forced_call(form, prompt(name)))
    *tokens, last = generate(sequence(codec, grammar, 1), 1, limit=3000)
    assert last in codec.eos_ids
    assert [call.name for call in read(form, codec.decode(tokens)).calls] == [name]


@pytest.mark.parametrize("tools", ["qwen", "llama"])
def test_name_may_have_any_characters(
    codec: TextCodec, compiler: GrammarCompiler, tools: str
) -> None:
    form, name = MessageForm(tools=tools), TOOLS[-1]["function"]["name"]
    grammar = compiler.compile(forced_call(form, prompt(name)))
    *tokens, _ = generate(sequence(codec, grammar, 1), 1)
    assert [call.name for call in read(form, codec.decode(tokens)).calls] == [name]


def follows(codec: TextCodec, compiler: GrammarCompiler, form: MessageForm, text: str) -> bool:
    """Whether a text is an answer, whole."""
    matcher = compiler.compile(forced_call(form, prompt("sort"))).matcher
    tokens = ids(codec, text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("in_reasoning", "text", "reasoning"),
    [
        (False, QWEN, ""),
        (False, "<think>\nI sort.\n\n</think>\n\n" + QWEN, "I sort."),
        (False, "\n<think></think>" + QWEN, ""),
        (True, "I < sort </th.\n</think>\n" + QWEN, "I < sort </th."),
        (True, "</think>" + QWEN, ""),
    ],
)
def test_reasoning_comes_first_where_the_model_has_it(
    codec: TextCodec, compiler: GrammarCompiler, in_reasoning: bool, text: str, reasoning: str
) -> None:
    form = MessageForm("think", "qwen", in_reasoning)
    assert follows(codec, compiler, form, text)
    parts = read(form, text)
    assert (parts.reasoning, parts.content, len(parts.calls)) == (reasoning, "", 1)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MessageForm(tools="qwen"), "Hello"),
        (MessageForm(tools="qwen"), "<think></think>" + QWEN),
        (MessageForm(tools="qwen"), QWEN.replace("sort", "other")),
        (MessageForm(tools="qwen"), QWEN.replace('"a"', '"d"')),
        (MessageForm(tools="qwen"), f"{QWEN}\n{QWEN}"),
        (MessageForm("think", "qwen"), "<think>I sort.</think>Hello" + QWEN),
        (MessageForm("think", "qwen", in_reasoning=True), QWEN),
    ],
)
def test_nothing_else_comes(
    codec: TextCodec, compiler: GrammarCompiler, form: MessageForm, text: str
) -> None:
    assert not follows(codec, compiler, form, text)


def test_model_whose_form_of_calls_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="cannot force a call") as caught:
        forced_call(MessageForm("think"), prompt("sort"))
    assert caught.value.param == "tool_choice"
