"""The order in which batches are launched and read."""

from collections import deque
from contextlib import nullcontext
from functools import partial
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine.batching import pipeline
from actors.engine.batching.pipeline import PipelinedManager
from actors.engine.batching.upstream import (
    BackgroundThreadStatus,
    ContinuousBatchingAsyncIOs,
    RequestState,
)
from tests.unit.actors.engine.batching.manager_on_cpu import manager_on_cpu

_numbers = count()


def request(
    generated: int, has_new_token: bool = True, max_new_tokens: int = 100
) -> SimpleNamespace:
    state = RequestState(
        request_id=f"sequence {next(_numbers)}",
        initial_tokens=[1],
        generated_tokens=[0] * generated,
        max_new_tokens=max_new_tokens,
    )
    return SimpleNamespace(state=state, has_new_token=has_new_token)


FIRST = [request(0)]
LATER = [request(3)]
MANY = [request(0), *[request(3) for _ in range(pipeline._FEW)]]
FIRST_OF_MANY = [request(0)]  # while the others wait for their turn
GRAMMAR = [request(3)]  # the next batch depends on its tokens
PROMPT_GOES_ON = [request(0, has_new_token=False)]
LAST = [request(3, max_new_tokens=4), request(1, max_new_tokens=2)]
LAST_BUT_ONE = [request(2, max_new_tokens=4), *LAST]
LAST_OF_SOME = [request(3, max_new_tokens=4)]  # while another waits for its turn
LAST_OF_ALL_BUT_WAITING = [request(3, max_new_tokens=4)]  # who waits has no block yet


class FakeProcessor:
    """Batches of a script; "launch n" and "read n" go to the log."""

    def __init__(self, batches: list[Any], status: BackgroundThreadStatus, use_async: bool) -> None:
        self.batches = deque(enumerate(batches))
        self.status = status
        self.log: list[str] = []
        self.prepared: Any = None
        self.launched: dict[int, int] = {}  # pair of tensors -> batch
        if use_async:
            self.inputs_and_outputs: Any = ContinuousBatchingAsyncIOs.__new__(
                ContinuousBatchingAsyncIOs
            )
            self.inputs_and_outputs.current_pair = 0
            self.inputs_and_outputs.io_pairs = [
                SimpleNamespace(host_io=SimpleNamespace(requests_in_batch=[])) for _ in range(2)
            ]
        else:
            self.inputs_and_outputs = SimpleNamespace(requests_in_batch=[])

    @property
    def pair(self) -> int:
        return getattr(self.inputs_and_outputs, "current_pair", 0)

    def prepare_next_batch(self) -> bool:
        if self.batches and self.batches[0][1] == "pause":
            self.batches.popleft()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    BackgroundThreadStatus, "pause_and_wait", lambda _: self.log.append("paused")
                )
                self.status.pause_and_wait()
        if not self.batches or self.batches[0][1] is None:
            if self.batches:
                self.batches.popleft()
            return False
        number, requests = self.batches.popleft()
        self.prepared = requests
        self.launched[self.pair] = number
        others = {id(FIRST_OF_MANY): MANY, id(LAST_OF_SOME): LATER}.get(id(requests), [])
        self.scheduler = SimpleNamespace(
            active_requests={r.state.request_id: r.state for r in [*requests, *others]},
            waiting_requests={"next": None} if requests is LAST_OF_ALL_BUT_WAITING else {},
        )
        io = self.inputs_and_outputs
        target = io.io_pairs[self.pair].host_io if hasattr(io, "io_pairs") else io
        target.requests_in_batch = requests
        return True

    def _generation_step(self, model: object) -> None:
        self.log.append(f"launch {self.launched[self.pair]}")
        if hasattr(self.inputs_and_outputs, "io_pairs"):
            self.inputs_and_outputs.swap_io_pairs()

    def update_batch(self) -> None:
        self.log.append(f"read {self.launched[self.pair]}")

    def has_pending_requests(self) -> bool:
        return False


class LoggedWatch:
    """Notes in the log when it is entered and left."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        self.log.append("watched")

    def __exit__(self, *args: object) -> None:
        self.log.append("unwatched")


def run(
    batches: list[Any], use_async: bool, is_watched: bool = False
) -> tuple[list[str], PipelinedManager, FakeProcessor]:
    manager = PipelinedManager.__new__(PipelinedManager)
    manager.background_thread_status = pipeline._StatusThatReads(
        manager._read_newest, manager._unwatched
    )
    processor = FakeProcessor(batches, manager.background_thread_status, use_async)
    manager.batch_processor = processor  # type: ignore[assignment]
    manager.model = None
    manager.current_batch = 0
    manager._unread = False
    manager.watch = LoggedWatch(processor.log) if is_watched else nullcontext()
    manager.complete_batch = lambda: None
    manager.needs_results = lambda: processor.prepared is GRAMMAR
    wait = partial(processor.log.append, "wait") if is_watched else bool
    manager._wake_up_loop = SimpleNamespace(wait=lambda _: wait(), clear=lambda: None)
    assert not manager._generation_loop_body(processor, bootstrapping=True)
    while processor.batches:
        assert manager._generation_loop_body(processor, bootstrapping=False)
    return processor.log, manager, processor


@pytest.mark.parametrize(
    ("batches", "order"),
    [
        ([FIRST, LATER, LATER, None], "l0 r0 l1 l2 r1"),
        ([LATER, LATER, FIRST, LATER, None, None], "l0 l1 r0 l2 r1 r2 l3 r3"),
        ([MANY, MANY, None], "l0 l1 r0"),
        ([LATER, FIRST_OF_MANY, LATER, None], "l0 l1 r0 l2 r1"),
        ([LATER, GRAMMAR, GRAMMAR, LATER, LATER, None], "l0 l1 r0 r1 l2 r2 l3 l4 r3"),
        ([PROMPT_GOES_ON, FIRST, None], "l0 l1 r0 r1"),
        ([LATER, LATER, "pause", LATER], "l0 l1 r0 r1 paused l3"),
        ([None, LATER, None, None], "l1 r1"),
        ([LATER, LAST, None], "l0 l1 r0 r1"),
        ([LATER, LAST_BUT_ONE, LAST, None], "l0 l1 r0 l2 r1 r2"),
        ([LATER, LAST_OF_SOME, LATER, None], "l0 l1 r0 l2 r1"),
        ([LATER, LAST_OF_ALL_BUT_WAITING, LATER, None], "l0 l1 r0 l2 r1"),
    ],
)
def test_newest_batch_is_read_where_somebody_waits_for_it(batches: list[Any], order: str) -> None:
    log, _, _ = run(batches, use_async=True)
    names = {"l": "launch", "r": "read"}
    expected = [
        f"{names[step[0]]} {step[1:]}" if step != "paused" else step for step in order.split()
    ]
    assert log[: len(expected)] == expected


def test_whole_batch_is_watched_and_no_wait_that_may_take_for_ever() -> None:
    log, _, _ = run([LATER, "pause", LATER, None, None], use_async=True, is_watched=True)
    assert " ".join(log) == (
        "watched launch 0 unwatched "
        "watched read 0 unwatched paused watched launch 2 unwatched "  # both prepared within
        "watched read 2 unwatched "
        "watched unwatched wait"
    )


def test_without_asynchronous_batching_each_batch_is_read_at_once() -> None:
    log, _, _ = run([LATER, FIRST, MANY, None], use_async=False)
    assert log == [f"{what} {i}" for i in range(3) for what in ("launch", "read")]


def test_nothing_is_read_twice_when_the_loop_ends() -> None:
    """transformers reads the newest batch once more behind the loop."""
    log, manager, processor = run([LATER, LATER, None], use_async=True)
    manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
    while manager._generation_loop_body(processor, bootstrapping=False):  # type: ignore[arg-type]
        pass
    assert log == ["launch 0", "launch 1", "read 0", "read 1"]
    pairs = processor.inputs_and_outputs.io_pairs
    assert [pair.host_io.requests_in_batch for pair in pairs] == [[], []]


@pytest.mark.parametrize("prompt_tokens", [7, 8, 15])
@pytest.mark.parametrize("num_cancelled", [0, 1, 2])
def test_batch_in_flight_holds_sequences_that_were_cancelled(
    prompt_tokens: int, num_cancelled: int
) -> None:
    """A prompt of 8 or 15 tokens fills a page in that batch. Without a GPU only the reading is transformers' own."""
    manager = manager_on_cpu(page_size=8, num_blocks=16, max_batch_tokens=64)
    processor = manager._create_batch_processor()
    delivered: list[Any] = []
    manager.output_router.deliver_batch = processor.output_router.deliver_batch = delivered.extend
    states = [
        RequestState(request_id=f"s{i}", initial_tokens=[i] * prompt_tokens, streaming=True)
        for i in range(2)
    ]
    for state in states:
        processor.scheduler.add_waiting_request(state)
    assert processor.prepare_next_batch()
    for state in states[:num_cancelled]:
        processor.scheduler.set_request_cancellation(state.request_id)
    processor.scheduler.clear_cancelled_requests()
    processor.use_async_batching = True  # a batch that is read after the next was prepared
    processor.update_batch()
    assert [output.request_id for output in delivered] == ["s0", "s1"][num_cancelled:]


def test_sequence_that_is_cancelled_as_it_comes_is_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes and is cancelled between the two looks at what came."""
    manager = manager_on_cpu(page_size=8, num_blocks=16, max_batch_tokens=64)
    processor = manager._create_batch_processor()
    state = RequestState(request_id="s", initial_tokens=[1, 2, 3], streaming=True)
    drain, looks = pipeline.drain_queue, count()

    def drain_before_it_comes(queue: Any) -> Any:
        found = drain(queue)
        if next(looks) == 0:
            manager.input_queue.put(state)
            manager.cancel_queue.put("s")
        return found

    monkeypatch.setattr(pipeline, "drain_queue", drain_before_it_comes)
    processor._update_tp_group_state()
    processor._update_tp_group_state()
    processor.scheduler.clear_cancelled_requests()
    assert not processor.scheduler.has_pending_requests()
    assert manager.cancel_queue.empty()


def test_what_comes_while_the_loop_stands_still_is_taken_after_it() -> None:
    manager = manager_on_cpu(page_size=8, num_blocks=16, max_batch_tokens=64)
    processor = manager._create_batch_processor()
    status, lengths = manager.background_thread_status, []
    manager.cancel_queue.put("of nobody")
    status.is_pause_requested = lambda local=False: True  # type: ignore[method-assign]
    status.pause_and_wait = lambda: lengths.append(manager.cancel_queue.qsize())  # type: ignore[method-assign]
    assert not processor._update_tp_group_state()
    assert (lengths, manager.cancel_queue.qsize()) == ([1], 0)
    status.pause_and_wait = lambda: status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)  # type: ignore[method-assign]
    assert processor._update_tp_group_state(), "stopped while it stood still"


@pytest.mark.parametrize("seed", range(20))
def test_carried_over_are_the_tokens_that_transformers_carries_over(seed: int) -> None:
    random = Random(seed)
    io = ContinuousBatchingAsyncIOs.__new__(ContinuousBatchingAsyncIOs)
    io.current_pair, io.max_batch_tokens = seed % 2, 300
    names = [f"s{i}" for i in range(40)]

    def batch() -> SimpleNamespace:
        chosen = random.sample(names, random.choice([0, 1, 5, 40]))
        positions = sorted(random.sample(range(300), len(chosen)))
        found = dict(zip(chosen, positions, strict=True))
        return SimpleNamespace(host_io=SimpleNamespace(req_id_to_new_token_position=found))

    io.io_pairs = [batch(), batch()]
    expected = io.infer_carry_over_ids()
    found = pipeline.carry_over_ids(io)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
