"""A model brought to its device and taken from it: engine and memory, moved together."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

import torch

from actors.engine.engine import TransformersEngine
from actors.errors import DeviceMemoryShort, Unavailable
from actors.image.layout import ImageKey
from actors.protocol import MemoryChange, WakeReport
from actors.threads import submit_unless_closed
from actors.worker.cleared import ClearedCollection
from actors.worker.growth import CacheGrowth
from actors.worker.messages import KvResized
from actors.worker.model_memory import ModelMemory
from actors.worker.watchdog import Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Residency:
    """Pauses the engine before its memory goes, and resumes it once that is mapped again.

    All of it runs on the control thread, so a sleep and a wake never interleave, except for what says
    that any thread may call it.

    Attributes:
        missed_compiled: `begin_using_compiled` found the model asleep, and wants to be called again behind
            a wake. Any thread may ask.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        memory: ModelMemory,
        restored: Callable[[WakeReport], None],
        control: Executor,
        fail: Callable[[Exception, str], None],
        watchdog: Watchdog,
    ) -> None:
        """Make one; `warm_up` comes first of all. Any thread may call.

        Args:
            engine: not paused.
            restored: told of wakes once their bytes have been checked.
            control: of the one thread.
            fail: told what went wrong, and during what, where nobody waits who could be told.
            watchdog: watches what the control thread waits for.
        """
        self._engine = engine
        self._memory = memory
        self._restored = restored
        self._control = control
        self._fail = fail
        self._watchdog = watchdog
        self._cleared = ClearedCollection(control, self.collect_cleared)
        self._growth = CacheGrowth(control, self._grow_kv, fail)
        self._has_uncaptured = False  # compiled layers that no graph holds yet
        self._runs_compiled = False
        self.missed_compiled = False

    @property
    def grows(self) -> bool:
        """Whether more of the KV cache is about to be mapped. Any thread may ask."""
        return self._growth.running

    def check_awake(self) -> None:
        """Raises Unavailable if the model is asleep."""
        if self._engine.paused:
            raise Unavailable("the model is asleep; wake it first")

    def warm_up(self) -> None:
        """What the engine does before it serves; then asleep, with no layer kept."""
        self._pause()
        with self._watchdog.map:
            self._memory.map()
        with self._watchdog.capture, self._memory.residue.counting_graphs():
            self._engine.warm_up()
        self.sleep(2)  # no layer is worth keeping yet

    def wake(self) -> MemoryChange:
        """Map, begin the copies, and resume right behind them. `begin_settling` comes next.

        Raises:
            DeviceMemoryShort: the device has not that much memory free; the model is asleep as before.
            DeviceMemoryError: the driver refused; likewise.
        """
        with self._watchdog.map:
            change = self._memory.begin_wake()
            try:
                self._engine.prepare_wake()  # what is mapped may be used from now on
            except BaseException:
                self._memory.abandon_wake()
                raise
        self._engine.resume()
        return change

    def begin_settling(self) -> None:
        """Have the control thread check the bytes of a wake, and map the rest of the KV cache, if that is due.

        Any thread may call. If the bytes are wrong, `fail` is told; else `restored`.
        """
        self._control.submit(self.settle)
        if not self._memory.grows_by_grant:
            self._growth.begin()

    def settle(self) -> None:
        """Have a wake that went wrong fail the replica, instead of serving rubbish.

        First tokens wait to be told that the bytes are right. What else ends a wake comes behind that.
        """
        before = self._memory.last_wake
        with self._failures_told("a wake"), self._watchdog.copy:
            self._memory.check()
        report = self._memory.last_wake
        if report is None or report is before:
            return  # none to be settled, or its bytes have not arrived
        self._restored(report)
        self._engine.end_gates()
        with self._failures_told("a wake"), self._watchdog.unmap:
            self._memory.end_wake()

    def resume_process(self) -> bool:
        """Before a wake; whether the process was suspended.

        Raises:
            DeviceMemoryShort: the device has not that much memory free; it is suspended as before.
            DeviceMemoryError: the driver could not; the worker is of no use any more.
        """
        if not self._memory.suspended:
            return False
        with self._watchdog.map:
            self._memory.resume()
        return True

    def suspend_process(self) -> bool:
        """Behind a sleep that has unmapped everything; False if the driver refused.

        Raises:
            DeviceMemoryError: the worker is of no use any more.
        """
        with self._watchdog.unmap:
            return self._memory.suspend()

    def sleep(self, level: int) -> MemoryChange:
        """Unmap what `level` unmaps. Running sequences start over with the next wake.

        Level 1 may keep keys and values of theirs in host memory; who asks for more wants that free.
        """
        if self._memory.suspended:
            return MemoryChange(0, 0, 0, deep=True)
        awake = not self._engine.paused
        if awake:
            self._pause()
        self._engine.drop_kv(saves=level == 1)
        if awake and self._has_uncaptured and not self._memory.wake_bytes:
            self._capture_compiled()
        with self._watchdog.unmap:
            change = self._memory.unmap(level, has_new_graphs=self._engine.has_new_graphs())
        self._cleared.begin()
        return change

    def grow_kv(self) -> KvResized:
        """Map the next part of the KV cache, if awake; what came.

        Raises:
            DeviceMemoryShort: the device has not that much.
        """
        try:
            size = self._memory.next_part_bytes()
            return KvResized(1, size) if self._grow_kv() else KvResized()
        except DeviceMemoryShort:
            raise
        except Exception as exc:
            self._fail(exc, "mapping the KV cache")
            raise

    def give_back_kv(self, size: int) -> KvResized:
        """Unmap so much of the KV cache, as far as no sequence has anything there; what went.

        Steps go on: first the engine no longer uses these parts, then the device does what it had been given.
        """
        if self._engine.paused:
            return KvResized()  # asleep
        try:
            with self._watchdog.pause:
                parts = self._engine.give_up_kv(size)
            with self._watchdog.unmap:
                went = self._memory.unmap_kv(parts)
        except Exception as exc:
            self._fail(exc, "giving back KV cache")
            raise
        return KvResized(len(parts), went)

    def drop_image(self) -> ImageKey | None:
        """Behind a sleep; see HostImage. None, and nothing happens, if the model is awake."""
        if not self._engine.paused:
            return None
        with self._watchdog.unpin:
            return self._memory.host.drop()

    def between_steps(self, work: Callable[[], T]) -> T:
        """What `work` gives while the engine is paused, the bytes of the last wake there and checked.

        The model must be awake (`check_awake`).
        """
        self.settle()  # takes the gates out
        self._pause()
        try:
            return work()
        finally:
            self._engine.resume()

    def begin_trimming(self) -> None:
        """Have the control thread give back what a compilation has left, if asleep. Any thread may call.

        A compilation that ends behind a sleep leaves in torch's hands what it ran its copy of a layer with.
        """
        submit_unless_closed(self._control, self._trim, "layers were compiled")

    def begin_using_compiled(self) -> None:
        """Have the control thread put to use what the engine compiled. Any thread may call."""
        submit_unless_closed(self._control, self._use_compiled, "layers were compiled")

    def collect_cleared(self) -> None:
        """Have the device take back what it has cleared since a sleep."""
        if not self._engine.paused or self._memory.suspended:
            return  # the wake has done it, or does
        with self._failures_told("a sleep"):
            with self._watchdog.collect:
                self._memory.collect_cleared()
            self._reserve_host()

    def close(self) -> None:
        """Begin nothing of its own any more. Any thread may call."""
        self._cleared.cancel()
        self._growth.cancel_retry()

    def _reserve_host(self) -> None:
        """Behind a sleep, for the next one; what else was submitted meanwhile, as a wake, goes in between."""
        if not self._engine.paused or self._memory.suspended:
            return
        with self._failures_told("a sleep"):
            if self._engine.reserve_host():
                submit_unless_closed(self._control, self._reserve_host, "host memory was pinned")

    @contextmanager
    def _failures_told(self, what: str) -> Iterator[None]:
        """Around what nobody waits for: the replica must not serve on, nor hang. `check_health` tells, too."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001
            self._fail(exc, what)

    def _pause(self) -> None:
        with self._watchdog.pause:
            self._engine.pause()

    def _trim(self) -> None:
        if not self._engine.paused or self._memory.suspended:
            return  # the next sleep does it
        with self._failures_told("a compilation"), self._watchdog.unmap:
            self._memory.trim()

    def _use_compiled(self) -> None:
        """Now; or, if the model sleeps, behind its next wake: a sleeper takes no memory."""
        if self._runs_compiled:
            return  # a sleep has seen to it meanwhile
        asleep = self._engine.paused
        if asleep:
            self._has_uncaptured = self.missed_compiled = True
            return
        try:
            with self._failures_told("capturing the compiled layers"):
                self.settle()
                self._pause()
                self._engine.drop_kv()
                self._capture_compiled()
        finally:
            if self._engine.paused:
                with self._watchdog.map:
                    self._engine.prepare_wake()
                self._engine.end_gates()
                self._engine.resume()

    def _capture_compiled(self) -> None:
        """Now; or, where memory is missing, at the next sleep."""
        self.missed_compiled = False
        try:
            with self._watchdog.map:
                self._memory.map()
            with self._watchdog.capture, self._memory.residue.counting_graphs():
                self._engine.use_compiled()
        except (DeviceMemoryShort, torch.OutOfMemoryError) as exc:
            self._has_uncaptured = True
            logger.info("graphs are captured at the next sleep: %s", exc)
            return
        self._has_uncaptured, self._runs_compiled = False, True
        logger.info("the decoder layers run compiled from now on")

    def _grow_kv(self) -> bool:
        if self._engine.paused:
            return False
        with self._watchdog.map:
            grown = self._memory.map_more()
        if not grown:
            return False
        self._engine.extend_kv()
        return True
