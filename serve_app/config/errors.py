"""What is wrong with a configuration, in one line per mistake: file, key, what was found, remedy."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Key = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_SHOWN_CHARS = 80  # of what was found
_UNITS = {"_s": " of seconds", "_ms": " of milliseconds", "_bytes": " of bytes"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake."""

    text: str
    key: Key = ()
    file: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, ".".join(map(str, self.key)), self.text)))

    def inside(self, key: Key = (), file: str = "") -> "Problem":
        """The same problem seen from outside; one that names its file already is left as it is."""
        return self if self.file else replace(self, key=key + self.key, file=file)


class ConfigError(ValueError):
    """Configuration that cannot be used. `str()` has one line per problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))

    def inside(self, key: Key = (), file: str = "") -> "ConfigError":
        return ConfigError(problem.inside(key, file) for problem in self.problems)


def validate(model: type[Model], data: object) -> Model:
    """`model.model_validate`, its ValidationError turned into a ConfigError."""
    refuse_switches_for_numbers(data, model)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, model)) from error


def refuse_switches_for_numbers(data: object, model: type[BaseModel]) -> None:
    """Pydantic takes true for 1, and YAML 1.1, which is Ray's, `on` for true: for nobody's seconds.

    Raises:
        ConfigError: such a value is there.
    """
    if problems := tuple(_switches_for_numbers(data, model)):
        raise ConfigError(problems)


def _switches_for_numbers(data: object, model: type[BaseModel]) -> Iterator[Problem]:
    if not isinstance(data, Mapping):
        return
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            continue
        kinds = set(_kinds(field.annotation))
        if isinstance(value, bool) and not kinds.isdisjoint((int, float)) and bool not in kinds:
            unit = _unit("float", (key,))
            yield Problem(f"expected a number{unit}, found {value}", (key,))
        nested = _nested_model(field.annotation)
        if nested is None:
            continue
        for problem in _switches_for_numbers(value, nested):
            yield problem.inside((key,))
        for index, each in enumerate(value if isinstance(value, list | tuple) else ()):
            for problem in _switches_for_numbers(each, nested):
                yield problem.inside((key, index))


def _kinds(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def unknown_keys(data: Mapping[Any, object], model: type[BaseModel]) -> Iterator[Problem]:
    """Keys of `data` that are no fields of `model`, for models that ignore such keys."""
    for key in data:
        if key not in model.model_fields:
            yield Problem(_unknown(str(key), model), (str(key),))


def short(value: object) -> str:
    """As Python writes it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    close = difflib.get_close_matches(word, known, n=3)
    # Letters that changed places are the likelier mistake: "modle" is "model", though "mode" is as near.
    swapped = [each for each in close if sorted(each) == sorted(word)]
    return f"; did you mean {(swapped or close)[0]}?" if close else ""


def problems_of(error: ValidationError, model: type[BaseModel]) -> Iterator[Problem]:
    """What pydantic found wrong, in our words."""
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            yield from cause.inside(details["loc"]).problems
        else:
            yield Problem(_explain(details, model), details["loc"])


def _explain(details: ErrorDetails, model: type[BaseModel]) -> str:
    kind, key, found = details["type"], details["loc"], details["input"]
    if kind == "missing":
        return "required, but missing"
    if kind == "extra_forbidden":
        return _unknown(str(key[-1]), _model_at(model, key[:-1]))
    if kind in ("enum", "literal_error"):
        return f"expected {details['ctx']['expected']}, found {short(found)}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}{_unit(kind, key)}, found {short(found)}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should", "should")
    message = " ".join(message.split())  # Ray's span lines
    return message if kind == "value_error" else f"{message}, found {short(found)}"


def _unit(kind: str, key: Key) -> str:
    if not kind.startswith(("float", "int")):
        return ""
    return next((unit for end, unit in _UNITS.items() if str(key[-1]).endswith(end)), "")


def _unknown(key: str, model: type[BaseModel] | None) -> str:
    known = sorted(model.model_fields) if model else []
    hint = did_you_mean(key, known) or (f"; known here: {', '.join(known)}" if known else "")
    return f"unknown key{hint}"


def _model_at(model: type[BaseModel], key: Key) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, str) and found is not None:
            field = found.model_fields.get(part)
            found = _nested_model(field.annotation) if field else None
    return found


def _nested_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_nested_model, get_args(annotation))), None)
