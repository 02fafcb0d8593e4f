"""JSON schemas as the compiler of grammars takes them."""

import json
from typing import Any

# What llguidance 1.x can hold a string to. JSON Schema has the others say what a string is for, and constrain nothing.
KNOWN_FORMATS = frozenset(
    [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    ]
)
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_NESTED = frozenset(
    [
        "allOf",
        "anyOf",
        "oneOf",
        "prefixItems",
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "not",
        "if",
        "then",
        "else",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)


def without_unknown_formats(text: str) -> str:
    """A schema without any `format` that its reader does not know and would refuse. What is no JSON stays as it is."""
    if '"format"' not in text:
        return text
    try:
        schema = json.loads(text)
        pending: list[Any] = [schema]
        while pending:
            each = pending.pop()
            if isinstance(each, dict):
                pending += _inside(each)
                if isinstance(name := each.get("format"), str) and name not in KNOWN_FORMATS:
                    del each["format"]
        return json.dumps(schema, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _inside(schema: dict[str, Any]) -> list[Any]:
    """The schemas that one consists of, and values that are none; not constants, and not names of properties."""
    found: list[Any] = []
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found += value.values()
        elif key in _NESTED:
            found += value if isinstance(value, list) else [value]
    return found
