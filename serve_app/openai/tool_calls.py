"""The tool calls in a model's answer, in text that arrives in pieces.

A call is told when it is complete, since only then it is known to be one; what only looks like a call
stays text.
"""

import json
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from serve_app.openai.held_text import HeldText
from serve_app.openai.open_call import (
    DEEPSEEK,
    PARAMETER,
    PARAMETER_END,
    QWEN,
    SEPARATOR,
    CallForm,
    OpenCall,
)

# Names of a tool and of its parameter -> the JSON types that its schema allows.
Types = Callable[[str, str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object


class MarkedCalls:
    """Calls between marks, text in front of them, between them and behind, of one message.

    White space and marks around calls go; what turns out to be none stays text as it was written. A call needs no
    closing mark in front of the next one's opening mark, nor at the end of the message. How the text is cut into
    pieces makes no difference.

    Args:
        form: of each call.
        around: marks around several calls.
        read: the call between its marks, or None.
    """

    def __init__(
        self, form: CallForm, around: Sequence[str], read: Callable[[str], ToolCall | None]
    ) -> None:
        self._form = form
        self._read = read
        self._text = HeldText((form.opening, *around))
        self._pieces: deque[str] = deque()  # that were not looked at, or have to be again
        self._position = 0  # of the first of them, in the message
        self._gap: list[str] = []  # white space and marks, which go if a call is behind them
        self._behind_call = False  # and no text between
        self._call: OpenCall | None = None
        self._failures = Counter[int]()  # how many that were no calls ended where

    def feed(self, text: str) -> list[str | ToolCall]:
        """Text and calls of the next piece, in their order."""
        self._pieces.append(text)
        return [*self._look()]

    def flush(self) -> list[str | ToolCall]:
        """What was held back, when nothing more will come."""
        parts: list[str | ToolCall] = []
        while (call := self._call) is not None:
            self._put_back(call.flush())
            parts += self._ended(call)
            parts += self._look()
        held = "".join((*self._gap, self._text.flush()))
        self._gap.clear()
        return [*parts, *self._told(held)]

    def _look(self) -> Iterator[str | ToolCall]:
        while self._pieces:
            text = self._pieces.popleft()
            self._position += len(text)
            if self._call is None:
                yield from self._look_for_mark(text)
                continue
            try:
                behind = self._call.feed(text)
            except ValueError:
                yield from self._no_call(self._call)
                continue
            if behind is not None:
                self._put_back(behind)
                yield from self._ended(self._call)

    def _look_for_mark(self, text: str) -> Iterator[str]:
        before, mark, rest = self._text.feed(text)
        yield from self._told(before)
        if mark is None:
            return
        self._put_back([rest])
        spaces = self._text.flush()
        opens = mark == self._form.opening
        if not self._behind_call:
            self._gap += [spaces] if opens else [spaces, mark]
        if opens:
            self._call = OpenCall(self._form)

    def _ended(self, call: OpenCall) -> Iterator[str | ToolCall]:
        """What it is, when it has ended."""
        if found := self._read(call.inside()):
            self._call, self._behind_call = None, True
            self._gap.clear()
            yield found
            return
        self._failures[self._position] += 1
        if self._failures[self._position] < _MOST_OPENINGS:
            yield from self._no_call(call)
        else:
            self._call = None
            yield from self._told("".join((self._form.opening, *call.pieces)))

    def _no_call(self, call: OpenCall) -> Iterator[str]:
        """Its opening mark was text. Behind that there may be the mark of a call."""
        self._call = None
        yield from self._told(self._form.opening)
        self._put_back(call.pieces)

    def _told(self, text: str) -> Iterator[str]:
        """Text with the gap in front of it."""
        text = text.lstrip() if self._behind_call else text
        if text:
            yield "".join((*self._gap, text))
            self._gap.clear()
            self._behind_call = False

    def _put_back(self, pieces: Sequence[str]) -> None:
        self._pieces.extendleft(reversed(pieces))
        self._position -= sum(map(len, pieces))


# That are tried with one end, since for each all in between is read again; one end may be near and the next one far.
# Objects of JSON need no limit: a mark in a string of one is outside of the strings of any other that began before,
# and shows that this is none. So two at most are read again behind any mark.
_MOST_OPENINGS = 8


class BareCalls:
    """A message that is nothing but calls, as Llama 3 writes: `{"name": ..., "parameters": {...}}`.

    Several are separated by semicolons or white space. Which JSON is a call and which an answer is
    only clear at the end, so a message that begins with `{` is held until then.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: list[str] | None = []
        self._begin: str | None = ""  # of the held text, but for white space; None: it may be calls

    def feed(self, text: str) -> list[str | ToolCall]:
        if self._held is None:
            return [text]
        self._held.append(text)
        if self._begin is None:
            return []
        # How much white space there is makes no difference, so only a little of it is looked at again.
        begin = self._begin + text
        behind = begin.removeprefix(_PYTHON_TAG).lstrip()
        if behind.startswith("{"):
            self._begin = None
        elif not behind:
            self._begin = begin[: len(_PYTHON_TAG) + 1]
        elif _PYTHON_TAG.startswith(begin):
            self._begin = begin
        else:
            return [self._told()]
        return []

    def flush(self) -> list[str | ToolCall]:
        held = self._told()
        calls = self._read(held.removeprefix(_PYTHON_TAG))
        return [*calls] if calls else [held] if held else []

    def _told(self) -> str:
        held, self._held = self._held or [], None
        return "".join(held)

    def _read(self, text: str) -> list[ToolCall]:
        """All calls, or none if there is anything else."""
        calls: list[ToolCall] = []
        at = 0
        while (at := _behind_separators(text, at)) < len(text):
            try:
                value, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = _call_of(value, "parameters", "arguments")
            if call is None or call.name not in self._names:
                return []
            calls.append(call)
        return calls


_PYTHON_TAG = "<|python_tag|>"  # a special token, so usually gone; not for every tokenizer
_SEPARATORS = re.compile(r"[; \t\r\n]*")


def _finite(text: str) -> float:
    """What a forced call has of a number is up to the model, and JSON has no infinity."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


_DECODER = json.JSONDecoder(parse_float=_finite)


def _behind_separators(text: str, at: int) -> int:
    found = _SEPARATORS.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


def tool_parser(
    name: str | None, tools: Sequence[Mapping[str, Any]]
) -> MarkedCalls | BareCalls | None:
    """A parser for one message; None: all of it is text.

    Args:
        name: `qwen`, `deepseek` or `llama`; None where the model has no form for calls.
        tools: those of the request, as OpenAI has them.
    """
    if name is None or not tools:
        return None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if name == "llama":
        return BareCalls(schemas)
    if name == "deepseek":
        around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        return MarkedCalls(DEEPSEEK, around, _read_deepseek)
    assert name == "qwen", name
    types = cache(lambda tool, key: _types(key, schemas.get(tool)))
    return MarkedCalls(QWEN, (), lambda text: _read_qwen(text, types))


def _read_deepseek(text: str) -> ToolCall | None:
    """DeepSeek-R1 and V3: `function<sep>NAME` and a JSON block; V3.1: `NAME<sep>JSON`."""
    head, separator, rest = text.partition(SEPARATOR)
    if not separator:
        return None
    if block := re.fullmatch(r"([^\n]*)\n```json\n(.*?)\n?```\s*", rest, re.DOTALL):
        return _call_of({"name": block[1].strip(), "arguments": _json(block[2])}, "arguments")
    return _call_of({"name": head.strip(), "arguments": _json(rest)}, "arguments")


def _read_qwen(text: str, types: Types) -> ToolCall | None:
    """Qwen2.5 and Qwen3: `{"name": ..., "arguments": {...}}`; Qwen3-Coder: tags."""
    if function := re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", text, re.DOTALL):
        name, inside = function[1].strip(), function[2]
        arguments = {key: _typed(value, types(name, key)) for key, value in _parameters_in(inside)}
        return _call_of({"name": name, "arguments": arguments}, "arguments")
    return _call_of(_json(text), "arguments")


def _parameters_in(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each `<parameter=NAME>VALUE</parameter>`, without a line break around the value.

    Looks at each character a few times at most, where a regular expression would read to the end for
    every tag that is never closed.
    """
    at = 0
    while (opening := text.find(PARAMETER, at)) >= 0:
        name_at = opening + len(PARAMETER)
        name_end = text.find(">", name_at)
        if name_end < 0:
            return
        line_break = text.rfind("\n", name_at, name_end)
        if line_break >= 0 or name_end == name_at:  # no name
            at = max(line_break + 1, name_at)
            continue
        end = text.find(PARAMETER_END, name_end)
        if end < 0:
            return
        value = text[name_end + 1 : end].removeprefix("\n").removesuffix("\n")
        yield text[name_at:name_end], value
        at = end + len(PARAMETER_END)


# Of each parameter; a token of an answer must not cost more than this, on the event loop.
_MOST_SCHEMAS, _MOST_VALUES, _MOST_REFERENCE = 64, 1000, 1000


def _types(parameter: str, schema: object) -> frozenset[str]:
    """The JSON types that a tool's schema allows for a parameter, as far as it tells within `_MOST_SCHEMAS`."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found: set[str] = set()
    pending = [properties.get(parameter) if isinstance(properties, dict) else None]
    seen = set[int]()  # a schema may refer to itself
    looked_at = 0
    while pending:
        each, looked_at = pending.pop(), looked_at + 1
        if looked_at > _MOST_SCHEMAS:  # a call may name any number of parameters
            return frozenset()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        if values := _listed(each.get("enum")) or ([each["const"]] if "const" in each else []):
            types = {_TYPE_NAMES.get(type(value), "other") for value in values[:_MOST_VALUES]}
            # 1 of ["auto", 1] is the number.
            found |= types if types <= {"string", "null"} else types - {"string"}
        else:
            named = each.get("type")
            names = (named, *_listed(named)[:_MOST_SCHEMAS])
            found |= {name for name in names if isinstance(name, str)}
            for several in ("anyOf", "oneOf", "allOf"):
                pending += _listed(each.get(several))[: _MOST_SCHEMAS + 1]
            pending.append(_referred(each.get("$ref"), schema))
    return frozenset(found)


def _referred(reference: object, whole: object) -> object:
    """What a pointer such as `#/$defs/Color` names; None if it names nothing here."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    if len(reference) > _MOST_REFERENCE:
        return None
    found, names = whole, reference.split("/")[1:]
    for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


_TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null"}


def _typed(value: str, types: Collection[str]) -> object:
    """A value as one of these types; text is what may be text, and what JSON can make nothing of."""
    word = value.strip()
    if "string" in types:
        return None if word == "null" and "null" in types else value
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    parsed = _json(value)
    return value if parsed is None and word != "null" else parsed


def _json(text: str) -> object:
    """The value, or None if it is no JSON. A number beyond all doubles is the last of them."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: object, *keys: str) -> ToolCall | None:
    """A call from `{"name": ..., key: {...}}`, or None if it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = next((value[key] for key in keys if key in value), None)
    if not isinstance(arguments, dict):
        return None
    try:
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        name.encode()
    except (ValueError, RecursionError):
        return None  # json reads NaN, and names of half a surrogate pair, which no answer can hold
    return ToolCall(name, told.encode(errors="replace").decode())  # half a pair becomes a "?"
