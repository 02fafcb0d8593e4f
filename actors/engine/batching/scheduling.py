"""Which sequences share a batch: prompts and decode steps take turns where decode steps are replayed.

A batch of both runs without a graph, and the host has to list all that its sequences have in the KV cache.
On an H200, a 7B model and 40 prompts of 128 tokens a second, nearly every step was such a batch and took
38 ms, of which a decode step would have needed 10.
"""

from typing import Any

from actors.engine.batching.upstream import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
    RequestState,
    RequestStatus,
)

NAME = "turns"


class TurnsScheduler(FIFOScheduler):
    """Prompts in one batch, sequences that decode in the next, as long as there are both.

    So whoever decodes waits for one batch of prompts at most between two tokens, and prompts for one
    decode step. Under memory pressure those that decode come first, as with FIFOScheduler.
    """

    def reset(self) -> None:
        super().reset()
        self._had_prompts = False  # the batch before

    def _process_candidates(
        self, candidates: list[RequestState], *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        decoding = [s for s in candidates if s.status == RequestStatus.DECODING]
        prompts = [s for s in candidates if s.status != RequestStatus.DECODING]
        turn = self._turn(decoding, prompts) or candidates
        found: tuple[Any, ...] = super()._process_candidates(turn, *args, **kwargs)
        if not found[0] and turn is not candidates:  # there is no room for it
            found = super()._process_candidates(candidates, *args, **kwargs)
        scheduled = {future.state.request_id for future in found[0]}
        self._had_prompts = any(state.request_id in scheduled for state in prompts)
        return found

    def _turn(
        self, decoding: list[RequestState], prompts: list[RequestState]
    ) -> list[RequestState] | None:
        """Whose turn it is; None: everybody's."""
        if not decoding or not prompts or not self._try_to_meet_safety_margin():
            return None
        # More than a decode step has rows for would take each other's.
        rows = max(0, self.max_requests_per_batch - len(decoding))
        return decoding if self._had_prompts or not rows else prompts[:rows]


SCHEDULER_MAPPING[NAME] = TurnsScheduler
