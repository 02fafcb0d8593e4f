"""The generation loop: batches one after the other, or prepared while the one before computes.

`PipelinedManager` replaces the loop of transformers 5.23, whose asynchronous batching always keeps a
batch in flight: a first token waits until the batch behind it was prepared and launched, the last
results stay unread until the next request, and a pause finds tokens that nobody has seen.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.engine.batching.upstream import (
    BackgroundThreadStatus,
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    FutureRequestState,
    RequestState,
    RequestStatus,
    Scheduler,
    drain_queue,
)
from actors.errors import DeviceMemoryShort
from actors.memory.arena import RETRY_SHORT_AFTER_S

logger = logging.getLogger(__name__)

# While so many sequences run, first tokens are read at once. With more of them every other batch brings
# first tokens, and the overlap is worth more to everybody.
_FEW = 16
_NEW_REQUESTS_TIMEOUT_S = (
    0.1  # as in transformers: what arrives sets the event, this is its backstop
)


class PipelinedManager(ContinuousBatchingManager):
    """Launches a batch, then reads the results of the one before.

    The newest batch is read at once where somebody waits for it: if it brings the first tokens of a
    few sequences, if the next batch depends on its tokens, if all sequences end with it or there is
    nothing left to compute, and before a pause. Without asynchronous batching every batch is.

    Attributes:
        watch: entered for as long as a batch is prepared, launched or read; not while it waits for
            requests, or stands still.
        died: told of the error that ends the loop, before the sequences in flight hear of it.
        complete_batch: called between preparing a batch and launching it.
        start_over: called when the memory for a batch was missing; has all sequences begin again
            from their tokens so far.
        needs_results: whether the batch after the one launched last depends on what that one gives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.background_thread_status = _StatusThatReads(self._read_newest, self._unwatched)
        self._unread = False  # the newest batch
        self._is_short = False  # of memory: the last launch failed
        self.watch: AbstractContextManager[None] = nullcontext()
        self.died: Callable[[Exception], None] = _ignore
        self.complete_batch: Callable[[], None] = _nothing
        self.start_over: Callable[[], None] = _nothing
        self.needs_results: Callable[[], bool] = bool

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        scheduler, io = processor.scheduler, processor.inputs_and_outputs
        scheduler.clear_cancelled_requests = partial(  # type: ignore[method-assign]
            end_cancelled, scheduler, scheduler.clear_cancelled_requests
        )
        if isinstance(io, ContinuousBatchingAsyncIOs):
            io.infer_carry_over_ids = partial(carry_over_ids, io)  # type: ignore[method-assign]
        processor._update_tp_group_state = partial(self._pause_and_take, processor)  # type: ignore[method-assign]
        return processor

    def _pause_and_take(self, processor: ContinuousBatchProcessor) -> bool:
        """Stand still for as long as somebody wants that, then take what came; whether to stop at once.

        transformers 5.23 takes it before the pause: sequences that nobody wants any more would count as
        waiting for as long as the model sleeps. It asks for a stop before the pause and not after it, when
        memory may be gone. And of a sequence that is cancelled as it comes, it may take the cancellation
        alone, and compute the sequence to its end.
        """
        status = self.background_thread_status
        status.update_with_tp_status(status.local_status)
        if not self._must_stop() and status.is_pause_requested():
            if (stream := processor.inputs_and_outputs.compute_stream) is not None:
                stream.synchronize()
            status.pause_and_wait()
        if self._must_stop():
            return True
        cancelled = drain_queue(
            self.cancel_queue
        )  # first, or it may be of a sequence still in the other
        for state in drain_queue(self.input_queue):
            processor.scheduler.add_waiting_request(state)
        for sequence_id in cancelled:
            processor.scheduler.set_request_cancellation(sequence_id)
        return False

    def _must_stop(self) -> bool:
        status = self.background_thread_status.local_status
        return bool(status == BackgroundThreadStatus.HARD_STOP)

    def _handle_critical_error(
        self, error: Exception, batch_processor: ContinuousBatchProcessor | None
    ) -> None:
        self.died(error)
        super()._handle_critical_error(error, batch_processor)

    def _generation_loop_body(
        self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool
    ) -> bool:
        """Compute a batch or wait for requests; whether to go on."""
        if bootstrapping:
            return False  # transformers' own loop launches a first batch ahead
        with self.watch:
            if batch_processor.prepare_next_batch():
                self._compute_batch(batch_processor)
                return True
            if self._unread:
                self._read_newest()
                return True
        flushing = self.background_thread_status.tp_status == BackgroundThreadStatus.FLUSH_AND_STOP
        if self._must_stop() or (flushing and not batch_processor.has_pending_requests()):
            # What follows this loop reads the newest batch once more.
            for io in _host_tensors(batch_processor):
                io.requests_in_batch = []
            return False
        self._wake_up_loop.wait(_NEW_REQUESTS_TIMEOUT_S)
        self._wake_up_loop.clear()
        return True

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """For a wait within the loop's body that may take for ever."""
        self.watch.__exit__(None, None, None)
        try:
            yield
        finally:
            self.watch.__enter__()

    def _compute_batch(self, processor: ContinuousBatchProcessor) -> None:
        """Launch the batch that was prepared, then read the one before."""
        self.complete_batch()
        try:
            self._generation_step()
        except torch.OutOfMemoryError as exc:
            self._survive(processor, exc)
            return
        self._is_short = False
        self.current_batch += 1
        before, self._unread = self._unread, True
        if before:
            processor.update_batch()  # a launch leaves the other pair of tensors current
        if self._is_awaited(processor):
            self._read_newest()

    def _survive(self, processor: ContinuousBatchProcessor, reason: torch.OutOfMemoryError) -> None:
        """A batch found no memory: somebody else has it. Try once more, then refuse its sequences."""
        self._read_newest()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._is_short:
            scheduler = processor.scheduler
            for request in prepared_on_host(processor.inputs_and_outputs).requests_in_batch:
                state = request.state
                if scheduler.active_requests.get(state.request_id) is state:
                    refusal = DeviceMemoryShort(
                        f"no memory for a step on {self.model.device}", RETRY_SHORT_AFTER_S
                    )
                    processor.output_router.fail_and_deliver(state, refusal)
                    scheduler.finish_request(state.request_id)
        logger.warning("%s: %s", "refused" if self._is_short else "starting over", reason)
        self._is_short = not self._is_short
        self.start_over()

    def _is_awaited(self, processor: ContinuousBatchProcessor) -> bool:
        io = processor.inputs_and_outputs
        if not isinstance(io, ContinuousBatchingAsyncIOs) or self.needs_results():
            return True
        batch = io.io_pairs[1 - io.current_pair].host_io.requests_in_batch
        if _is_last(processor.scheduler, batch):
            return True  # another one would be computed for nobody, and a sleep would wait for it
        return len(processor.scheduler.active_requests) <= _FEW and any(
            request.has_new_token and not request.state.generated_tokens for request in batch
        )

    def _read_newest(self) -> None:
        if not self._unread:
            return
        self._unread = False
        processor = self.batch_processor
        assert processor is not None, "a batch was launched"
        io = processor.inputs_and_outputs
        if isinstance(io, ContinuousBatchingAsyncIOs):
            io.swap_io_pairs()
            processor.update_batch()
            io.swap_io_pairs()
        else:
            processor.update_batch()


class _StatusThatReads(BackgroundThreadStatus):
    """Has the newest results read before a pause."""

    def __init__(
        self, read: Callable[[], None], standing_still: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self._read = read
        self._standing_still = standing_still

    def pause_and_wait(self) -> None:
        self._read()
        with self._standing_still():
            super().pause_and_wait()


def _is_last(scheduler: Scheduler, batch: Sequence[FutureRequestState]) -> bool:
    """Whether every sequence that there is reaches its `max_new_tokens` with this batch."""
    if scheduler.waiting_requests:
        return False
    active = scheduler.active_requests
    running = [r for r in batch if active.get(r.state.request_id) is r.state]
    return len(running) == len(active) and all(
        r.has_new_token and _has_one_left(r.state) for r in running
    )


def _has_one_left(state: RequestState) -> bool:
    limit = state.max_new_tokens
    return limit is not None and state.generated_len() + 1 >= limit


def end_cancelled(
    scheduler: Scheduler, clear: Callable[[], list[RequestState]]
) -> list[RequestState]:
    """What `clear` took out of the scheduler, marked as over, and its room given to who waits for some.

    The batch in flight may still hold it. transformers 5.23 passes by what is finished when it reads a
    batch, but would look for the blocks of what was cancelled, and one that had just filled a page ended
    the loop for everybody with a KeyError. And when the cache is full, nobody new is let in until a
    sequence finishes by itself, for ever if the last one was cancelled.
    """
    cancelled = clear()
    if cancelled:
        scheduler.block_new_requests = False
    for state in cancelled:
        state._status = RequestStatus.FINISHED  # past the setter: this is no end of a request
    return cancelled


def carry_over_ids(io: ContinuousBatchingAsyncIOs) -> Tensor:
    """Which token of the batch before each token of the prepared batch is, -1 for none.

    Returns:
        int32 [max_batch_tokens], as transformers' own method, which makes it of as many Python integers.
    """
    positions = io.io_pairs[io.current_pair].host_io.req_id_to_new_token_position
    before = io.io_pairs[1 - io.current_pair].host_io.req_id_to_new_token_position
    carried = {positions[name]: i for i, name in enumerate(before) if name in positions}
    ids = torch.full((io.max_batch_tokens,), -1, dtype=torch.int32)
    ids[list(carried)] = torch.tensor(list(carried.values()), dtype=torch.int32)
    return ids


def _ignore(error: Exception) -> None:
    """Somebody logs it: transformers."""


def _nothing() -> None:
    """The batch is complete as it is."""


def prepared_on_host(
    io: ContinuousBatchingIOs | ContinuousBatchingAsyncIOs,
) -> ContinuousBatchingIOs:
    """The tensors that the host has prepared the next batch in; asynchronous batching has pairs."""
    return (
        io.io_pairs[io.current_pair].host_io if isinstance(io, ContinuousBatchingAsyncIOs) else io
    )


def _host_tensors(processor: ContinuousBatchProcessor) -> list[ContinuousBatchingIOs]:
    io = processor.inputs_and_outputs
    if isinstance(io, ContinuousBatchingAsyncIOs):
        return [pair.host_io for pair in io.io_pairs]
    return [io]
