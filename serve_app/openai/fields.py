"""The fields of a request body: JSON -> checked values, or an error that names field and finding.

`temperature must be a number, found "hot"`: nothing is converted silently, and no message is pydantic's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from actors.errors import InvalidRequest, PayloadTooLarge, UnsupportedParameter
from actors.garbage import without_collections
from actors.text.validation import MAX_LOGIT_BIAS
from serve_app.config.errors import did_you_mean

# What a list or an object of a body may have. Each element costs time and memory before anybody knows
# whether it is right, so lists that are too long are refused first, and then at the first element that is
# wrong (`fail_fast`): the errors of millions cost seconds and gigabytes.
MAX_STOPS = 32  # OpenAI allows 4, vLLM any number; each is searched for at every token
MAX_STOP_CHARS = 1024
MAX_ALL_STOP_CHARS = 8192  # of a request; what finds them takes 130 bytes a character
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 1024
MAX_TOOL_CALLS = 1024  # of one message
MAX_PROMPTS = 65_536  # http.max_continuations says how many are answered
MAX_PROMPT_TOKENS = 2**20  # the model's own limit is the engine's to check
MAX_CHOICES = 4096
MAX_OPTIONS = 128  # of the chat template
# At any depth of all tools, of all earlier calls, of the chat template's options: they are pickled, copied and
# written into the prompt, each time for a microsecond a value.
MAX_INSIDE = 2**16
MAX_TEXT_TOKENS = 2**19  # made text of in this process, in a tenth of a second
# About the values of a body, its lists and objects, and its keys, without parsing it: as many as these take 0.15 s, and
# 0.25 s in a process that has to get the memory first. Texts have such characters, too, but not in every sixth place
# of the longest prompt.
MAX_COMMAS = 2 * MAX_PROMPT_TOKENS
MAX_BRACKETS = 2**19
MAX_COLONS = 2**19
MAX_BRACKETS_AND_COLONS = 3 * 2**18
_COUNTED = (
    ((b",",), "commas", MAX_COMMAS),
    ((b"[", b"{"), "brackets", MAX_BRACKETS),
    ((b":",), "colons", MAX_COLONS),
    ((b"[", b"{", b":"), "brackets and colons", MAX_BRACKETS_AND_COLONS),
)
MAX_COUNT = 2**31 - 1  # of tokens; the model's own limit is the engine's to check

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        InvalidRequest: it is no JSON object. NaN and Infinity, invalid UTF-8, lone surrogates and
            nesting deeper than 200 are no JSON here either.
        PayloadTooLarge: it has more values than any request needs.
    """
    try:
        value = parsed(body, "the body")
    except ValueError as exc:
        raise InvalidRequest(f"the body must be valid JSON: {exc}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, found {shown(value)}")
    return value


def parsed(text: bytes, what: str) -> Any:
    """The value that a JSON text is of.

    Args:
        what: the text's name in messages.

    Raises:
        ValueError: as `parse_json` raises InvalidRequest.
        PayloadTooLarge: it has more values than any request needs.
    """
    for marks, names, limit in _COUNTED:
        if len(text) > limit and (found := sum(map(text.count, marks))) > limit:
            raise PayloadTooLarge(f"{what} has {found} {names}; the limit is {limit}")
    # pydantic keeps the interpreter's lock for all of it. Millions of small values take three times as
    # long if the collector looks at them again and again, or their keys are looked up in a cache.
    with without_collections():
        return from_json(text, allow_inf_nan=False, cache_strings="none")


def parse_form(form: type[Model], fields: Mapping[str, Any]) -> Model:
    """A model made of the fields that are not null.

    Raises:
        InvalidRequest: naming the first field that is wrong, and what was found.
        UnsupportedParameter: the value is right, but we cannot honour it.
    """
    refuse_unknown(form, fields)
    with faults(fields):
        return form.model_validate({k: v for k, v in fields.items() if v is not None})


def refuse_unknown(form: type[BaseModel], names: Iterable[str]) -> None:
    """Raises InvalidRequest, of the first name that `form` has not, if that forbids them."""
    known = form.model_fields
    if form.model_config.get("extra") != "forbid":
        return
    for name in names:  # the first one: pydantic would collect them all
        if name not in known:
            told = f"; known are {', '.join(known)}" if known else "; nothing is known"
            hint = did_you_mean(name[:80], known) or told
            raise InvalidRequest(f"{name[:80]} is unknown here{hint}", name[:80])


@contextmanager
def faults(body: Mapping[str, Any]) -> Iterator[None]:
    """Have the ValidationError of a body raised as `parse_form` does."""
    try:
        yield
    except ValidationError as exc:
        raise _fault(exc.errors(include_url=False)[0], body) from None


# --- values with a form of their own: validators for pydantic ---


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def unsupported(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})


def bounded(value: list[Any] | dict[Any, Any], most: int) -> None:
    """Raises PydanticCustomError if there are more elements than that."""
    if len(value) > most:
        raise wrong(f"must have at most {most} elements, found {len(value)}")


def bounded_inside(value: object, most: int) -> None:
    """Raises PydanticCustomError if there are more values in a value, at any depth, than that."""
    found, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            each = list(each.values())
        elif not isinstance(each, list):
            continue
        found += len(each)
        if found > most:  # before they are put on the list
            raise wrong(f"must have at most {most} values inside, found more")
        pending += each


def _is_token_ids(value: object, most: int = MAX_PROMPT_TOKENS) -> bool:
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return False
    bounded(value, most)
    return all(type(token) is int and 0 <= token <= MAX_COUNT for token in value)


def to_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return (tuple(value),)
        bounded(value, MAX_PROMPTS)
        if all(isinstance(prompt, str) for prompt in value):
            return tuple(value)
        if all(_is_token_ids(prompt) for prompt in value):
            return tuple(tuple(prompt) for prompt in value)
    raise wrong(
        "must be a string, an array of strings, an array of token ids, or an array of such arrays, "
        "none of them empty"
    )


def to_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("must be a string or an array of strings")
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise wrong(f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(bounded_stops(stops))


def bounded_stops(stops: list[str]) -> list[str]:
    """Raises PydanticCustomError if they are too long together."""
    if (chars := sum(map(len, stops))) > MAX_ALL_STOP_CHARS:
        raise wrong(
            f"must have at most {MAX_ALL_STOP_CHARS} characters in all strings, found {chars}"
        )
    return stops


def to_token_ids(value: object, *, most: int) -> tuple[int, ...]:
    if value == []:
        return ()
    if not isinstance(value, list) or not _is_token_ids(value, most):
        raise wrong("must be an array of token ids")
    return tuple(value)


def to_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and numbers")
    bounded(value, MAX_LOGIT_BIAS)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        # ASCII digits only: int() also takes "1_0", " 1" and other scripts' digits.
        if not (token.isascii() and token.isdigit() and len(token) < 11):
            raise wrong(f"must have token ids as keys, found {shown(token)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong(f"must have values from -100 to 100, found {shown(bias)} at {token}")
        biases[int(token)] = float(bias)
    return biases


_TEXT_OF = {"text": "text"}


def to_text(
    value: object, *, text_of: Mapping[str, str] = _TEXT_OF, kinds: str = "type text"
) -> object:
    """The text of a message's content. Parts are joined by newlines, as vLLM does.

    Args:
        text_of: by the type of a part, the field that has its text.
        kinds: these types in words.
    """
    if not isinstance(value, list):
        return value
    bounded(value, MAX_PARTS)
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise wrong("must be a string or an array of text parts")
        if kind not in text_of:
            raise unsupported(f"may only have parts of {kinds}, found {shown(kind)}")
        text = part.get(text_of[kind])
        if not isinstance(text, str):
            raise wrong('must have a string as "text" in every part')
        texts.append(text)
    return "\n".join(texts)


def to_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list):
        raise wrong("must be an array of tools")
    bounded(value, MAX_TOOLS)
    bounded_inside(value, MAX_INSIDE)
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            isinstance(tool, dict)
            and isinstance(kind := tool.get("type"), str)
            and kind != "function"
        ):
            raise unsupported(f"may only have tools of type function, found {shown(kind)}")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise wrong('must have {"type": "function", "function": {"name": ...}} as items')
        if not isinstance(function.get("parameters", {}), dict | None):
            raise wrong("must have objects as parameters of functions")
    return tuple(value)


def to_tool_calls(value: object) -> list[dict[str, Any]]:
    """Earlier calls of an assistant, their arguments parsed: so most chat templates want them."""
    if not isinstance(value, list):
        raise wrong("must be an array of tool calls")
    bounded(value, MAX_TOOL_CALLS)
    calls = [_to_tool_call(call) for call in value]
    bounded_inside(calls, MAX_INSIDE)
    return calls


def _to_tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not _is_name(function.get("name"))
    ):
        raise wrong('must have {"type": "function", "function": {"name", "arguments"}} as items')
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments.encode(), "what a function is called with")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise wrong("must have a JSON object, as text, as arguments of every function")
    return {**call, "function": {**function, "arguments": arguments}}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def small_inside(of: Callable[[Any], object] = lambda value: value) -> AfterValidator:
    """Refuses a value if there are more than `MAX_INSIDE` values in this of it, at any depth."""

    def check(value: T) -> T:
        bounded_inside(of(value), MAX_INSIDE)
        return value

    return AfterValidator(check)


def only(kind: str) -> BeforeValidator:
    """Refuses another text as one that cannot be honoured."""

    def check(value: object) -> object:
        if isinstance(value, str) and value != kind:
            raise unsupported(f'must be "{kind}", found {shown(value)}')
        return value

    return BeforeValidator(check)


_TOOL_CHOICES = (
    'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
)


def to_tool_choice(value: object) -> str | dict[str, Any]:
    if value in ("auto", "none", "required"):
        return str(value)
    if not isinstance(value, dict):
        raise wrong(_TOOL_CHOICES)
    if isinstance(kind := value.get("type"), str) and kind != "function":
        raise unsupported(f"{_TOOL_CHOICES}, found type {shown(kind)}")
    function = value.get("function")
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise wrong(_TOOL_CHOICES)
    return value


# pydantic's error type -> what the field must be; `{...}` is filled from the error's context.
_EXPECTED: Mapping[str, str] = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be an array",
    "tuple_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must not be empty",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} elements",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}


def _fault(error: ErrorDetails, body: Mapping[str, Any]) -> InvalidRequest:
    path = _path(error, body)
    param = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in path)[1:]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return InvalidRequest(f"{param} is required", param)
    if kind in ("wrong", "unsupported"):
        fault = UnsupportedParameter if kind == "unsupported" else InvalidRequest
        message = f"{param} {context['message']}"
        return fault(message if ", found" in message else f"{message}{_found(error)}", param)
    expected = _EXPECTED.get(kind)
    bounds = {k: f"{v:.8g}" if isinstance(v, float) else v for k, v in context.items()}
    phrase = expected.format(**bounds) if expected else f"is wrong: {error['msg']}"
    return InvalidRequest(f"{param} {phrase}{_found(error)}", param)


def _path(error: ErrorDetails, body: Mapping[str, Any]) -> list[int | str]:
    """Where it is in the body.

    Pydantic's own path also has which member of a union it tried. That is no key of the body, as the last name of
    the path need not be, if it is what is missing.
    """
    value: object = body
    path: list[int | str] = []
    last = len(error["loc"]) - 1
    for position, at in enumerate(error["loc"]):
        if isinstance(at, int):
            value = value[at] if isinstance(value, list | tuple) and at < len(value) else None
        elif isinstance(value, Mapping) and at in value:
            value = value[at]
        elif not (error["type"] == "missing" and position == last):
            continue
        path.append(at)
    return path


def _found(error: ErrorDetails) -> str:
    value = error["input"]
    return "" if isinstance(value, BaseModel) else f", found {shown(value)}"


def shown(value: object) -> str:
    """A value as JSON, if it is short; otherwise what it is."""
    if isinstance(value, dict | list | tuple):
        elements = value.values() if isinstance(value, dict) else value
        if len(value) > 4 or any(
            isinstance(each, dict | list | tuple) and each for each in elements
        ):
            return "an object" if isinstance(value, dict) else f"an array of {len(value)}"
    if isinstance(value, str):
        value = value[:81]
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
