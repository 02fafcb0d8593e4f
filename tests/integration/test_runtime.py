"""One model in one process, without Ray: generate, sleep, wake."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from actors.image.image import WeightImage
from actors.memory.cpu import CpuDriver, CpuLink
from actors.protocol import ChatPrompt, FinishReason, MessageForm
from actors.replica.sleep_config import SleepConfig
from actors.worker import cleared, model_memory
from actors.worker.messages import Outputs
from actors.worker.model_memory import ModelMemory
from tests.integration.runtime_harness import ENGINE, PROMPTS, Harness, harness, load, run


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


class SuspendedDriver(CpuDriver):
    """Fails whoever calls it between `suspend` and `resume`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_suspended = False

    def suspend(self) -> bool:
        self.is_suspended = True
        return True

    def resume(self) -> None:
        self.is_suspended = False

    def __getattribute__(self, name: str) -> object:
        if name in ("map", "unmap", "trim", "synchronize", "collect_cleared", "open_link"):
            assert not super().__getattribute__("is_suspended"), name
        return super().__getattribute__(name)


@pytest.mark.parametrize("level", [1, 2])
def test_tokens_and_addresses_survive_sleep(
    tiny_checkpoint: Path, image: WeightImage, level: int
) -> None:
    async def scenario(h: Harness) -> None:
        before = [await h.tokens(p) for p in PROMPTS]
        for _ in range(3):
            slept = await h.runtime.sleep(level)
            assert slept.mapped_after_bytes == h.worker.memory.mapped_bytes == 0
            assert (
                slept.mapped_before_bytes
                >= h.worker.memory.weights_bytes + h.worker.memory.kv_bytes
            )
            woke = await h.runtime.wake()
            assert woke.copied_bytes == h.worker.memory.weights_bytes
            assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == before
        assert h.asked == ["release", "reload"] * (3 if level == 2 else 0)

    run(tiny_checkpoint, image, scenario)


def test_deep_sleeps_change_no_token_and_nobody_calls_the_device_meanwhile(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card does: whoever calls it while the process is suspended waits for the wake."""
    driver = SuspendedDriver()
    monkeypatch.setattr(model_memory, "select_driver", lambda *_: driver)

    async def scenario(h: Harness) -> None:
        before = [await h.tokens(p) for p in PROMPTS]
        for level in (1, 1, 2):
            await h.runtime.sleep(1)
            slept = await h.runtime.sleep(level, deep=True)
            assert slept.deep
            assert driver.is_suspended
            await asyncio.sleep(0.3)  # the device's bookkeeping would be due
            assert (await h.runtime.sleep(1, deep=True)).deep
            device = await h.runtime.worker.read_device("node")
            assert device.wake_bytes == h.runtime.worker.state.wake_bytes > 0
            assert h.runtime.worker.state.suspended
            await h.runtime.wake()
            assert not driver.is_suspended
            assert await asyncio.gather(*(h.tokens(p) for p in PROMPTS)) == before
        assert h.asked == ["release", "reload"]
        await h.runtime.sleep(1, deep=True)  # closed out of one, too

    run(tiny_checkpoint, image, scenario, sleep=SleepConfig(keep_layers=2))


def test_requests_frozen_by_a_sleep_go_on_after_the_wake(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "presence_penalty": 0.5}
        expected = [await h.tokens(p, **sampled) for p in PROMPTS]
        tasks = [asyncio.create_task(h.tokens(p, **sampled)) for p in PROMPTS]
        for _ in range(4):  # each time somewhere in the middle
            while not h.worker.engine_stats().running and not all(t.done() for t in tasks):
                await asyncio.sleep(0)
            await h.runtime.sleep(1)
            assert h.worker.engine_stats().kv_used_blocks == 0
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
        assert opened == ["apart-open_link"]  # while the engine was built
        await h.runtime.wake()
        await h.runtime.sleep(2)
        assert len(opened) == 1
        await h.runtime.wake()  # with another copy of the image
        assert opened == ["apart-open_link", "runtime-control_0"]

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
            assert slept.left.kept_layers == h.worker.memory.mapped_bytes >= kept_bytes
            woke = await h.runtime.wake()
            assert woke.copied_bytes == h.worker.memory.weights_bytes - kept_bytes
            await h.runtime.settled()
            assert h.worker.memory.last_transfer is not None
            moved = [copied.segment for copied in h.worker.memory.last_transfer.segments]
            assert moved == [i for i in range(len(image.layout.segments)) if i not in kept]
            assert await h.tokens(PROMPTS[0]) == before
        slept = await h.runtime.sleep(2)
        assert h.worker.memory.mapped_bytes == 0  # level 2 keeps nothing
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


def test_stream_that_is_closed_while_the_model_sleeps_waits_no_longer(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        streams = [
            h.runtime.generate(h.prepare(PROMPTS[i], max_tokens=500, ignore_eos=True, n=2))
            for i in range(2)
        ]
        for stream in streams:
            await anext(stream)
        await h.runtime.sleep(1)  # freezes them
        assert h.worker.engine_stats().waiting == 4
        await streams[0].aclose()  # type: ignore[attr-defined]
        await h.runtime.settled()  # behind the cancels
        assert h.worker.engine_stats().waiting == 2
        await streams[1].aclose()  # type: ignore[attr-defined]
        await h.until_free()
        await h.runtime.wake()
        await h.until_free()
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
        assert h.worker.engine_stats().running == 1, "not at the end"
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


def test_echo_s_tokens_know_what_of_them_is_in_its_text(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        special = min(h.runtime.codec.eos_ids)
        ids = (special, *h.runtime.codec.encode_prompt(PROMPTS[0]), special)
        asked = {"echo": True, "logprobs": 0, "max_tokens": 1}
        text = "".join(map(h.runtime.codec.token_text, ids))
        for prompt in (ids, text):  # the text names them
            echo, *_ = await h.events(prompt, **asked)
            assert echo.logprobs is not None
            assert echo.text == (PROMPTS[0] if prompt is ids else text)
            assert tuple(entry.token_id for entry in echo.logprobs) == ids
            said = (entry.token_bytes[entry.unwritten :] for entry in echo.logprobs)
            assert b"".join(said).decode() == echo.text

    run(tiny_checkpoint, image, scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_alone_has_the_prompt_and_no_token(
    tiny_checkpoint: Path, image: WeightImage, stream: bool, logprobs: int | None
) -> None:
    async def scenario(h: Harness) -> None:
        asked = {"echo": True, "logprobs": logprobs, "n": 2, "stream": stream}
        ids = h.runtime.codec.encode_prompt(PROMPTS[0])
        usual = await h.events(ids, **asked, max_tokens=1)
        (sampled,) = {i for event in usual for i in event.token_ids}
        # Also where that token would have ended it.
        for stops in ((), (sampled,)):
            events = await h.events(ids, **asked, max_tokens=0, stop_token_ids=stops)
            assert events[:2] == usual[:2]
            assert {(e.text, e.token_ids, e.logprobs, e.stop_reason) for e in events[2:]} == {
                ("", (), None, None)
            }
            ends = [(e.index, e.finish_reason) for e in events if e.finish_reason is not None]
            assert sorted(ends) == [(0, FinishReason.LENGTH), (1, FinishReason.LENGTH)]
        await h.until_free()

    run(tiny_checkpoint, image, scenario)


def test_no_tokens_are_for_echo_alone(tiny_checkpoint: Path, image: WeightImage) -> None:
    async def scenario(h: Harness) -> None:
        with pytest.raises(InvalidRequest, match="max_tokens is 0; it must be 1 or more"):
            h.prepare(PROMPTS[0], max_tokens=0)
        full = (5,) * h.runtime.worker.facts.max_model_len
        with pytest.raises(ContextLengthExceeded, match="the answer needs one at least"):
            h.prepare(full, max_tokens=0, echo=True)
        h.prepare(full[1:], max_tokens=0, echo=True)

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
        send, seen = h.worker._send, threading.Event()

        def send_and_let_look(message: object) -> None:
            """The engine's next step may be over before this loop runs at all: not the first one's."""
            send(message)
            if isinstance(message, Outputs):
                assert seen.wait(30)

        h.worker._send = send_and_let_look
        started_s = time.monotonic()
        events = []
        prepared = h.prepare(PROMPTS[0], max_tokens=200, ignore_eos=True)
        async for event in h.runtime.generate(prepared):
            events.append(event)
            seen.set()
        seconds = time.monotonic() - started_s
        assert len(events[0].token_ids) == 1
        assert len(events) <= 20 * seconds + 2  # and the first and the last
        assert sum(len(e.token_ids) for e in events) == 200

    slow = ENGINE.model_copy(update={"max_events_per_s": 20.0})
    run(tiny_checkpoint, image, scenario, engine=slow)


def test_sequence_that_fills_the_context_to_the_last_token(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    async def scenario(h: Harness) -> None:
        limit = h.worker._engine.max_model_len
        assert limit == 320  # 20 blocks of 16: the cache is smaller than the checkpoint's limit
        prompt = tuple(range(10, 30))
        tokens = await h.tokens(prompt, max_tokens=limit - 20, ignore_eos=True)
        assert len(tokens) == limit - 20
        assert len(await h.tokens(prompt, max_tokens=None, ignore_eos=True)) == limit - 20
        with pytest.raises(ContextLengthExceeded, match="320"):
            h.prepare(prompt, max_tokens=limit - 19)

    run(tiny_checkpoint, image, scenario, ENGINE.model_copy(update={"num_blocks": 20}))


def test_request_for_a_worker_with_more_room_is_checked_again_by_the_next(
    tiny_checkpoint: Path, image: WeightImage
) -> None:
    """A card that others fill meanwhile has less for the next worker's cache."""
    larger, smaller = (ENGINE.model_copy(update={"num_blocks": blocks}) for blocks in (20, 8))

    async def scenario(h: Harness) -> None:
        async with harness(tiny_checkpoint, load(tiny_checkpoint), smaller) as following:
            limit = following.worker._engine.max_model_len
            assert limit == 128

            async def tokens(length: int, max_tokens: int | None) -> int:
                prepared = h.prepare((7,) * length, max_tokens=max_tokens, ignore_eos=True)
                events = following.runtime.generate(prepared)
                return sum([len(event.token_ids) async for event in events])

            assert await tokens(limit - 8, 8) == 8
            assert await tokens(limit - 8, None) == 8, "what nobody asked for is cut to the room"
            for length, max_tokens in ((limit - 8, 9), (limit, None), (limit + 70, 8)):
                with pytest.raises(ContextLengthExceeded, match="128"):
                    await tokens(length, max_tokens)
            assert await tokens(3, 5) == 5

    run(tiny_checkpoint, image, scenario, larger)


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


def test_wake_reports_its_transfer_and_the_check_in_one_line(
    tiny_checkpoint: Path, image: WeightImage, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(h: Harness) -> None:
        await h.runtime.settled()
        await h.runtime.sleep(1)
        with caplog.at_level(logging.INFO, "actors.worker.model_memory"):
            await h.runtime.wake()
            await h.runtime.settled()
        h.runtime.check_health()
        report = h.worker.memory.last_wake
        assert report is not None
        assert report.intact
        assert report.copied_bytes == report.checked_bytes == h.worker.memory.weights_bytes
        assert report.checked_segments == len(image.layout.segments)
        assert report.link_s > 0
        assert report.check_s > 0
        assert report.link_gb_per_s == pytest.approx(report.copied_bytes / 1e9 / report.link_s)
        [record] = caplog.records
        assert f"restored {report.copied_bytes} bytes" in record.getMessage()
        assert record.getMessage().endswith("ms: intact")

    run(tiny_checkpoint, image, scenario)


def test_first_token_waits_for_the_check_of_its_wake_and_for_nothing_behind_it(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, may_end = threading.Event(), threading.Event()
    end_wake = ModelMemory.end_wake

    def end_late(memory: ModelMemory) -> None:
        ends.set()
        assert may_end.wait(20)
        end_wake(memory)

    async def scenario(h: Harness) -> None:
        expected = await h.tokens(PROMPTS[0])
        await h.runtime.sleep(1)
        monkeypatch.setattr(ModelMemory, "end_wake", end_late)
        await h.runtime.wake()
        assert await h.tokens(PROMPTS[0]) == expected
        assert ends.is_set()
        may_end.set()
        await h.runtime.settled()
        h.runtime.check_health()

    try:
        run(tiny_checkpoint, image, scenario)
    finally:
        may_end.set()


def test_what_a_sleep_gave_back_is_collected_before_the_next_wake_and_only_then(
    tiny_checkpoint: Path, image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []
    collected = threading.Event()

    def collect(driver: CpuDriver) -> None:
        mapped.append(h.worker.memory.mapped_bytes)
        collected.set()

    async def scenario(found: Harness) -> None:
        nonlocal h
        h = found
        monkeypatch.setattr(cleared, "_CLEARED_S", 0.001)
        await h.runtime.sleep(1)
        assert await asyncio.to_thread(collected.wait, 10)
        assert mapped == [0]
        await h.runtime.wake()
        h.worker._residency.collect_cleared()  # a wake was faster than the timer
        assert mapped == [0]

    h: Harness
    monkeypatch.setattr(cleared, "_CLEARED_S", 1000.0)  # for the sleep that a start ends with
    monkeypatch.setattr(CpuDriver, "collect_cleared", collect)
    run(tiny_checkpoint, image, scenario)
