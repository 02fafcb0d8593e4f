"""Which value holds for a request: its own, that of generation_config.json, or OpenAI's."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from actors.errors import InvalidRequest
from actors.protocol import Grammar, GrammarKind, SamplingParams
from actors.text.generation_config import read_generation_config
from actors.text.sampling_defaults import ResolvedSampling, resolve, sampling_defaults
from actors.text.validation import validate

ROOM = 1000
OPENAI: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
FILE: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def write(folder: Path, found: object) -> Path:
    text = found if isinstance(found, str) else json.dumps(found)
    (folder / "generation_config.json").write_text(text)
    return folder


def resolved(
    folder: Path, found: object, params: SamplingParams | None = None, room: int = ROOM
) -> ResolvedSampling:
    return resolve(params or SamplingParams(), sampling_defaults(write(folder, found)), room)


@pytest.mark.parametrize("field", FILE)
def test_each_field_counts_alone(tmp_path: Path, field: str) -> None:
    expected = ResolvedSampling(**OPENAI | {field: FILE[field]})
    assert resolved(tmp_path, {field: FILE[field]}) == expected


@pytest.mark.parametrize("field", FILE)
def test_what_a_request_names_goes_before_the_file(tmp_path: Path, field: str) -> None:
    """Also where it names what would be OpenAI's default, or 0."""
    named = SamplingParams(**{field: OPENAI[field]})
    expected = ResolvedSampling(**FILE | {field: OPENAI[field]})
    assert resolved(tmp_path, FILE, named) == expected


def test_temperature_0_stays_greedy(tmp_path: Path) -> None:
    assert resolved(tmp_path, FILE, SamplingParams(temperature=0.0)).temperature == 0


@pytest.mark.parametrize("found", [{}, dict.fromkeys(FILE), {"eos_token_id": 5, "num_beams": 4}])
def test_file_that_names_nothing_leaves_openai_s(tmp_path: Path, found: object) -> None:
    assert resolved(tmp_path, found) == ResolvedSampling(**OPENAI)


def test_no_file_leaves_openai_s(tmp_path: Path) -> None:
    defaults = sampling_defaults(tmp_path)
    assert resolve(SamplingParams(), defaults, ROOM) == ResolvedSampling(**OPENAI)


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_do_sample_does_not_count(tmp_path: Path, do_sample: bool | None) -> None:
    expected = ResolvedSampling(temperature=0.6, top_p=0.95)
    found = {"temperature": 0.6, "top_p": 0.95, "do_sample": do_sample}
    assert resolved(tmp_path, found) == expected


def test_everything_else_arrives_as_it_was(tmp_path: Path) -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        ignore_eos=True,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={17: -100.0},
        seed=5,
        stop=("a",),
        stop_token_ids=(1, 2),
        logprobs=3,
        grammar=Grammar(GrammarKind.REGEX, "a*", "guided_regex"),
    )
    found = resolved(tmp_path, FILE, params)
    for field in fields(SamplingParams):
        value = FILE.get(field.name, getattr(params, field.name))
        assert getattr(found, field.name) == value


# --- max_new_tokens ---


@pytest.mark.parametrize(
    ("named", "room", "expected"),
    [
        ({}, ROOM, 50),  # the default
        ({"max_tokens": 7}, ROOM, 7),
        ({"max_tokens": 500}, ROOM, 500),  # but no limit
        ({"max_tokens": 2000}, ROOM, 2000),  # of which the engine will tell that it does not fit
        ({}, 51, 50),
        ({}, 50, None),  # the context ends first, at the same token
        ({}, 10, None),
        ({}, 0, None),
        ({}, -5, None),  # a prompt that is too long; the engine says so
        ({"min_tokens": 80}, ROOM, 80),
        ({"min_tokens": 80}, 60, None),
    ],
)
def test_max_new_tokens_is_the_default_of_max_tokens(
    tmp_path: Path, named: dict[str, Any], room: int, expected: int | None
) -> None:
    found = resolved(tmp_path, {"max_new_tokens": 50}, SamplingParams(**named), room)
    assert found.max_tokens == expected
    validate(found, 100)


# --- what the replica refuses when it starts ---


@pytest.mark.parametrize(
    ("field", "value", "finding"),
    [
        ("temperature", -0.1, "temperature is -0.1; it must be 0 or more"),
        ("temperature", 10**400, "it must be 0 or more"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", float("inf"), "temperature is inf"),
        ("temperature", "hot", 'it must be a number, found "hot"'),
        ("temperature", True, "it must be a number, found true"),
        ("top_p", 0, "top_p is 0; it must be above 0 and at most 1"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_k", -2, "top_k is -2"),
        ("top_k", 20.5, "it must be an integer, found 20.5"),
        ("top_k", [20], "it must be an integer, found [20]"),
        ("min_p", 1.1, "min_p is 1.1"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be above 0"),
        ("max_new_tokens", 0, "max_tokens is 0; it must be 1 or more"),
        ("max_new_tokens", 1.5, "it must be an integer, found 1.5"),
        ("max_new_tokens", False, "it must be an integer, found false"),
    ],
)
def test_value_that_cannot_be_used_is_refused_by_file_and_field(
    tmp_path: Path, field: str, value: object, finding: str
) -> None:
    write(tmp_path, {**FILE, field: value})
    with pytest.raises(ValueError, match="cannot be used") as caught:
        sampling_defaults(tmp_path)
    message = str(caught.value)
    assert not isinstance(caught.value, InvalidRequest)  # it is nobody's request
    assert message.startswith(f"{field} in {tmp_path / 'generation_config.json'} ")
    assert finding in message
    assert message.endswith("correct it, or set generation_config: none")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),  # greedy unless a request says otherwise
        ("temperature", 3),  # more than a request may name, but nothing that fails
        ("top_p", 1),
        ("top_k", -1),
        ("top_k", 10**12),
        ("min_p", 1),
        ("repetition_penalty", 2),
        ("max_new_tokens", 10**12),
    ],
)
def test_value_at_its_bound_is_taken(tmp_path: Path, field: str, value: object) -> None:
    found = resolved(tmp_path, {field: value})
    validate(found, 100)
    if field != "max_new_tokens":  # which does not fit
        assert getattr(found, field) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no valid JSON"),
        ('{"top_k": 1' + "0" * 5000 + "}", "is no valid JSON"),
        pytest.param("[" * 100_000, "is no valid JSON", id="deep"),
        ("[1, 2]", "must hold a JSON object, found [1, 2]"),
        ("null", "must hold a JSON object, found null"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # what it says is looked at below
        read_generation_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'} {message}")


def test_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"generation_config\.json is no UTF-8 text"):
        read_generation_config(tmp_path)


# --- the log ---


def test_log_tells_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "actors.text.sampling_defaults")
    sampling_defaults(write(tmp_path, {"eos_token_id": 3, "temperature": 0.6, "top_p": 0.95}))
    (told,) = caplog.messages
    assert told.startswith("sampling defaults, ")
    assert told.endswith(f"{tmp_path / 'generation_config.json'}: temperature 0.6, top_p 0.95")
    caplog.clear()
    sampling_defaults(write(tmp_path, {"eos_token_id": 3}))
    assert not caplog.messages
