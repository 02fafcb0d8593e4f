"""Fields that prescribe the form of an answer: what they become, what is refused and how that is said."""

import json
import re

import pytest

from actors.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind
from actors.text.validation import MAX_GRAMMAR_CHARS
from serve_app.openai.fields import MAX_BRACKETS
from serve_app.openai.requests import parse_chat, parse_completion, parse_seed

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["é", None]}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def chat(**fields):
    return parse_chat({"messages": [{"role": "user", "content": "hi"}], **fields})


def completion(**fields):
    return parse_completion({"prompt": "hi", **fields}, max_continuations=64)


def seed(**fields):
    return parse_seed(fields)


@pytest.mark.parametrize("ask", [chat, completion, seed])
@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"response_format": FORMAT}, GrammarKind.JSON_SCHEMA, SCHEMA, "response_format"),
        (
            {"response_format": {"type": "json_object"}},
            GrammarKind.JSON_SCHEMA,
            {"type": "object"},
            "response_format",
        ),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        (
            {"structured_outputs": {"json": SCHEMA, "regex": None}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
            GrammarKind.JSON_SCHEMA,
            {"type": "object"},
            "structured_outputs.json_object",
        ),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, ["a", "b"], "guided_choice"),
        (
            {"structured_outputs": {"choice": ["a"]}},
            GrammarKind.CHOICE,
            ["a"],
            "structured_outputs.choice",
        ),
    ],
)
def test_form_in_json_arrives(ask, fields, kind, value, param):
    grammar = ask(**fields).sampling.grammar
    assert (grammar.kind, json.loads(grammar.text), grammar.param) == (kind, value, param)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+", "guided_regex")),
        (
            {"structured_outputs": {"regex": "a+"}},
            Grammar(GrammarKind.REGEX, "a+", "structured_outputs.regex"),
        ),
        ({"guided_grammar": "x"}, Grammar(GrammarKind.CFG, "x", "guided_grammar")),
        (
            {"structured_outputs": {"grammar": "x"}},
            Grammar(GrammarKind.CFG, "x", "structured_outputs.grammar"),
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            Grammar(GrammarKind.REGEX, "a", "guided_regex"),
        ),
        (dict.fromkeys(["response_format", "structured_outputs", "guided_json"]), None),
    ],
)
def test_other_forms_arrive(fields, expected):
    assert chat(**fields).sampling.grammar == completion(**fields).sampling.grammar == expected


def test_order_of_properties_is_kept():
    text = chat(response_format=FORMAT).sampling.grammar.text
    assert list(json.loads(text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is required"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "must be 'text', 'json_object' or 'json_schema', found \"yaml\"",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
            "must be a JSON schema, an object or its text, found [1]",
        ),
        ({"guided_json": "{"}, "guided_json", "guided_json must be a JSON schema: EOF"),
        (
            {"guided_json": 3},
            "guided_json",
            "must be a JSON schema, an object or its text, found 3",
        ),
        ({"guided_json": "[" * 10_000}, "guided_json", "must be a JSON schema"),
        ({"guided_regex": 3}, "guided_regex", "must be a string"),
        ({"guided_choice": []}, "guided_choice", "must not be empty"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be a string, found 1"),
        ({"guided_choice": "a"}, "guided_choice", "must be an array"),
        ({"structured_outputs": "a"}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "must be a JSON schema"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice exclude each other",
        ),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex exclude each other",
        ),
    ],
)
def test_wrong_value_is_named(fields, param, message):
    for ask in (chat, completion):
        with pytest.raises(InvalidRequest) as caught:
            ask(**fields)
        assert type(caught.value) is InvalidRequest
        assert caught.value.param == param
        assert message in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
        ),
    ],
)
def test_known_but_unsupported(fields, param):
    with pytest.raises(UnsupportedParameter, match="is not supported, found") as caught:
        completion(**fields)
    assert caught.value.param == param


LONG = "a" * (MAX_GRAMMAR_CHARS + 1)


@pytest.mark.parametrize("ask", [chat, completion, seed])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": LONG}, "guided_regex"),
        ({"guided_grammar": LONG}, "guided_grammar"),
        ({"guided_json": {"title": LONG}}, "guided_json"),
        ({"guided_json": json.dumps({"title": LONG})}, "guided_json"),
        ({"guided_choice": ["b", LONG]}, "guided_choice"),
        ({"structured_outputs": {"regex": LONG}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": LONG}}}},
            "response_format",
        ),
    ],
)
def test_longer_than_what_is_compiled_asks_no_replica(ask, fields, param):
    """With 5 MB of it no message would have got there, and the client have read of an internal error."""
    with pytest.raises(UnsupportedParameter) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert re.fullmatch(rf"{param} has 65\d\d\d characters; the limit is 65536", str(caught.value))


def test_as_long_as_what_is_compiled_is_passed_on():
    assert len(chat(guided_regex=LONG[:-1]).sampling.grammar.text) == MAX_GRAMMAR_CHARS
    spaced = json.dumps({"enum": list(range(5000))}, indent=16)
    assert len(spaced) > MAX_GRAMMAR_CHARS
    assert json.loads(chat(guided_json=spaced).sampling.grammar.text) == json.loads(spaced)


@pytest.mark.parametrize("as_text", [False, True])
def test_schema_of_more_values_than_characters_is_not_written(as_text, monkeypatch):
    schema = {"enum": [[]] * (MAX_GRAMMAR_CHARS + 1)}
    given = json.dumps(schema) if as_text else schema
    monkeypatch.setattr(
        "serve_app.openai.grammar.json.dumps", lambda *_, **__: pytest.fail("written")
    )
    with pytest.raises(InvalidRequest, match="guided_json must have at most 65536 values inside"):
        completion(guided_json=given)


def test_schema_in_a_text_is_counted_as_a_body_is():
    with pytest.raises(PayloadTooLarge, match="a JSON schema has 524289 brackets"):
        completion(guided_json="[" * (MAX_BRACKETS + 1))
