"""One model in one process, without Ray: generate, sleep, wake, and everything that may go wrong."""

import asyncio
import ctypes
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors import cleared
from actors.engine.engine import EngineOutput, TransformersEngine
from actors.errors import (
    ContextLengthExceeded,
    DeviceMemoryError,
    DeviceMemoryShort,
    EngineDied,
    InvalidRequest,
    LayoutMismatch,
    ReplicaFailed,
    Unavailable,
    WeightsCorrupted,
)
from actors.lifecycle import SleepConfig
from actors.lull import Lull
from actors.memory.cpu import CpuDriver, CpuLink
from actors.protocol import ChatPrompt, FinishReason, MessageForm, TokenEvent
from actors.weights.checkpoint import write_checkpoint
from actors.weights.image import WeightImage
from tests.integration.runtime_harness import ENGINE, Harness, load, run

PROMPTS = [f"Prompt {i}: " + "the quick brown fox " * i for i in range(1, 9)]


@pytest.fixture(scope="module")
def image(tiny_checkpoint: Path) -> WeightImage:
    return load(tiny_checkpoint)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Callable[[tuple[int, ...], int], list[int]]:
    """Greedy tokens by `model.generate`, refusing prompts whose answer hangs on a rounding error."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()

    def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack([step[0].topk(2).values for step in out.logits])
        assert float((top[:, 0] - top[:, 1]).min()) > 1e-3, "choose another prompt"
        return out.sequences[0, len(prompt) :].tolist()

    return greedy


def test_greedy_equals_generate_alone_and_together(
    tiny_checkpoint: Path, image: WeightImage, reference: Callable[..., list[int]]
) -> None:
    async def scenario(h: Harness) -> None:
        expected = [reference(h.runtime.codec.encode_prompt(p), 20) for p in PROMPTS]
        assert [await h.tokens(p) for p in PROMPTS] == expected
        assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_and_addresses_survive_sleep(
    tiny_checkpoint: Path, image: WeightImage, level: int
) -> None:
    async def scenario(h: Harness) -> None:
        before = [await h.tokens(p) for p in PROMPTS]
        for _ in range(3):
            slept = await h.runtime.sleep(level)
            assert slept.mapped_after_bytes == h.runtime.mapped_bytes == 0
            assert slept.mapped_before_bytes >= h.runtime.weights_bytes + h.runtime.kv_bytes
            woke = await h.runtime.wake()
            assert woke.copied_bytes == h.runtime.weights_bytes
            assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == before
        assert h.asked == ["release", "reload"] * (3 if level == 2 else 0)

    run(tiny_checkpoint, image, scenario)


def test_requests_frozen_by_a_sleep_go_on_after_the_wake(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "presence_penalty": 0.5}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        tasks = [asyncio.create_task(h.tokens(p, **sampled)) for p in PROMPTS]
        for _ in range(4):  # each time somewhere in the middle
            while not h.runtime.engine_stats().running and not all(t.done() for t in tasks):
                await asyncio.sleep(0)
            await h.runtime.sleep(1)
            assert h.runtime.engine_stats().kv_used_blocks == 0
            await h.runtime.wake()
        assert await asyncio.gather(*tasks) == expected
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_first_wake_finds_the_image_pinned(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_link = CpuDriver.open_link

    def counted(driver: CpuDriver, buffers: Sequence[memoryview]) -> CpuLink:
        opened.append(threading.current_thread().name)
        return open_link(driver, buffers)

    async def scenario(h: Harness) -> None:
        assert opened == ["runtime-control_0"]
        await h.runtime.wake()
        await h.runtime.sleep(2)
        assert len(opened) == 1
        await h.runtime.wake()  # with another copy of the image
        assert opened == 2 * ["runtime-control_0"]

    monkeypatch.setattr(CpuDriver, "open_link", counted)
    run(tiny_checkpoint, image, scenario, awake=False)


def test_kept_layers_stay_mapped_and_are_not_copied_again(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        before = await h.tokens(PROMPTS[0])
        kept = [i for i, s in enumerate(image.layout.segments) if s.name in ("layer.0", "layer.1")]
        kept_bytes = sum(image.layout.segments[i].size for i in kept)
        for _ in range(3):
            slept = await h.runtime.sleep(1)
            assert slept.left is not None
            assert slept.left.kept_layers == h.runtime.mapped_bytes >= kept_bytes
            woke = await h.runtime.wake()
            assert woke.copied_bytes == h.runtime.weights_bytes - kept_bytes
            await h.runtime.settled()
            assert h.runtime.last_transfer is not None
            moved = [copied.segment for copied in h.runtime.last_transfer.segments]
            assert moved == [i for i in range(len(image.layout.segments)) if i not in kept]
            assert await h.tokens(PROMPTS[0]) == before
        slept = await h.runtime.sleep(2)
        assert h.runtime.mapped_bytes == 0  # level 2 keeps nothing
        assert slept.left is not None
        assert slept.left.kept_layers == 0
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == before

    run(tiny_checkpoint, image, scenario, sleep=SleepConfig(keep_layers=2))


def test_closing_the_stream_frees_everything(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        for _ in range(5):
            stream = h.runtime.generate(h.prepare(PROMPTS[7], max_tokens=500, ignore_eos=True, n=3))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await h.until_free()
        assert len(h.runtime._streams) == 0
        assert len(await h.tokens(PROMPTS[0], ignore_eos=True)) == 20

    run(tiny_checkpoint, image, scenario)


def test_stop_string_ends_the_sequence_in_the_engine_too(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        whole = "".join(e.text for e in await h.events(PROMPTS[1], max_tokens=40))
        stop = whole[7:12]  # no heed of token borders
        events = await h.events(PROMPTS[1], max_tokens=500, stop=(stop,))
        assert "".join(e.text for e in events) == whole[: whole.index(stop)]
        assert events[-1].finish_reason is FinishReason.STOP
        assert events[-1].stop_reason == stop
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_stop_token_is_told_and_end_of_sequence_can_be_ignored(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        tokens = await h.tokens(PROMPTS[2], ignore_eos=True)
        stop = tokens[4]
        events = await h.events(PROMPTS[2], stop_token_ids=(stop,))
        assert [i for e in events for i in e.token_ids] == tokens[: tokens.index(stop) + 1]
        assert events[-1].finish_reason is FinishReason.STOP
        assert events[-1].stop_reason == stop
        events = await h.events(PROMPTS[2], max_tokens=3, ignore_eos=True)
        assert events[-1].finish_reason is FinishReason.LENGTH

    run(tiny_checkpoint, image, scenario)


def test_n_continuations_are_those_of_neighbouring_seeds(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "ignore_eos": True}
        events = await h.events(PROMPTS[0], **sampled, seed=7, n=3)
        by_index = [[i for e in events if e.index == k for i in e.token_ids] for k in range(3)]
        assert by_index == [await h.tokens(PROMPTS[0], **sampled, seed=7 + k) for k in range(3)]
        assert len({tuple(tokens) for tokens in by_index}) == 3
        highest = 2**63 - 1  # the next seed wraps around instead of failing
        assert len(await h.tokens(PROMPTS[0], **sampled, seed=highest, n=2)) == 40

    run(tiny_checkpoint, image, scenario)


def test_not_streamed_says_that_it_has_begun_and_gives_one_event_per_continuation(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        asked = {"logprobs": 2, "max_tokens": 400, "ignore_eos": True}  # not over in a moment
        streamed = await h.events(PROMPTS[3], **asked)
        prepared = h.prepare(PROMPTS[3], stream=False, **asked)
        events = h.runtime.generate(prepared)
        begun = await anext(events)
        assert (begun.text, begun.token_ids, begun.finish_reason) == ("", (), None)
        assert begun.prompt_tokens == len(prepared.prompt_ids)
        assert h.runtime.engine_stats().running == 1, "not at the end"
        (whole,) = [event async for event in events]
        assert whole.text == "".join(e.text for e in streamed)
        parts = [t for e in streamed for t in e.logprobs or ()]
        assert whole.logprobs is not None
        assert [t.token_id for t in whole.logprobs] == list(whole.token_ids)
        # The second run finds the prompt's first pages in the cache, so its rounding differs.
        assert [t.logprob for t in whole.logprobs] == pytest.approx(
            [t.logprob for t in parts], abs=1e-4
        )
        assert whole.finish_reason is streamed[-1].finish_reason

    run(tiny_checkpoint, image, scenario)


def test_echo_comes_first(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        events = await h.events(PROMPTS[0], echo=True, n=2)
        assert [(e.index, e.text, e.token_ids) for e in events[:2]] == [
            (0, PROMPTS[0], ()),
            (1, PROMPTS[0], ()),
        ]
        ids = h.runtime.codec.encode_prompt(PROMPTS[0])
        assert (await h.events(ids, echo=True))[0].text == PROMPTS[0]

    run(tiny_checkpoint, image, scenario)


def test_echo_with_logprobs_has_those_of_the_prompt(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()

    async def scenario(h: Harness) -> None:
        ids = h.runtime.codec.encode_prompt(" ".join(PROMPTS))  # several pieces of prompt_logprobs
        assert len(ids) > 150
        with torch.no_grad():
            exact = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        plain = await h.tokens(ids, max_tokens=8)
        echo, *events = await h.events(ids, echo=True, logprobs=2, max_tokens=8)
        assert echo.logprobs is not None
        assert tuple(entry.token_id for entry in echo.logprobs) == ids
        first, *others = echo.logprobs
        assert (first.logprob, first.top) == (None, ())
        expected = [float(exact[i, token]) for i, token in enumerate(ids[1:])]
        assert [entry.logprob for entry in others] == pytest.approx(expected, abs=1e-4)
        best = exact[: len(ids) - 1].topk(2).values.tolist()
        assert [[t.logprob for t in entry.top] for entry in others] == [
            pytest.approx(each, abs=1e-4) for each in best
        ]
        # The engine goes on as if nothing had been.
        assert [i for e in events for i in e.token_ids] == plain
        (alone,) = [
            e.logprobs for e in await h.events((ids[0],), echo=True, logprobs=0) if not e.token_ids
        ]
        assert alone is not None
        assert [entry.logprob for entry in alone] == [None]

    run(tiny_checkpoint, image, scenario)


def test_first_event_of_a_chat_tells_how_messages_are_written(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        prompt = ChatPrompt(({"role": "user", "content": "hi"},))
        events = await h.events(prompt, n=2)  # type: ignore[arg-type]
        for index in (0, 1):
            forms = [event.form for event in events if event.index == index]
            assert forms == [MessageForm(), *[None] * (len(forms) - 1)]
        *_, whole = await h.events(prompt, stream=False)  # type: ignore[arg-type]
        assert whole.form == MessageForm()
        assert {event.form for event in await h.events("hi")} == {None}

    run(tiny_checkpoint, image, scenario)


def test_prompt_logprobs_of_a_sleeping_model_are_refused(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.sleep(1)
        with pytest.raises(Unavailable, match="asleep"):
            await h.events(PROMPTS[0], echo=True, logprobs=1)
        await h.runtime.wake()
        assert await h.events(PROMPTS[0], echo=True, logprobs=1)
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_prompt_logprobs_wait_for_no_answer_and_disturb_none(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        asked = {"max_tokens": 40, "ignore_eos": True}
        alone = [await h.tokens(prompt, **asked) for prompt in PROMPTS[:4]]
        together = await asyncio.gather(
            *(h.tokens(prompt, **asked) for prompt in PROMPTS[:4]),
            *(h.events(prompt, **asked, echo=True, logprobs=1) for prompt in PROMPTS[4:]),
        )
        assert together[:4] == alone

    run(tiny_checkpoint, image, scenario)


def test_tokens_are_coalesced_under_load_but_the_first_comes_at_once(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        loop = asyncio.get_running_loop()
        deliver = h.runtime._streams.deliver
        looked = threading.Event()

        def look(rounds: int) -> None:
            if rounds:
                loop.call_soon(look, rounds - 1)
            else:
                looked.set()

        def deliver_and_let_look(outputs: Sequence[EngineOutput]) -> None:
            """The engine's next step may be over before this loop runs at all: not the first one's."""
            deliver(outputs)
            if not looked.is_set():
                loop.call_soon_threadsafe(look, 10)  # rounds of the loop, and no time to speak of
                assert looked.wait(30)

        h.runtime._streams.deliver = deliver_and_let_look  # type: ignore[method-assign]
        started_s = time.monotonic()
        events = await h.events(PROMPTS[0], max_tokens=200, ignore_eos=True)
        seconds = time.monotonic() - started_s
        assert len(events[0].token_ids) == 1
        assert len(events) <= 20 * seconds + 2  # and the first and the last
        assert sum(len(e.token_ids) for e in events) == 200

    slow = ENGINE.model_copy(update={"max_events_per_s": 20.0})
    run(tiny_checkpoint, image, scenario, engine=slow)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "message"),
    [
        ("", {}, InvalidRequest, "no tokens"),
        ((1, 2, 10**9), {}, InvalidRequest, "1000000000"),
        ((1, -1), {}, InvalidRequest, "-1"),
        ("hi", {"temperature": -1.0}, InvalidRequest, "temperature"),
        ("hi", {"temperature": float("nan")}, InvalidRequest, "temperature"),
        ("hi", {"top_p": 0.0}, InvalidRequest, "top_p"),
        ("hi", {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ("hi", {"logit_bias": {10**9: 1.0}}, InvalidRequest, "logit_bias"),
        ("hi", {"max_tokens": 10**6}, ContextLengthExceeded, "max_model_len"),
        (tuple([5] * 5000), {}, ContextLengthExceeded, "5000"),
    ],
)
def test_bad_request_is_refused_before_it_enters(
    tiny_checkpoint: Path,
    image: WeightImage,
    prompt: str | tuple[int, ...],
    sampling: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(error, match=message):
            h.prepare(prompt, **sampling)
        assert h.runtime.mapped_bytes == 0  # refusing needed no weights
        await h.runtime.wake()
        assert await h.tokens("good")

    run(tiny_checkpoint, image, scenario, awake=False)


def test_sequence_that_fills_the_context_to_the_last_token(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        limit = h.runtime.max_model_len
        assert limit == 320  # 20 blocks of 16: the cache is smaller than the checkpoint's limit
        prompt = tuple(range(10, 30))
        tokens = await h.tokens(prompt, max_tokens=limit - 20, ignore_eos=True)
        assert len(tokens) == limit - 20
        assert len(await h.tokens(prompt, max_tokens=None, ignore_eos=True)) == limit - 20
        with pytest.raises(ContextLengthExceeded, match="320"):
            h.prepare(prompt, max_tokens=limit - 19)

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 20}))


@pytest.mark.parametrize("how", ["its client leaves", "stop string"])
def test_sequence_that_was_put_off_goes_on_when_the_other_is_cancelled(
    tiny_checkpoint: Path, image: WeightImage, how: str
) -> None:
    async def scenario(h: Harness) -> None:
        scheduler = h.runtime._engine._processor.scheduler  # type: ignore[attr-defined]
        first, second = (5,) * 20, (6,) * 20
        text = "".join(e.text for e in await h.events(first, max_tokens=100, ignore_eos=True))
        parts = (
            text[i : i + size]
            for size in range(3, 30)
            for i in range(len(text) * 6 // 10, len(text) * 8 // 10)
        )
        late = next(part for part in parts if text.find(part) >= len(text) * 6 // 10)
        stop = () if how == "its client leaves" else (late,)
        was_full = False

        async def ask_first() -> None:
            nonlocal was_full
            stream = h.runtime.generate(
                h.prepare(first, max_tokens=100, ignore_eos=True, stop=stop)
            )
            async for _ in stream:
                was_full = was_full or scheduler.block_new_requests
                if was_full and not stop:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        ended = asyncio.create_task(ask_first())
        put_off = asyncio.create_task(h.tokens(second, max_tokens=100, ignore_eos=True))
        await ended
        assert was_full
        assert len(await put_off) == 100
        assert await h.tokens(second, max_tokens=5)

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 8}))


def test_more_sequences_than_the_cache_holds_all_finish_right(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """The engine evicts and recomputes; nobody may notice."""

    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "ignore_eos": True}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        assert await asyncio.gather(*(h.tokens(p, **sampled) for p in PROMPTS)) == expected
        await h.until_free()

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 20}))


def test_abort_ends_every_stream_with_its_tokens_so_far(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        prepared = h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True, n=2)
        events = []
        async for event in h.runtime.generate(prepared):
            events.append(event)
            if len(events) == 4:
                h.runtime.abort_in_flight()
        ends = {e.index: e.finish_reason for e in events if e.finish_reason}
        assert ends == {0: FinishReason.ABORT, 1: FinishReason.ABORT}
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_wake_that_fails_half_way_leaves_nothing_mapped(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        copy, calls = CpuLink.copy, 0

        def fail_third(link: CpuLink, address: int, host: memoryview) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise DeviceMemoryError("copy failed")
            copy(link, address, host)

        with monkeypatch.context() as patch:
            patch.setattr(CpuLink, "copy", fail_third)
            with pytest.raises(DeviceMemoryError, match="copy failed"):
                await h.runtime.wake()
        assert h.runtime.mapped_bytes == 0
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == expected

    run(tiny_checkpoint, image, scenario)


def test_byte_that_changed_on_the_way_fails_the_replica_and_its_requests(
    tiny_checkpoint: Path,
) -> None:
    """Not of the image that others share: this one's memory is written to."""
    image = load(tiny_checkpoint)

    async def scenario(h: Harness) -> None:
        await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        payload = np.frombuffer(image.segment(2), np.uint8)
        address = payload.__array_interface__["data"][0]
        ctypes.memset(address + 1000, payload[1000] ^ 1, 1)
        await h.runtime.wake()
        with pytest.raises(WeightsCorrupted, match=r"layer\.1 is not what was packed"):
            await h.tokens(PROMPTS[0], max_tokens=300, ignore_eos=True)
        with pytest.raises(WeightsCorrupted):
            h.runtime.check_health()
        with pytest.raises(WeightsCorrupted):
            await h.tokens(PROMPTS[0])
        report = h.runtime.memory.last_wake
        assert report is not None
        assert (report.intact, report.checked_segments) == (False, 3)  # up to the one that differs

    run(tiny_checkpoint, image, scenario)


def test_wake_reports_its_transfer_and_the_check_in_one_line(
    tiny_checkpoint: Path, image: WeightImage, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        await h.runtime.sleep(1)
        with caplog.at_level(logging.INFO, "actors.model_memory"):
            await h.runtime.wake()
            await h.runtime.settled()
        h.runtime.check_health()
        report = h.runtime.memory.last_wake
        assert report is not None
        assert report.intact
        assert report.copied_bytes == report.checked_bytes == h.runtime.weights_bytes
        assert report.checked_segments == len(image.layout.segments)
        assert report.link_s > 0
        assert report.check_s > 0
        assert report.link_gb_per_s == pytest.approx(report.copied_bytes / 1e9 / report.link_s)
        [record] = caplog.records
        assert f"restored {report.copied_bytes} bytes" in record.getMessage()
        assert record.getMessage().endswith("ms: intact")

    run(tiny_checkpoint, image, scenario)


def test_what_a_sleep_gave_back_is_collected_before_the_next_wake_and_only_then(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []
    collected = threading.Event()

    def collect(driver: CpuDriver) -> None:
        mapped.append(h.runtime.mapped_bytes)
        collected.set()

    async def scenario(found: Harness) -> None:
        nonlocal h
        h = found
        monkeypatch.setattr(cleared, "_CLEARED_S", 0.001)
        await h.runtime.sleep(1)
        assert await asyncio.to_thread(collected.wait, 10)
        assert mapped == [0]
        await h.runtime.wake()
        h.runtime._collect_cleared()  # a wake was faster than the timer
        assert mapped == [0]

    h: Harness
    monkeypatch.setattr(cleared, "_CLEARED_S", 1000.0)  # for the sleep that a start ends with
    monkeypatch.setattr(CpuDriver, "collect_cleared", collect)
    run(tiny_checkpoint, image, scenario)


def test_device_that_fails_after_a_sleep_fails_the_replica(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        def refuse(driver: CpuDriver) -> None:
            raise DeviceMemoryError("cuMemCreate failed")

        monkeypatch.setattr(CpuDriver, "collect_cleared", refuse)
        await h.runtime.sleep(1)
        h.runtime._collect_cleared()
        with pytest.raises(ReplicaFailed, match="cuMemCreate failed"):
            h.runtime.check_health()

    run(tiny_checkpoint, image, scenario)


def test_checkpoint_that_changed_during_a_level_2_sleep_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "tiny")

    async def scenario(h: Harness) -> None:
        await h.runtime.sleep(2)
        write_checkpoint(checkpoint, "tiny", seed=1, force=True)
        with pytest.raises(LayoutMismatch, match="changed"):
            await h.runtime.wake()
        assert h.runtime.image_origin == ""

    run(checkpoint, load(checkpoint), scenario)


def test_nothing_is_compiled_or_captured_while_somebody_is_served(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lull = Lull(quiet_s=0.0, latest_s=600.0)
    compiling, may_end, captured = (threading.Event() for _ in range(3))

    def compile_slowly(engine: TransformersEngine) -> None:
        compiling.set()
        may_end.wait()

    monkeypatch.setattr("actors.runtime.Lull", lambda: lull)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_slowly)
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: captured.set())

    async def scenario(h: Harness) -> None:
        async def first_event() -> AsyncIterator[TokenEvent]:
            stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=400, ignore_eos=True))
            await anext(stream)
            return stream

        async def stays_unset(event: threading.Event) -> bool:
            return not await asyncio.to_thread(event.wait, 0.2)

        stream = await first_event()
        since_start.close()
        assert await stays_unset(compiling)
        await stream.aclose()
        assert await asyncio.to_thread(compiling.wait, 20)
        stream = await first_event()
        may_end.set()
        assert await stays_unset(captured)
        await stream.aclose()
        await h.runtime.compiled()
        assert captured.is_set()

    with ExitStack() as since_start:
        since_start.enter_context(lull.interrupted())
        run(tiny_checkpoint, image, scenario)


def test_graphs_that_find_no_memory_are_for_another_time(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def no_memory(engine: TransformersEngine) -> None:
        tries.append(engine.paused)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", lambda engine: None)
    monkeypatch.setattr(TransformersEngine, "use_compiled", no_memory)

    async def scenario(h: Harness) -> None:
        await h.runtime.compiled()
        tokens = await h.tokens(PROMPTS[0])
        for _ in range(2):
            await h.runtime.sleep(1)
            assert h.runtime.mapped_bytes == 0
            await h.runtime.wake()
            assert await h.tokens(PROMPTS[0]) == tokens
        h.runtime.check_health()
        assert tries == [True] * 3

    run(tiny_checkpoint, image, scenario)


def test_plain_forward_waits_for_the_compiler_and_keeps_nobody_from_sleeping(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, may_end = threading.Event(), threading.Event()

    def compile_slowly(engine: TransformersEngine) -> None:
        compiling.set()
        may_end.wait()

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_slowly)
    monkeypatch.setattr(TransformersEngine, "use_compiled", lambda engine: None)

    async def scenario(h: Harness) -> None:
        assert await asyncio.to_thread(compiling.wait, 20)
        asking = {"max_tokens": 1, "echo": True, "logprobs": 1}
        echo = asyncio.create_task(h.events(PROMPTS[0], **asking))
        assert await h.tokens(PROMPTS[1])
        await h.runtime.sleep(1)
        await h.runtime.wake()
        assert not echo.done()
        may_end.set()
        assert (await echo)[0].logprobs

    try:
        run(tiny_checkpoint, image, scenario)
    finally:
        may_end.set()


@pytest.mark.parametrize("awake", [True, False], ids=["awake", "asleep"])
def test_capture_that_fails_in_the_background_fails_the_replica(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch, awake: bool
) -> None:
    may_compile = threading.Event()

    def compile_later(engine: TransformersEngine) -> None:
        may_compile.wait()

    def explode(engine: TransformersEngine) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Lull, "wait", lambda self: True)
    monkeypatch.setattr(TransformersEngine, "compiles", True)
    monkeypatch.setattr(TransformersEngine, "compile", compile_later)
    monkeypatch.setattr(TransformersEngine, "use_compiled", explode)

    async def scenario(h: Harness) -> None:
        pending = None
        if awake:
            pending = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
            await anext(pending)
        may_compile.set()
        await h.runtime.compiled()
        with pytest.raises(ReplicaFailed, match="capturing the compiled layers"):
            h.runtime.check_health()
        if pending is not None:
            with pytest.raises(ReplicaFailed, match="capturing"):
                async for _ in pending:
                    pass
        assert (h.runtime.mapped_bytes > 0) == awake

    run(tiny_checkpoint, image, scenario, awake=awake)


@contextmanager
def memory_missing_at(h: Harness, *steps: int) -> Iterator[None]:
    """The model's n-th forward from now on finds no memory, for each n in steps."""
    count = itertools.count()

    def fail(*_: object) -> None:
        if next(count) in steps:
            raise torch.OutOfMemoryError("another process has it all")

    handle = h.runtime._engine._model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("step", [0, 1, 7])
def test_step_without_memory_is_tried_again(
    tiny_checkpoint: Path, image: WeightImage, step: int
) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "presence_penalty": 0.5}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        with memory_missing_at(h, step, step + 9):
            assert await asyncio.gather(*(h.tokens(p, **sampled) for p in PROMPTS)) == expected
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_step_that_never_finds_memory_is_refused_and_the_engine_lives(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        expected = [await h.tokens(p) for p in PROMPTS]
        with memory_missing_at(h, *range(5, 1000)):
            found = await asyncio.gather(*(h.tokens(p) for p in PROMPTS), return_exceptions=True)
        assert all(isinstance(refusal, DeviceMemoryShort) for refusal in found), found
        await h.until_free()
        h.runtime.check_health()
        assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == expected

    run(tiny_checkpoint, image, scenario)


def test_stream_that_fails_between_two_events_tells_so(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """Everything that had come was taken, and nothing more comes: that is not the end of an answer."""

    async def scenario(h: Harness) -> None:
        stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        assert (await anext(stream)).finish_reason is None
        h.runtime._streams.fail_all(ReplicaFailed("the device is gone"))
        with pytest.raises(ReplicaFailed, match="the device is gone"):
            async for _ in stream:
                pass

    run(tiny_checkpoint, image, scenario)


def test_engine_that_dies_fails_its_requests_and_the_health_check(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(h: Harness) -> None:
        h.runtime.check_health()

        def explode(*args: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        stream = h.runtime.generate(h.prepare(PROMPTS[0], max_tokens=500, ignore_eos=True))
        await anext(stream)
        monkeypatch.setattr(h.runtime._engine._processor, "_generation_step", explode)
        with pytest.raises(EngineDied, match="RuntimeError"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDied):
            await h.tokens(PROMPTS[0])
        with pytest.raises(EngineDied):
            h.runtime.check_health()

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": 10**6}, "max_position_embeddings|KV cache"),
        ({"max_model_len": 330, "num_blocks": 20}, "KV cache of 20 blocks of 16 tokens holds 320"),
        ({"device": "cuda"}, "finds no CUDA device"),
    ],
)
def test_limits_that_cannot_work_are_refused_with_the_numbers(
    tiny_checkpoint: Path, image: WeightImage, limits: dict[str, object], message: str
) -> None:
    async def scenario(h: Harness) -> None: ...

    with pytest.raises(ValueError, match=message):
        run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update=limits))
