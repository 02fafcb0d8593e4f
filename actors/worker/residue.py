"""What a process has of its device beside what it has mapped: read, told apart, and given back with `suspend`."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from actors.memory.driver import DeviceMemory, MemoryDriver
from actors.protocol import MemoryLeft

# How old an answer about the device may be while this process is suspended: a new one takes a process of its own.
_SUSPENDED_FRESH_S = 10.0


@dataclass(frozen=True, slots=True)
class _GraphCost:
    """What the engine's graphs hold while the model sleeps, in bytes."""

    held: int = 0
    torch_reserved: int = 0  # of it, by torch's allocator


class Residue:
    """Of one model's process. The thread that maps and unmaps makes all calls; attributes can be read from any.

    Attributes:
        last_reading: what the device said at the end of the last sleep or settled wake.
        left: what the last sleep left on the device; None while awake.
        bytes: the same without kept layers, awake as well; nothing of a CPU, and nothing while suspended.
        comes_back_bytes: what `bytes` was, while suspended.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        mapped_bytes: Callable[[], int],
        pool_bytes: Callable[[], int],
    ) -> None:
        """`pool_bytes`: of what the engine's graphs compute in, mapped or not."""
        self._driver = driver
        self._mapped_bytes = mapped_bytes
        self._pool_bytes = pool_bytes
        self._graphs = _GraphCost()
        self._other_bytes = 0  # of the last `left`
        self.last_reading = driver.memory()
        self.left: MemoryLeft | None = None
        self.bytes = 0
        self.comes_back_bytes = 0
        self._lately = self.last_reading
        self._lately_s = -math.inf  # when that was

    def trimmed(self) -> DeviceMemory:
        """What the device says without what the last steps' activations left in torch's hands."""
        self._driver.trim()
        return self._driver.memory()

    def lately(self) -> DeviceMemory:
        """What the device said not long ago, while suspended."""
        if time.monotonic() - self._lately_s > _SUSPENDED_FRESH_S:
            self._lately = self._driver.memory()
            self._lately_s = time.monotonic()
        return self._lately

    def read_awake(self) -> None:
        self.last_reading = self._driver.memory()

    def begin_wake(self) -> None:
        self.left = None

    def abandon_wake(self) -> None:
        """After all of it was unmapped."""
        self.left = self._left_of(self.trimmed())

    def read_asleep(self, has_new_graphs: bool = False) -> DeviceMemory:
        """`has_new_graphs`: as `ModelMemory.unmap` has it."""
        self.last_reading = after = self.trimmed()
        left = self._left_of(after)
        if has_new_graphs and (grown := left.other - self._other_bytes) > 0:
            self._graphs = replace(self._graphs, held=self._graphs.held + grown)
            left = self._left_of(after)
        self.left, self._other_bytes = left, left.other
        if self._driver.device.type != "cpu":
            self.bytes = max(0, left.total - left.kept_layers)
        return after

    def set_aside(self) -> None:
        """The device has all of it."""
        self.comes_back_bytes, self.bytes = self.bytes, 0
        self.last_reading = self._lately = self._driver.memory()
        self._lately_s = time.monotonic()
        self.left = MemoryLeft(0, 0, 0, 0, 0)

    def come_back(self) -> None:
        """This process has it again."""
        self.bytes, self.comes_back_bytes = self.comes_back_bytes, 0

    @contextmanager
    def counting_graphs(self) -> Iterator[None]:
        """Count what the body leaves on the device as the engine's graphs, besides those it has.

        Without what their pool grows by, which a sleep unmaps. Nothing else may be mapped or unmapped
        meanwhile, and nothing else may run on the device.
        """
        before, pool_before = self.trimmed(), self._pool_bytes()
        try:
            yield
        finally:  # a body that failed may have thrown away those there were
            after, grown = self.trimmed(), self._pool_bytes() - pool_before
            self._graphs = _GraphCost(
                self._graphs.held + after.held - before.held - grown,
                self._graphs.torch_reserved + after.torch_reserved - before.torch_reserved - grown,
            )

    def _left_of(self, asleep: DeviceMemory) -> MemoryLeft:
        # torch counts the pool as its own, mapped or not.
        reserve = asleep.torch_reserved - self._graphs.torch_reserved - self._pool_bytes()
        mapped = self._mapped_bytes()
        known = self._driver.context_bytes + self._graphs.held + mapped + reserve
        return MemoryLeft(
            context=self._driver.context_bytes,
            graphs=self._graphs.held,
            kept_layers=mapped,
            torch_reserve=reserve,
            other=asleep.held - known,
        )
