"""What of `LLM` can be had without a model."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import serve_app
from actors.checkpoints import download
from actors.checkpoints.download import CheckpointMissing
from actors.checkpoints.source import ModelSource
from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import FinishReason, GrammarKind, TokenEvent, TokenLogprob
from serve_app import LLM, SamplingParams
from serve_app.config.errors import ConfigError
from serve_app.llm import Logprob, _completion


def test_package_alone_imports_nothing(project: Path) -> None:
    code = "import sys, serve_app; print([n for n in ('pydantic', 'ray') if n in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_package_has_what_it_names_and_nothing_else() -> None:
    assert all(hasattr(serve_app, name) for name in serve_app.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        serve_app.LMM  # noqa: B018


def test_names_are_those_of_vllm() -> None:
    params = SamplingParams(
        n=2,
        temperature=1,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=7,
        stop=("END",),
        stop_token_ids=[5],
        ignore_eos=True,
        max_tokens=3,
        min_tokens=1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: 1.5},
        logprobs=4,
        structured_outputs={"choice": ["yes", "no"]},
    )
    engines = params.params(max_tokens=params.max_tokens, logprobs=params.logprobs)
    assert params.n == 2
    assert (engines.temperature, engines.top_k, engines.logprobs) == (1.0, 0, 4)
    assert (engines.stop, engines.stop_token_ids) == (("END",), (5,))
    assert engines.logit_bias == {5: 1.5}
    assert engines.grammar is not None
    assert engines.grammar.kind is GrammarKind.CHOICE


def test_what_is_not_named_is_the_model_s_default_and_16_tokens_at_most() -> None:
    params = SamplingParams(stop=None, temperature=None)
    assert (params.temperature, params.stop, params.max_tokens) == (None, (), 16)
    assert SamplingParams(max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, found -1"),
        ({"temperature": "hot"}, 'temperature must be a number, found "hot"'),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, found 1.5"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens must be at most max_tokens"),
        ({"stop": 5}, "stop must be a string or an array of strings"),
        ({"logit_bias": {5: "much"}}, "logit_bias must have values from -100 to 100"),
        ({"logit_bias": 5}, "logit_bias must be an object"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
        ({"temprature": 1}, "temprature is unknown here"),
        ({"structured_outputs": {}}, "structured_outputs must have one of"),
    ],
)
def test_bad_parameter_is_refused_when_it_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(UnsupportedParameter):
        SamplingParams(structured_outputs={"regex": "a", "whitespace_pattern": "b"})


def test_wrong_settings_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_block"):
        LLM(tmp_path, engine={"num_block": 5})
    with pytest.raises(ConfigError, match="dtype"):
        LLM(tmp_path, dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not a model id: give OWNER/NAME of letters"):
        LLM("~nobody-here/x")
    with pytest.raises(CheckpointMissing, match=r"config\.json"):
        LLM(tmp_path)


@pytest.mark.parametrize("prompts", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_bytes_are_no_prompt(prompts: Any) -> None:
    asked = LLM.__new__(LLM)
    with pytest.raises(InvalidRequest, match="prompt"):
        asked.generate(prompts)


def test_model_of_a_hub_is_looked_for_where_downloads_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEPSERVE_HOME", str(tmp_path))
    asked: list[ModelSource] = []

    def ensure(source: ModelSource) -> Path:
        asked.append(source)
        raise CheckpointMissing("nothing is downloaded here")

    monkeypatch.setattr(download, "ensure_checkpoint", ensure)
    with pytest.raises(CheckpointMissing):
        LLM("owner/name")
    assert [source.models_dir for source in asked] == [str(tmp_path / "models")]


def test_events_become_one_output() -> None:
    likely = TokenLogprob(5, "a", b"a", -0.5)
    chosen = TokenLogprob(6, "b", b"b", -2.0, (likely,))
    events = [
        TokenEvent(0, "", (), 3),
        TokenEvent(0, "b", (6,), 3, logprobs=(chosen,)),
        TokenEvent(0, "a", (5,), 3, FinishReason.STOP, "END", (TokenLogprob(5, "a", b"a", -0.5, (likely,)),)),
    ]  # fmt: skip
    output = _completion(1, events)
    assert (output.index, output.text, output.token_ids) == (1, "ba", [6, 5])
    assert (output.finish_reason, output.stop_reason) == ("stop", "END")
    assert output.logprobs == [
        {6: Logprob(-2.0, None, "b"), 5: Logprob(-0.5, 1, "a")},
        {5: Logprob(-0.5, 1, "a")},
    ]
    assert output.cumulative_logprob == -2.5
    assert _completion(0, [TokenEvent(0, "x", (1,), 3)]).logprobs is None
