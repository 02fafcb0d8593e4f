"""Schemas on their way to the compiler of grammars."""

import json
from typing import Any

import pytest

from actors.text.json_schemas import KNOWN_FORMATS, without_unknown_formats

# JSON Schema's own, OpenAPI's, and what pydantic writes.
FORMATS = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uuid",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
    "int32",
    "int64",
    "float",
    "double",
    "byte",
    "binary",
    "password",
    "path",
    "file-path",
    "directory-path",
    "json-string",
    "base64url",
    "multi-host-uri",
    "unknown",
]


def test_formats_are_those_that_the_compiler_knows() -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    known = set()
    for name in FORMATS:
        schema = json.dumps({"type": "string", "format": name})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
        if not llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
            known.add(name)
    assert known == KNOWN_FORMATS


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        (
            {"anyOf": [{"format": "path"}, {"items": [{"format": "x"}], "not": {"format": "y"}}]},
            {"anyOf": [{}, {"items": [{}], "not": {}}]},
        ),
        (
            {"properties": {"format": {"format": "binary"}}, "$defs": {"a": {"format": "b"}}},
            {"properties": {"format": {}}, "$defs": {"a": {}}},
        ),
        ({"const": {"format": "x"}}, {"const": {"format": "x"}}),
        ({"enum": [{"format": "x"}], "format": 5}, {"enum": [{"format": "x"}], "format": 5}),
    ],
)
def test_only_formats_that_nobody_knows_go(schema: Any, expected: Any) -> None:
    assert json.loads(without_unknown_formats(json.dumps(schema))) == expected


@pytest.mark.parametrize("text", ['{"format"', '"format"', "5", '{"items":' * 100_000 + '"format"'])
def test_what_is_no_schema_stays_as_it_is(text: str) -> None:
    assert without_unknown_formats(text) == text
