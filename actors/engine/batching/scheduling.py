"""Which sequences share a step: all that decode, and as much of the prompts as the others can wait for."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.sequence import LoopSequence

# Parts of prompts in one step; the grid of the kernel that attends to them has room for so many.
MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in a step.

    Attributes:
        start: position of the first of its new tokens.
        count: of these.
        gives_token: whether the step gives its next token.
        carried: the row of the step before that gives the one new token; -1 where the host knows it.
        epoch: of the sequence.
    """

    sequence: LoopSequence
    start: int
    count: int
    gives_token: bool
    carried: int
    epoch: int

    @property
    def end(self) -> int:
        """Tokens of the sequence, these included."""
        return self.start + self.count

    @property
    def is_wanted(self) -> bool:
        """Whether the sequence still waits for what this gives."""
        return self.epoch == self.sequence.epoch


@dataclass(frozen=True, slots=True)
class Step:
    """What is computed at once: rows of one new token first, then the others."""

    rows: tuple[Row, ...]
    num_decoding: int  # rows of one new token

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def has_prompts(self) -> bool:
        return self.num_decoding < len(self.rows)


class Scheduler:
    """The sequences that wait and those that run, first come first served. Lives on the loop's thread.

    Attributes:
        waiting: sequences without blocks, by name.
        running: sequences with blocks, by name, in the order in which they got them.
        is_full: one of them had to give up its blocks: nobody new is let in before somebody ends.
        is_short: when the last step was chosen, somebody waited for blocks.
    """

    def __init__(
        self, cache: KvCache, max_tokens: int, max_sequences: int, costs: StepCosts | None
    ) -> None:
        """Make an empty one.

        Args:
            max_tokens: of a step.
            max_sequences: that run.
            costs: how long steps take, to keep those that decode from waiting; None lets prompts have all.
        """
        self.waiting: dict[str, LoopSequence] = {}
        self.running: dict[str, LoopSequence] = {}
        self.is_full = False
        self.is_short = False
        self._put_off: set[str] = set()  # of those that wait: they gave up their blocks
        self._cache = cache
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._costs = costs

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def add(self, sequence: LoopSequence) -> None:
        self.waiting[sequence.name] = sequence

    def remove(self, name: str) -> None:
        """Forget a sequence that ends or was cancelled, if there is one; what it still gets is not wanted."""
        self.waiting.pop(name, None)
        if name in self._put_off:  # nobody's room is kept for it any more
            self._put_off.remove(name)
            self.is_full = self.is_full and bool(self._put_off)
        sequence = self.running.pop(name, None)
        if sequence is not None:
            self._cache.release(sequence)
            sequence.epoch += 1
            self.is_full = False
        self._cache.saved.forget(name)

    def save(self) -> None:
        """Before a `start_over`: have the cache keep what those that run have, if that is cheaper."""
        self._cache.save(self.running.values(), self._again_s)

    def start_over(self) -> None:
        """All that run wait again, in front; nobody has blocks, and nothing is remembered."""
        again = self.running
        for sequence in again.values():
            self._cache.release(sequence)
            sequence.start_over()
        self.waiting = again | self.waiting
        self.running = {}
        self._cache.reset()
        self._put_off.clear()
        self.is_full = False

    def next_step(self) -> Step | None:
        """The next step, taken for launched; None if there is nothing to compute before something is read."""
        self.is_short = False
        decoding = [self._row(sequence, 1) for sequence in self._with_room()]
        budget = self._max_tokens - len(decoding)
        if decoding and self._costs is not None:
            started = [s for s in self.running.values() if s.left > 1]
            context = started[0].computed if started else 0
            num_new = min(len(self.waiting), self._max_sequences - len(self.running))
            tokens = self._costs.prompt_tokens(len(decoding), context, len(started) + num_new)
            budget = min(budget, tokens)
        prompts = self._prompts(len(decoding), budget)
        # The rest of a prompt may be one token.
        rows = decoding + [row for row in prompts if row.count == 1]
        num_decoding = len(rows)
        rows += [row for row in prompts if row.count > 1]
        for number, row in enumerate(rows):
            sequence = row.sequence
            sequence.computed = row.end
            sequence.pending += row.gives_token
            sequence.row = number
        return Step(tuple(rows), num_decoding) if rows else None

    def _again_s(self, counts: Sequence[int]) -> float:
        """Seconds to compute so many tokens of each of some sequences, behind a wake.

        What fits in its first step takes none: that computes while the weights arrive. Where steps are not
        measured computing is slow.
        """
        total = sum(counts)
        behind = total - self._max_tokens
        if behind <= 0:
            return 0.0
        each = [self._costs.predict(0, count, 0) if self._costs else None for count in counts]
        return sum(math.inf if s is None else s for s in each) * behind / total

    def _with_room(self) -> list[LoopSequence]:
        """Those that decode, each with room for a token more; the newest sequences give up theirs for that."""
        found: list[LoopSequence] = []
        for sequence in list(self.running.values()):
            if sequence.left != 1 or sequence.name not in self.running:
                continue
            while not self._cache.extend(sequence, sequence.length):
                newest = next(reversed(self.running.values()))
                self._give_up(newest)
                if newest is sequence:
                    break
            else:
                found.append(sequence)
        return found

    def _give_up(self, sequence: LoopSequence) -> None:
        """Have a sequence wait in front of all others, without blocks."""
        del self.running[sequence.name]
        self._cache.release(sequence)
        sequence.start_over()
        self.waiting = {sequence.name: sequence, **self.waiting}
        self._put_off.add(sequence.name)
        self.is_full = self.is_short = True

    def _prompts(self, num_decoding: int, budget: int) -> list[Row]:
        rows: list[Row] = []
        for sequence in self.running.values():
            if sequence.left > 1 and budget > 0 and len(rows) < MAX_PROMPTS:
                rows.append(self._row(sequence, min(sequence.left, budget)))
                budget -= rows[-1].count
        while budget > 0 and len(rows) < MAX_PROMPTS:
            admitted = self._admitted()
            if admitted is None:
                break
            rows.append(self._row(admitted, min(admitted.left, budget)))
            budget -= rows[-1].count
        return rows

    def _admitted(self) -> LoopSequence | None:
        """The first that waits, now with blocks for all its tokens; None if it has to wait."""
        if not self.waiting or len(self.running) >= self._max_sequences:
            return None
        if self.is_full and self.running:
            self.is_short = True
            return None
        name, sequence = next(iter(self.waiting.items()))
        # Those that run want another block each before long, and would have to take it from the newest.
        if not self._cache.admit(sequence, spare=len(self.running)):
            # All of it is for a lone one. What is being read back may still end those that hold it.
            assert self.running, "the cache has no room for one sequence"
            self.is_short = True
            return None
        if sequence.started_s is None or sequence.is_new:
            sequence.started_s = time.perf_counter()
        del self.waiting[name]
        self.running[name] = sequence
        self._put_off.discard(name)
        self.is_full = False
        return sequence

    def _row(self, sequence: LoopSequence, count: int) -> Row:
        start = sequence.computed
        is_known = start < len(sequence.tokens)
        return Row(
            sequence,
            start,
            count,
            start + count == sequence.length,
            -1 if is_known else sequence.row,
            sequence.epoch,
        )
