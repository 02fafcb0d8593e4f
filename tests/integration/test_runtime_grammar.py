"""Outputs of a prescribed form from a model of random weights, which wants to write anything else."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.image.image import WeightImage
from actors.protocol import (
    ChatPrompt,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    MessageForm,
    SamplingParams,
    TokenEvent,
)
from serve_app.openai.message import MessageParser
from serve_app.openai.tool_calls import ToolCall
from tests.integration.runtime_harness import ENGINE, PROMPTS, Harness, run

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["one", "two", None]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 10, "maximum": 99999},
            "maxItems": 2,
        },
        "inner": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["title", "kind", "sizes"],
    "additionalProperties": False,
    # Random weights fill pages with it.
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}


def schema(value: object = SCHEMA) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), "response_format")


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "guided_regex")


FORM = {"grammar": schema(), "max_tokens": 150}
TOO_MUCH = Grammar(GrammarKind.CFG, "start: " + " ".join(['"a"?'] * 3000), "guided_grammar")


def text_of(events: list[TokenEvent], index: int = 0) -> str:
    return "".join(e.text for e in events if e.index == index)


def check(events: list[TokenEvent]) -> bool:
    """Whether the answer came to its end; if so, it must follow the schema."""
    if events[-1].finish_reason is FinishReason.LENGTH:
        return False
    assert events[-1].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(events)), SCHEMA)
    return True


def test_every_answer_follows_its_schema(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        wishes: list[dict[str, Any]] = [
            {},
            {"temperature": 1.0, "seed": 1},
            {"temperature": 2.0, "seed": 2, "top_p": 0.8, "top_k": 50},
            {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
            {"temperature": 1.0, "seed": 4, "ignore_eos": True},
            {"temperature": 1.0, "seed": 5, "min_tokens": 30},
            {"temperature": 1.0, "seed": 6, "logprobs": 5},
            {"temperature": 1.0, "seed": 7, "stream": False},
        ]
        asked = list(zip(PROMPTS, wishes, strict=True))
        together = await asyncio.gather(*(h.events(p, **FORM, **wish) for p, wish in asked))
        assert sum(map(check, together)) > 5
        alone = [await h.events(p, **FORM, **wish) for p, wish in asked[:4]]
        assert list(map(text_of, together[:4])) == list(map(text_of, alone))
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_neighbours_of_a_grammar_get_the_tokens_that_they_get_alone(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        free = {"max_tokens": 40, "ignore_eos": True}
        alone = [await h.tokens(p, **free) for p in PROMPTS[:5]]
        with_grammars = [h.events(p, **FORM, temperature=1.0, seed=1) for p in PROMPTS[5:]]
        found = await asyncio.gather(*(h.tokens(p, **free) for p in PROMPTS[:5]), *with_grammars)
        assert found[:5] == alone
        assert all(map(check, found[5:]))

    run(tiny_checkpoint, image, scenario)


def test_each_continuation_goes_its_own_way(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {**FORM, "temperature": 1.0}
        events = await h.events(PROMPTS[0], **sampled, seed=7, n=3)
        texts = [text_of(events, index) for index in range(3)]
        assert texts == [
            text_of(await h.events(PROMPTS[0], **sampled, seed=7 + k)) for k in range(3)
        ]
        assert len(set(texts)) == 3

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("num_blocks", [128, 16], ids=["roomy", "evicting"])
def test_sleep_and_eviction_in_the_middle_change_nothing(
    tiny_checkpoint: Path, image: WeightImage, num_blocks: int
) -> None:
    async def scenario(h: Harness) -> None:
        async def answers() -> list[list[TokenEvent]]:
            sampled = {**FORM, "max_tokens": 150, "temperature": 1.0}
            return await asyncio.gather(
                *(h.events(PROMPTS[i], **sampled, seed=i) for i in range(4))
            )

        expected = await answers()
        task = asyncio.create_task(answers())
        for _ in range(3):
            while not h.worker.engine_stats().running and not task.done():
                await asyncio.sleep(0)
            await h.runtime.sleep(1)
            await h.runtime.wake()
        found = await task
        assert list(map(text_of, found)) == list(map(text_of, expected))
        assert sum(map(check, found)) > 2
        await h.until_free()

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": num_blocks}))


def test_output_may_be_cut_and_may_be_stopped(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        pattern = "(ab){6}c"
        events = await h.events(PROMPTS[0], grammar=regex(pattern))
        assert text_of(events) == "abababababab" + "c"
        assert events[-1].finish_reason is FinishReason.STOP
        assert events[-1].stop_reason is None
        events = await h.events(PROMPTS[0], grammar=regex(pattern), max_tokens=2)
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert re.fullmatch("[ab]{2,4}", text_of(events))
        events = await h.events(PROMPTS[0], grammar=regex(pattern), stop=("bc", "x"))
        assert text_of(events) == "ababababababc"[:-2]
        assert events[-1].stop_reason == "bc"
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_logprobs_are_of_the_tokens_that_the_grammar_left(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        for events in (
            await h.events(PROMPTS[0], grammar=regex("[xy]z"), logprobs=5),
            await h.events(PROMPTS[0], grammar=regex("[xy]z"), logprobs=5, temperature=1.0),
        ):
            entries = [entry for e in events for entry in e.logprobs or ()]
            assert [e.token for e in entries[:2]] == list(text_of(events))
            assert {top.token for top in entries[0].top} == {"x", "y"}
            assert [top.token for top in entries[1].top] == ["z"]
            assert entries[1].logprob == pytest.approx(0.0)
            assert len(entries) == 3  # and the end, which is all that is left

    run(tiny_checkpoint, image, scenario)


def test_bad_grammar_wakes_nobody(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        for grammar, error, message in (
            (schema({"type": "strin"}), InvalidRequest, "response_format is no valid JSON schema"),
            (regex("["), InvalidRequest, "guided_regex is no valid regular expression"),
            (regex("a" * 70_000), UnsupportedParameter, "guided_regex has 70000 characters"),
        ):
            with pytest.raises(error, match=message) as caught:
                await h.runtime.check_grammar(h.prepare("hi", grammar=grammar))
            assert caught.value.param == grammar.param
        await h.runtime.check_grammar(h.prepare("hi", grammar=schema()))
        assert h.worker.memory.mapped_bytes == 0

    run(tiny_checkpoint, image, scenario, awake=False)


def test_answer_to_a_prompt_that_ends_in_reasoning_is_content(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_reasoning = MessageForm(reasoning="think", in_reasoning=True)

    async def scenario(h: Harness) -> None:
        monkeypatch.setattr(h.runtime.codec, "message_form", lambda *_: in_reasoning)
        chat = ChatPrompt(({"role": "user", "content": "hi"},))
        free = GenerateRequest("r", chat)
        assert h.runtime.prepare(free).form == in_reasoning
        followed = replace(free, sampling=SamplingParams(grammar=regex("a")))
        assert h.runtime.prepare(followed).form == MessageForm(reasoning="think")

    run(tiny_checkpoint, image, scenario, awake=False)


@pytest.mark.parametrize("tools", ["qwen", "deepseek", "llama"])
def test_forced_call_comes_out_of_random_weights(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch, tools: str
) -> None:
    form = MessageForm(tools=tools)
    function = {"name": "sort", "parameters": {"properties": {"kind": {"enum": ["a", "bc"]}}}}
    function["parameters"] |= {"required": ["kind"], "additionalProperties": False}  # type: ignore[operator]
    chat = ChatPrompt(
        ({"role": "user", "content": "hi"},),
        tools=({"type": "function", "function": function},),
        must_call=("sort",),
    )
    request = GenerateRequest("r", chat, SamplingParams(max_tokens=150, temperature=1.0, seed=1))

    async def scenario(h: Harness) -> None:
        with pytest.raises(UnsupportedParameter, match="cannot force a call"):
            h.runtime.prepare(request)
        monkeypatch.setattr(h.runtime.codec, "message_form", lambda *_: form)
        prepared = h.runtime.prepare(request)
        await h.runtime.check_grammar(prepared)
        events = [event async for event in h.runtime.generate(prepared)]
        assert events[-1].finish_reason is FinishReason.STOP
        _, pieces = MessageParser(form, chat.tools or ()).feed(text_of(events), last=True)
        (call,) = [piece for piece in pieces if piece]
        assert isinstance(call, ToolCall)
        assert call.name == "sort"
        assert json.loads(call.arguments)["kind"] in ("a", "bc")
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_grammar_that_turns_out_too_much_work_fails_its_request_only(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPTS[1], ignore_eos=True)
        beside = asyncio.create_task(h.tokens(PROMPTS[1], ignore_eos=True))
        wishes = {"n": 2, "min_tokens": 5}
        with pytest.raises(InvalidRequest, match="guided_grammar cannot be followed") as caught:
            await h.events(PROMPTS[0], grammar=TOO_MUCH, **wishes)
        assert caught.value.param == "guided_grammar"
        assert await beside == expected
        h.runtime.check_health()
        assert check(await h.events(PROMPTS[0], **FORM, temperature=1.0, seed=1))
        await h.until_free()

    run(tiny_checkpoint, image, scenario)
