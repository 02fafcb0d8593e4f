"""A checkpoint whose generation_config.json says how to sample, and requests that say it, or do not."""

import json
import shutil
from pathlib import Path

import pytest

from actors.errors import ContextLengthExceeded
from actors.image.image import WeightImage
from actors.protocol import FinishReason
from actors.text.sampling_defaults import ResolvedSampling, sampling_defaults
from tests.integration.runtime_harness import ENGINE, Harness, run

PROMPTS = [f"Prompt {i}: " + "over the lazy dog " * i for i in range(1, 5)]
# The seed makes sampled tokens the same each time. None is what a request does not name.
UNNAMED = {"temperature": None, "seed": 11, "max_tokens": 30, "ignore_eos": True}
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def defaults_of(checkpoint: Path, **found: object) -> ResolvedSampling:
    file = checkpoint / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | found))
    return sampling_defaults(checkpoint)


async def all_tokens(h: Harness, **sampling: object) -> list[list[int]]:
    return [await h.tokens(prompt, **{**UNNAMED, **sampling}) for prompt in PROMPTS]


@pytest.mark.parametrize("found", [{"top_k": 1}, {"temperature": 0}, {"temperature": 1e-6}])
def test_default_of_the_checkpoint_holds_where_a_request_names_nothing(
    checkpoint: Path, image: WeightImage, found: dict[str, object]
) -> None:
    async def scenario(h: Harness) -> None:
        greedy = await all_tokens(h, temperature=0.0)
        sampled = await all_tokens(h, **OPENAI)
        assert all(a != b for a, b in zip(greedy, sampled, strict=True))
        assert await all_tokens(h) == greedy
        named = {field: OPENAI[field] for field in found}
        assert await all_tokens(h, **named) == sampled

    run(checkpoint, image, scenario, defaults=defaults_of(checkpoint, **found))


def test_without_the_checkpoint_s_defaults_openai_s_hold(
    checkpoint: Path, image: WeightImage
) -> None:
    defaults_of(checkpoint, top_k=1)

    async def scenario(h: Harness) -> None:
        sampled = await all_tokens(h, **OPENAI)
        assert await all_tokens(h) == sampled
        assert sampled != await all_tokens(h, temperature=0.0)

    run(checkpoint, image, scenario)


def test_everything_behind_prepare_sees_resolved_values(
    checkpoint: Path, image: WeightImage
) -> None:
    defaults = defaults_of(checkpoint, temperature=0.6, top_p=0.95, repetition_penalty=1.1)

    async def scenario(h: Harness) -> None:
        prepared = h.prepare("hi", temperature=None, top_p=0.5, n=2)
        expected = ResolvedSampling(
            max_tokens=20, temperature=0.6, top_p=0.5, repetition_penalty=1.1
        )
        assert prepared.params == expected
        assert len(set(prepared.seeds)) == 2

    run(checkpoint, image, scenario, awake=False, defaults=defaults)


def test_max_new_tokens_ends_what_names_no_end(checkpoint: Path, image: WeightImage) -> None:
    defaults = defaults_of(checkpoint, max_new_tokens=6)

    async def scenario(h: Harness) -> None:
        endless = {"temperature": 0.0, "ignore_eos": True}
        events = await h.events(PROMPTS[0], max_tokens=None, **endless)
        assert sum(len(event.token_ids) for event in events) == 6
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert len(await h.tokens(PROMPTS[0], max_tokens=9, **endless)) == 9

    run(checkpoint, image, scenario, defaults=defaults)


def test_max_new_tokens_beyond_the_context_fails_no_request(
    checkpoint: Path, image: WeightImage
) -> None:
    defaults = defaults_of(checkpoint, max_new_tokens=10**6)

    async def scenario(h: Harness) -> None:
        prompt = tuple(range(10, 30))
        left = h.worker._engine.max_model_len - len(prompt)
        tokens = await h.tokens(prompt, temperature=0.0, max_tokens=None, ignore_eos=True)
        assert len(tokens) == left
        with pytest.raises(ContextLengthExceeded, match=str(h.worker._engine.max_model_len)):
            h.prepare(tuple([5] * 5000), max_tokens=None)

    few = ENGINE.model_copy(update={"num_blocks": 20})
    run(checkpoint, image, scenario, engine=few, defaults=defaults)
