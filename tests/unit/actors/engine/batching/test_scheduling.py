"""Turns of prompts and decode steps, in transformers' own generation loop on a CPU."""

from collections.abc import Iterator

import pytest

from actors.engine.batching.scheduling import NAME, TurnsScheduler
from actors.engine.batching.upstream import ContinuousBatchProcessor, RequestState, RequestStatus
from tests.unit.actors.engine.batching.manager_on_cpu import manager_on_cpu

ROWS = 6
PAGE = 8


def processor(scheduler: str, num_blocks: int) -> ContinuousBatchProcessor:
    manager = manager_on_cpu(
        page_size=PAGE,
        num_blocks=num_blocks,
        max_batch_tokens=32,
        max_requests_per_batch=ROWS,
        scheduler_type=scheduler,
    )
    made = manager._create_batch_processor()
    manager.output_router.deliver_batch = lambda outputs: None  # type: ignore[method-assign]
    return made


class Loop:
    """Steps of one processor; the tokens are a rule's instead of a model's."""

    def __init__(self, scheduler: str = NAME, num_blocks: int = 64) -> None:
        self.processor = processor(scheduler, num_blocks)
        self.states: list[RequestState] = []

    def submit(self, prompt_tokens: int, max_new_tokens: int = 4) -> RequestState:
        number = len(self.states)
        state = RequestState(
            request_id=f"s{number}",
            initial_tokens=[number + 1] * prompt_tokens,
            max_new_tokens=max_new_tokens,
            streaming=True,
        )
        self.states.append(state)
        self.processor.scheduler.add_waiting_request(state)
        return state

    def steps(self) -> Iterator[dict[str, int]]:
        """Sequence -> tokens, of each batch until none is left."""
        for _ in range(500):
            decoding = {
                name
                for name, state in self.processor.scheduler.active_requests.items()
                if state.status == RequestStatus.DECODING
            }
            if not self.processor.prepare_next_batch():
                return
            batch = self.processor.inputs_and_outputs.requests_in_batch
            self.decoding = decoding
            yield {future.state.request_id: future.query_length for future in batch}
            self.processor.update_batch()
        raise AssertionError("it does not end")

    def kinds(self) -> list[str]:
        """ "d" for a batch that decodes, "p" for one of prompts, "m" for one of both."""
        found = []
        for batch in self.steps():
            both = {name in self.decoding for name in batch}
            found.append("m" if len(both) == 2 else "d" if both == {True} else "p")
        return found


def test_batches_are_of_prompts_or_of_decoding_sequences_in_turns() -> None:
    loop = Loop()
    seen = ""
    loop.submit(20, 12)
    for batch in loop.steps():
        prompts = set(batch) - loop.decoding
        assert not prompts or not set(batch) & loop.decoding
        seen += "p" if prompts else "d"
        if len(loop.states) < 6:
            loop.submit(12)  # one arrives in every step
    assert seen == "pd" * 4 + "d" * 7
    assert [len(state.generated_tokens) for state in loop.states] == [12] + 5 * [4]


def test_fifo_would_put_them_into_one_batch() -> None:
    loop = Loop("fifo")
    loop.submit(20, 12)
    loop.submit(20)
    assert "m" in loop.kinds()


def test_prompt_longer_than_a_batch_is_computed_between_decode_steps() -> None:
    loop = Loop()
    short = loop.submit(4, 10)
    order = []
    for batch in loop.steps():
        if len(loop.states) == 1:
            long = loop.submit(100)
        order.append({name: batch[name] for name in sorted(batch)})
    assert order[1:9] == [{"s0": 1}, {"s1": 32}] * 3 + [{"s0": 1}, {"s1": 4}]
    assert len(short.generated_tokens) == 10
    assert len(long.generated_tokens) == 4


def test_no_more_run_than_a_decode_step_has_rows_for() -> None:
    loop = Loop()
    for _ in range(4 * ROWS):
        loop.submit(3, 5)
    for _ in loop.steps():
        assert len(loop.processor.scheduler.active_requests) <= ROWS
    assert all(len(state.generated_tokens) == 5 for state in loop.states)


@pytest.mark.parametrize("num_blocks", [6, 9, 14])
def test_a_cache_that_is_too_small_for_all_serves_all(num_blocks: int) -> None:
    """Prompts that find no room leave the step to those that decode."""
    loop = Loop(num_blocks=num_blocks)
    for number in range(12):
        loop.submit(5 + 3 * (number % 8), 10)
    finished: dict[str, int] = {}
    for batch in loop.steps():
        for name in batch:
            finished[name] = finished.get(name, 0) + 1
    assert len(finished) == 12
    assert not loop.processor.scheduler.has_pending_requests()


def test_prompt_without_room_does_not_stop_those_that_decode() -> None:
    loop = Loop(num_blocks=7)
    assert isinstance(loop.processor.scheduler, TurnsScheduler)
    loop.submit(4 * PAGE - 6, 6)
    seen = []
    for batch in loop.steps():
        if not seen:
            loop.submit(4 * PAGE, 2)
        seen.append(sorted(batch))
    assert seen == [["s0"]] * 6 + [["s1"]] * 2
