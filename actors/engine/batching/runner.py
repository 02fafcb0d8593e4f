"""Steps on the device: inputs, the model's forward, sampling, and the way of the tokens back."""

# N tokens of a step, R sequences in it (rows), V vocabulary

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.inputs import StepInputs, StepSize, read_by_kernel
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.launch_timer import LaunchTimer
from actors.engine.batching.scheduling import Step
from actors.engine.model.paged_step import PagedStep, computing
from actors.engine.sampling.sampler import BatchSampler


@dataclass(slots=True)
class _Launched:
    step: Step
    size: StepSize
    tokens: Tensor  # of each row, on the host, once `done`
    begun: torch.cuda.Event | None  # None: how long it takes is no cost of a step
    done: torch.cuda.Event | None


class Runner:
    """Launches steps, of which two may be in flight, and reads what they gave, in their order.

    Everything on the device is in the order of one stream. Launching waits for nothing there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        inputs: StepInputs,
        sampler: BatchSampler,
        max_rows: int,
        *,
        in_pages: bool,
        costs: StepCosts | None,
        sizes: Sequence[int] = (),
    ) -> None:
        """Make an idle one.

        Args:
            max_rows: sequences of a step.
            in_pages: whether attention reads pages.
            costs: told how long steps took.
            sizes: tokens that steps with prompts are padded to, ascending; without any, no step is padded.
        """
        self.model = model
        self.cache = cache
        self.inputs = inputs
        self._sampler = sampler
        self._max_rows = max_rows
        self._in_pages = in_pages
        self._costs = costs
        self._sizes = sizes
        self.padded_sizes = self._all_sizes()
        device = model.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._newest_R = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._found = [  # by the steps that may be in flight
            torch.zeros(max_rows, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self._launched: deque[_Launched] = deque()
        self._timer = LaunchTimer()
        self._count = 0
        self._keeps_logits = bool(model._supports_logits_to_keep())  # type: ignore[operator]  # a method

    def launch(self, step: Step) -> None:
        """Enqueue a step; its tokens are there for `read`.

        Raises:
            torch.OutOfMemoryError: there was no memory for it; it was not launched.
        """
        assert len(self._launched) < 2, "the step before the last must have been read"
        slot = self._count % 2
        size = self._size(step)
        self._sampler.prepare(
            [
                (row.sequence.sampling, row.end - len(row.sequence.sampling.prompt_ids))
                if row.gives_token
                else None
                for row in step.rows
            ],
            self.inputs.params_of(slot),
        )
        self.inputs.fill(step, slot, size)
        try:
            with self._on_stream(), torch.no_grad():
                begun = self._event()
                self._upload(slot)
                logits_RV = self._logits(step, size)
                tokens_R = self._newest_R[: len(step.rows)]
                tokens_R.copy_(self._sampled(logits_RV[: len(step.rows)], size))
                found_R = self._found[slot][: len(step.rows)]
                found_R.copy_(tokens_R, non_blocking=True)
                done = self._event()
        except torch.OutOfMemoryError:
            self.synchronize()  # what was enqueued of it still reads what the next one writes
            raise
        self._count += 1
        self._launched.append(_Launched(step, size, found_R, begun, done))
        self._timer.launched(size, time.monotonic())

    def read(self) -> tuple[Step, list[int]]:
        """The oldest step that was not read, and a token for each of its rows; waits for the device."""
        launched = self._launched.popleft()
        step, seconds = launched.step, None
        if launched.done is not None:
            launched.done.synchronize()
            if launched.begun is not None:
                seconds = launched.begun.elapsed_time(launched.done) / 1000
        if self._costs is not None and seconds is not None:
            prompts = [(row.count, row.start) for row in step.rows[step.num_decoding :]]
            self._costs.note(seconds, step.num_decoding, prompts)
        is_padded = launched.size in self.padded_sizes  # only these come again
        self._timer.done(seconds if is_padded else None, time.monotonic())
        return step, launched.tokens.tolist()

    def spare_s(self) -> float:
        """Seconds for which the next launch may wait without the device waiting for it."""
        return self._timer.spare_s(time.monotonic())

    def synchronize(self) -> None:
        """Return when the device has done all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()

    # --- sizes ---

    def _size(self, step: Step) -> StepSize:
        """Padded where a step of that size is, whatever computes it: other shapes would be rounded in other ways."""
        if self._sizes and not step.has_prompts:
            rows = len(step.rows)
            return self._decode_size(next(n for n in self._decode_rows() if n >= rows))
        sizes = (self._prompt_size(n) for n in self._sizes if n >= step.tokens)
        exact = StepSize(step.tokens, len(step.rows), step.has_prompts)
        return next((size for size in sizes if size.rows >= len(step.rows)), exact)

    def _decode_rows(self) -> list[int]:
        """Rows that steps without prompts are padded to."""
        largest = self._max_rows
        return [*(1 << i for i in range(largest.bit_length()) if 1 << i < largest), largest]

    @staticmethod
    def _decode_size(rows: int) -> StepSize:
        return StepSize(rows, rows, has_prompts=False)

    def _prompt_size(self, tokens: int) -> StepSize:
        # Logits are computed for all of its rows, and prompts get as many tokens as there are sequences that decode.
        rows = tokens if tokens == self._sizes[-1] else tokens // 2
        return StepSize(tokens, min(rows, self._max_rows), has_prompts=True)

    def _all_sizes(self) -> list[StepSize]:
        """That steps are padded to; the largest of each kind first: the others fit into what it leaves."""
        if not self._sizes:
            return []
        decoding = [self._decode_size(rows) for rows in reversed(self._decode_rows())]
        return decoding + [self._prompt_size(tokens) for tokens in reversed(self._sizes)]

    # --- steps ---

    def _upload(self, slot: int, *, by_kernel: bool = False) -> None:
        for block, saved in self.cache.returning:
            if by_kernel:
                read_by_kernel(saved.view(torch.int64), block.view(torch.int64))
            else:
                block.copy_(saved, non_blocking=True)
        self.cache.returning.clear()
        self.inputs.upload(slot, by_kernel=by_kernel)

    def _logits(self, step: Step, size: StepSize) -> Tensor:
        """Of the last token of each row [at least R, V]."""
        self.inputs.settle(size, self._newest_R)
        return self._forward(self._view(step, size), size)

    def _view(self, step: Step, size: StepSize) -> PagedStep:
        """The step for attention, of its own size."""
        # Without anything in the cache, the keys and values are those of the step, and need not be read back.
        is_fresh = not step.num_decoding and not any(row.start for row in step.rows)
        if self._in_pages and (size in self.padded_sizes or not is_fresh):
            return self._pages(size)
        gathered = self.inputs.fresh(step, size) if self._in_pages else self.inputs.gathered(step)
        return PagedStep(self.cache.layers, self.inputs.slots(size), None, gathered)

    def _pages(self, size: StepSize) -> PagedStep:
        return PagedStep(self.cache.layers, self.inputs.slots(size), self.inputs.pages(size))

    def _forward(self, view: PagedStep, size: StepSize) -> Tensor:
        last_R = self.inputs.last(size).long()
        keep = {"logits_to_keep": last_R} if self._keeps_logits else {}
        with computing(view):
            logits: Tensor = self.model(
                input_ids=self.inputs.ids[None, : size.tokens],
                position_ids=self.inputs.positions[None, : size.tokens],
                use_cache=False,
                **keep,
            ).logits[0]
        return logits if self._keeps_logits else logits[last_R]

    def _sampled(self, logits_RV: Tensor, size: StepSize) -> Tensor:
        R = len(logits_RV)
        ids_R = self.inputs.ids[self.inputs.last(size)[:R].long()]
        return self._sampler.choose(ids_R, logits_RV, self.inputs.params[:, :R]).int()

    def _on_stream(self) -> AbstractContextManager[None]:
        if self._stream is None:
            return nullcontext()
        # What others enqueued on the default stream comes first, as the bytes of a new part of the cache.
        self._stream.wait_stream(torch.cuda.current_stream(self.model.device))
        context: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return context

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
