"""The fields of a request that prescribe the form of its answer -> `actors.protocol.Grammar`.

OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_...` fields that it had before.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind
from actors.text.validation import MAX_GRAMMAR_CHARS, check_grammar
from serve_app.openai.chat import Part
from serve_app.openai.fields import MAX_CHOICES, bounded_inside, parsed, shown, wrong

# Of `structured_outputs`: known, but they would change the answer in ways that we do not know.
_UNSUPPORTED = (
    "structural_tag",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)


class _Part(Part):
    model_config = ConfigDict(extra="allow")  # to be looked at


def _to_schema(value: object) -> str:
    """A JSON schema, as an object or as the text of one."""
    if isinstance(value, str):
        try:
            value = parsed(value.encode(), "a JSON schema")
        except ValueError as exc:
            raise wrong(f"must be a JSON schema: {exc}") from None
    if not isinstance(value, dict):
        raise wrong("must be a JSON schema, an object or its text")
    # Each value takes a character at least, and json keeps the interpreter's lock for as long as it writes.
    bounded_inside(value, MAX_GRAMMAR_CHARS)
    return json.dumps(value, ensure_ascii=False)


JsonSchema = Annotated[str, PlainValidator(_to_schema)]
_Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class _NamedSchema(_Part):
    schema_text: JsonSchema = Field(alias="schema")


class _ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None


class _StructuredOutputs(_Part):
    json_schema: JsonSchema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GrammarFields(Part):
    """To be mixed into a request body; at most one of them may ask for a form."""

    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None

    def grammar(self) -> Grammar | None:
        """The form that the answer must have; None for any.

        Raises:
            InvalidRequest: two fields ask for one, or a field for none where it must.
            UnsupportedParameter: a field asks for what this server does not have, or for a longer
                grammar than it compiles.
        """
        asked = [
            *self._of_response_format(),
            *self._of_structured_outputs(),
            *_given(
                "guided_",
                self.guided_json,
                self.guided_regex,
                self.guided_choice,
                self.guided_grammar,
            ),
        ]
        if len(asked) > 1:
            raise InvalidRequest(
                f"{asked[0].param} and {asked[1].param} exclude each other", asked[1].param
            )
        if not asked:
            return None
        # Here, too: a much longer one would not even get to a replica.
        check_grammar(asked[0])
        return asked[0]

    def _of_response_format(self) -> list[Grammar]:
        asked, param = self.response_format, "response_format"
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [any_object(param)]
        if asked.json_schema is None:
            raise InvalidRequest("response_format.json_schema is required", f"{param}.json_schema")
        return [Grammar(GrammarKind.JSON_SCHEMA, asked.json_schema.schema_text, param)]

    def _of_structured_outputs(self) -> list[Grammar]:
        asked, param = self.structured_outputs, "structured_outputs"
        if asked is None:
            return []
        extra: dict[str, Any] = asked.model_extra or {}
        for name in _UNSUPPORTED:
            if extra.get(name):
                raise UnsupportedParameter(
                    f"{param}.{name} is not supported, found {shown(extra[name])}",
                    f"{param}.{name}",
                )
        given = _given(f"{param}.", asked.json_schema, asked.regex, asked.choice, asked.grammar)
        if asked.json_object:
            given.append(any_object(f"{param}.json_object"))
        if not given:
            raise InvalidRequest(
                "structured_outputs must have one of json, regex, choice, grammar and json_object",
                param,
            )
        return given


def _given(
    prefix: str,
    schema: str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[Grammar]:
    asked = {
        ("json", GrammarKind.JSON_SCHEMA): schema,
        ("regex", GrammarKind.REGEX): regex,
        ("choice", GrammarKind.CHOICE): None if choice is None else json.dumps(choice),
        ("grammar", GrammarKind.CFG): grammar,
    }
    return [
        Grammar(kind, text, f"{prefix}{name}")
        for (name, kind), text in asked.items()
        if text is not None
    ]


def any_object(param: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', param)
