"""What a worker says when its sequences wait for KV cache, and for how long it then says nothing more."""

import time
from collections.abc import Callable

ASK_AGAIN_S = 0.1  # after a refusal


class KvDemand:
    """One question at a time. The engine's thread asks, another answers."""

    def __init__(
        self,
        next_part: Callable[[], int],
        tell: Callable[[int], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make one that has not asked.

        Args:
            next_part: bytes that the KV cache could get next; 0 if it has all.
            tell: asks for so many; `answered` follows.
        """
        self._next_part = next_part
        self._tell = tell
        self._now = now
        self._has_asked = False
        self._not_before_s = float("-inf")

    def short(self) -> None:
        """Sequences wait for blocks; with every step, as long as they do."""
        if self._has_asked or self._now() < self._not_before_s:
            return
        size = self._next_part()
        if size:
            self._has_asked = True
            self._tell(size)

    def answered(self, granted: bool) -> None:
        """What was asked for has come, or does not for now."""
        if not granted:
            self._not_before_s = self._now() + ASK_AGAIN_S
        self._has_asked = False
