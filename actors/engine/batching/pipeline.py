"""The order in which steps are launched and read: one after the other, or the next before the last is read."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.scheduling import Scheduler, Step
from actors.engine.batching.sequence import Sink
from actors.engine.outputs import EngineOutput
from actors.errors import DeviceMemoryShort
from actors.memory.arena import RETRY_SHORT_AFTER_S

logger = logging.getLogger(__name__)

# While so many sequences run, first tokens are read at once. With more of them every other step brings
# first tokens, and the overlap is worth more to everybody.
_FEW = 16


class Launcher(Protocol):
    """What `Runner` does for a pipeline."""

    def launch(self, step: Step) -> None: ...

    def read(self) -> tuple[Step, list[int]]: ...

    def spare_s(self) -> float: ...


class Pipeline:
    """Launches a step, then reads the results of the one before.

    The newest step is read at once where somebody waits for it: if it brings the first tokens of a few
    sequences, if the next one depends on its tokens, if there is nothing else to compute. Without overlap every
    step is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KvCache,
        runner: Launcher,
        sink: Sink,
        *,
        overlaps: bool,
        needs_results: Callable[[], bool],
        release_memory: Callable[[], None],
    ) -> None:
        """Make an idle one.

        Args:
            sink: told what each step gave, once.
            overlaps: whether a step is prepared while the one before computes.
            needs_results: whether the step after the one launched last depends on what that one gives.
            release_memory: called when the memory for a step was missing.
        """
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._sink = sink
        self._overlaps = overlaps
        self._needs_results = needs_results
        self._release_memory = release_memory
        self._unread = False  # the newest step
        # Sequences whose step found no memory, and how many tokens each had then.
        self._short: dict[str, int] = {}

    def wait(self) -> None:
        """Return when the next step is to be launched, before the one under way ends."""
        if self._overlaps and self._unread:
            time.sleep(self._runner.spare_s())

    def advance(self) -> bool:
        """Launch the next step, or read the last; False if there is neither."""
        step = self._scheduler.next_step()
        if step is None:
            was_unread = self._unread
            self.read_newest()
            return was_unread
        try:
            self._runner.launch(step)
        except torch.OutOfMemoryError as exc:
            self._survive(step, exc)
            return True
        before, self._unread = self._unread, True
        if before:
            self._read()
        if not self._overlaps or self._needs_results() or self._brings_first_tokens(step):
            self.read_newest()
        return True

    def read_newest(self) -> None:
        """Leave nothing unread."""
        if self._unread:
            self._unread = False
            self._read()

    def _brings_first_tokens(self, step: Step) -> bool:
        return len(self._scheduler.running) <= _FEW and any(
            row.gives_token and row.is_wanted and row.sequence.is_new for row in step.rows
        )

    def _read(self) -> None:
        step, tokens = self._runner.read()
        outputs: list[EngineOutput] = []
        for row, token in zip(step.rows, tokens, strict=True):
            sequence = row.sequence
            if not row.is_wanted:
                continue
            if row.gives_token:
                outputs.append(sequence.take(token))
            self._cache.remember(sequence)
            if row.gives_token and outputs[-1].finish is not None:
                self._scheduler.remove(sequence.name)
        if outputs:
            self._sink(outputs)

    def _survive(self, step: Step, reason: torch.OutOfMemoryError) -> None:
        """A step found no memory: somebody else has it. Try once more, then refuse its sequences.

        Those, that is, that have got no token since: what begins again may find memory for the first parts of a
        prompt each time, and never for a later one.
        """
        self.read_newest()
        self._release_memory()
        had = {row.sequence.name: len(row.sequence.tokens) for row in step.rows if row.is_wanted}
        refused = [name for name, tokens in had.items() if self._short.get(name) == tokens]
        for name in refused:
            self._scheduler.remove(name)
        if refused:
            error = DeviceMemoryShort("no memory for a step on the device", RETRY_SHORT_AFTER_S)
            self._sink([EngineOutput(name, (), None, error=error) for name in refused])
        logger.warning("%s: %s", "refused" if refused else "starting over", reason)
        known = {*self._scheduler.running, *self._scheduler.waiting}
        self._short = {name: n for name, n in (self._short | had).items() if name in known}
        self._scheduler.start_over()
