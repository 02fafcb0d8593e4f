"""Sleep/wake state machine of one replica. No torch, no Ray: effects come in from outside.

    AWAKE ──sleep──► DRAINING ──drained, unmapped──► ASLEEP ──request or wake_up──► WAKING ──► AWAKE
      ▲                 │                              ▲
      └── drain timeout,┘                              │ another worker is ready; AWAKE follows if it was,
          or nobody wants its room any more            │ and a sleep at level 2 if it was to be in one
     `restart`, or an effect that raises ──► RESTARTING ──► FAILED, for good, if no worker lives

All methods run on one event loop. Only `_enter` writes the state. A transition is entered before its
first await, runs as a task of its own (callers wait on a shield, so one that leaves cancels only its
wait), and ends in a settled state that releases every waiter.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from actors.errors import (
    DrainTimeout,
    FrozenTooLong,
    HeldAsleep,
    ReplicaFailed,
    Unavailable,
    WakeTimeout,
)
from actors.observer import Observer, SleepCause, WakeCause, WakeResult
from actors.protocol import LastSleep, MemoryChange, ReplicaState, SleepCommand, SleepMode
from actors.replica.effects import Effects, Untouched
from actors.replica.idle import IdleClock, IdleTimeout, TimeoutSource
from actors.replica.schedule import Schedule
from actors.replica.sleep_config import SleepConfig
from actors.waits import one_of

logger = logging.getLogger(__name__)

_HELD_RETRY_AFTER_S = 30.0  # nobody knows when an operator ends a hold; this keeps clients polite
_FROZEN_RETRY_S = 1.0  # between two wakes for frozen requests that were refused
# Where they go on, or have ended.
_NOTHING_FROZEN = (ReplicaState.AWAKE, ReplicaState.RESTARTING, ReplicaState.FAILED)


class Lifecycle:
    """Decides, alone, when this replica sleeps and wakes. Starts asleep.

    `on_change` is called after each change of the state; it must not take long.
    """

    def __init__(
        self,
        effects: Effects,
        config: SleepConfig,
        now: Callable[[], float],
        name: str = "replica",
        on_change: Callable[[], None] = lambda: None,
        held: bool = False,
        observer: Observer | None = None,
        is_pinned: bool = False,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Make one, on its event loop.

        Args:
            now: seconds, of a clock that does not go backwards.
            is_pinned: it never sleeps by being idle, whatever requests ask for.
            wall: the time of day, for `config.schedule`.
        """
        self.schedule = Schedule(config.schedule, wall)
        self.idle = IdleClock(now, config.idle_rules(is_pinned), self.schedule.wanted)
        self.reason = "starting"
        self.level = 0  # how deep it sleeps; 0 while it does not
        self.deep = False  # it sleeps, and its worker has nothing of the device
        self.held = held
        self.waiting_for_wake = 0
        self.sleeps = 0
        self.wakes = 0
        self.last_sleep_s: float | None = None
        self.last_wake_s: float | None = None
        self.last_sleep: MemoryChange | None = None
        # The last time; model, and when.
        self._slept_for: tuple[SleepCause, str, float] | None = None
        self._effects = effects
        self._config = config
        self._now = now
        self._name = name
        self._on_change = on_change
        self._observer = observer or Observer()
        self._state = ReplicaState.ASLEEP
        self._drained = asyncio.Event()
        self._drained.set()
        self._drains = False  # waits for requests, or is about to
        self._commands_waiting = 0  # of theirs, or the schedule's, to wake
        self._look = asyncio.Event()  # at the idle clock: it may sleep sooner than it seemed
        self._going_on: asyncio.Task[None] | None = None  # wakes it for what `make_room` has frozen
        # Of the sleep at level 2 that it is in, or goes to.
        self._drops_image: SleepCause | None = None
        self._transition: asyncio.Task[bool] | None = None
        self._is_shared = False  # it is a wake, and for all who come while it is under way
        self._given_up: str | None = None  # why the wake that is about to begin need not
        self._work: asyncio.Task[None] | None = None  # of the transition
        self._asleep_since_s = now()
        self._frozen_since_s: float | None = None  # requests in flight while it does not compute
        self._frozen_limit: asyncio.TimerHandle | None = None

    @property
    def state(self) -> ReplicaState:
        return self._state

    @asynccontextmanager
    async def serving(
        self, request_id: str, keep_alive_s: float | None = None
    ) -> AsyncIterator[None]:
        """Hold the replica awake for one request, waking it first if need be.

        Args:
            keep_alive_s: how long it may be idle afterwards, until another request begins; None: as configured.

        Raises:
            WakeTimeout: not awake within `wake_timeout_s`.
            HeldAsleep: an operator holds the replica asleep.
            ReplicaFailed: the replica is in, or entered, FAILED.
        """
        await self._await_awake(request_id)
        self.idle.begin(keep_alive_s)  # no await since AWAKE was seen: the state cannot have moved
        self._drained.clear()
        if self.idle.in_flight == 1:
            self._effects.has_requests(True)
        try:
            yield
        finally:
            self.idle.end()
            if self.idle.in_flight == 0:
                self._drained.set()
                self._effects.has_requests(False)
                self._give_up_unwanted_wake()  # for what a sleep had frozen
                self._look_if_due()

    async def sleep(
        self,
        command: SleepCommand,
        reason: str = "asked to",
        cause: SleepCause = SleepCause.COMMAND,
        for_model: str = "",
        taken_back: asyncio.Event | None = None,
    ) -> None:
        """Finish, abort or freeze the requests in flight, then sleep. Idempotent.

        Where a worker fails meanwhile, the next one sleeps as deep, unless somebody wants it awake by then: the
        replica is theirs, and this returns. A drain that is under way is cut short by a command that does not wait for requests. What an
        earlier sleep froze is aborted, too, if so asked.

        Args:
            taken_back: ends the drain as its timeout does.

        Raises:
            DrainTimeout: requests in flight did not finish in time; the replica is awake, and a hold stays.
            ReplicaFailed: the replica is in, or entered, FAILED.
        """
        self.held = self.held or command.hold  # at once: later requests must not queue for a wake
        if self._state is ReplicaState.DRAINING:
            self._cut_drain_short(command.mode)
        if command.hold and self._state is ReplicaState.WAKING:
            self._give_up_wake("an operator put the model to sleep")
        await self._until_settled()
        self._check_not_failed()
        is_deep_enough = command.level <= self.level and self.deep >= command.deep
        if self._state is not ReplicaState.AWAKE and is_deep_enough:
            if command.mode is SleepMode.ABORT and self.idle.in_flight:
                self._effects.abort_in_flight()  # what a sleep has frozen
            return
        # Asleep, or with requests that are kept, there is nothing to wait for.
        self._drains = command.mode is not SleepMode.KEEP and not self.level
        self._drops_image = cause if command.level == 2 else None
        slept = await asyncio.shield(
            self._begin(
                ReplicaState.DRAINING,
                self._drain_and_sleep(command, cause, for_model, taken_back),
                reason,
            )
        )
        if not slept:  # a worker failed; the restart puts the next one where it was to be
            await self._until_settled()
            self._check_not_failed()

    async def wake_up(self, reason: str = "asked to", cause: WakeCause = WakeCause.COMMAND) -> None:
        """End a hold and wake. Idempotent.

        Raises:
            Unavailable: not possible now; the replica is still asleep.
            ReplicaFailed: the replica is in, or entered, FAILED.
        """
        self.held = False
        # Also in a restart, which would have to load the image again for this.
        self._drops_image = None
        self._commands_waiting += 1
        try:
            while self._state is not ReplicaState.AWAKE:
                if await self._step_to_awake(reason, cause):
                    break  # it was awake; a sleep that somebody asked for meanwhile is theirs to have
        finally:
            self._commands_waiting -= 1
        self.idle.ordered_awake()
        self._look_if_due()

    async def make_room(
        self,
        mode: SleepMode | None,
        reason: str,
        for_model: str = "",
        deep: bool = False,
        taken_back: asyncio.Event | None = None,
    ) -> None:
        """Sleep, because another model wants the memory of the card; return when that is settled.

        Whoever asks goes by the past. What has been asked of this replica since comes first, so it may stay awake.

        Args:
            mode: what requests in flight have to suffer; None: where there are any, the replica stays awake.
                Those that are frozen go on by themselves, as soon as there is room again.
            for_model: that wants the room.
            deep: it was asleep, and is to sleep deep if it still is.
            taken_back: set if nobody wants the room any more. Who drains by then stays awake; a sleep that has begun
                goes on.
        """
        if self._state is ReplicaState.DRAINING:
            await self._until_settled()
        is_wanted = bool(self.idle.in_flight or self.waiting_for_wake)
        if deep:
            if self._state is ReplicaState.ASLEEP and not is_wanted:
                command = SleepCommand(level=max(1, self.level), deep=True)
                await self.sleep(command, reason, SleepCause.ROOM, for_model)
            return
        if self._state is not ReplicaState.AWAKE or (mode is None and is_wanted):
            return
        if taken_back is not None and taken_back.is_set():
            return
        cause = SleepCause.ROOM if mode is None else SleepCause.PREEMPTED
        try:
            command = SleepCommand(mode=mode or SleepMode.WAIT)
            await self.sleep(command, reason, cause, for_model, taken_back)
        except DrainTimeout:
            return  # it is logged, and awake
        if self.idle.in_flight:
            self._going_on = asyncio.create_task(self._wake_for_frozen())

    async def _wake_for_frozen(self) -> None:
        """Ask until it is awake, by whomever, or nothing is frozen any more; `_enter` ends it, too.

        Somebody else's wake may be refused as well, and an operator may end a hold: nobody else would ask then.
        Those whose patience ends meanwhile are ended by `frozen_timeout_s`.
        """
        while self.idle.in_flight and self._state is not ReplicaState.AWAKE:
            if self.held:
                await asyncio.sleep(_FROZEN_RETRY_S)
                continue
            try:
                await self._step_to_awake("frozen requests go on", WakeCause.REQUEST)
            except Unavailable as exc:
                # As long as a client would, it would not be in the queue while the card is free.
                await asyncio.sleep(min(exc.retry_after_s, _FROZEN_RETRY_S))
            except ReplicaFailed:
                return

    def restart(self, failure: ReplicaFailed) -> None:
        """Enter RESTARTING: what computes has failed, and another worker takes its place.

        Requests in flight end with `failure`. A transition under way ends at once, whether or not its effect
        ever returns, and who waits for it waits for the other worker. A replica that was awake, or on its
        way there, is woken again; one that slept at level 2, or was on its way there, gives the image back
        again, unless a request waits that would have to wait for the image.
        """
        if self._state in (ReplicaState.RESTARTING, ReplicaState.FAILED):
            return
        wakes = self._state in (ReplicaState.AWAKE, ReplicaState.WAKING)
        if self._work is not None:
            self._work.cancel()
        reason = f"{type(failure).__name__}: {failure}"
        self._begin(ReplicaState.RESTARTING, self._run_restart(wakes), reason)
        self._effects.fail_in_flight(failure)

    def slept_why(self) -> LastSleep | None:
        """Why it slept last, awake by now or not; None: it never did."""
        if self._slept_for is None:
            return None
        cause, for_model, at_s = self._slept_for
        return LastSleep(cause.value, for_model, self._now() - at_s)

    async def restarted(self) -> None:
        """Return once no other worker is being started, to a request that will want it awake then.

        Raises:
            WakeTimeout: none is ready within `wake_timeout_s`.
            HeldAsleep: an operator holds the replica asleep.
        """
        if self._state is not ReplicaState.RESTARTING:
            return
        async with self._waiting():
            while self._state is ReplicaState.RESTARTING and self._transition is not None:
                self._check_not_held()
                await self._join(self._transition)

    def _fail(self, failure: ReplicaFailed) -> None:
        """Enter FAILED, for good."""
        self._enter(ReplicaState.FAILED, f"{type(failure).__name__}: {failure}")
        self._effects.fail_in_flight(failure)

    async def sleep_when_idle(self) -> None:
        """Watch the idle clock until cancelled, or the replica has failed; and how long it sleeps."""
        while True:
            self._look.clear()
            due_s = min(self._sleeps_in_s(), self._deepens_in_s())
            await self._until_look(min(due_s, self._config.idle_check_interval_s))
            if self._sleeps_in_s() <= 0:
                command, reason = SleepCommand(level=self._config.level), self._why_idle()
            elif self._deepens_in_s() <= 0:
                command = SleepCommand(level=max(1, self.level), deep=True)
                reason = f"asleep for {self._config.deep_after_s:g} s"
            else:
                continue
            try:
                await self.sleep(command, reason, SleepCause.IDLE)
            except DrainTimeout:  # a request came in between; it keeps the replica awake
                continue
            except ReplicaFailed:  # logged by the transition; the health check takes over
                return

    async def wake_unless_held(self, reason: str, cause: WakeCause) -> None:
        """Wake, but for nothing while an operator holds the replica asleep.

        Raises:
            Unavailable: not possible now; the replica is still asleep.
            ReplicaFailed: the replica is in, or entered, FAILED.
        """
        self._commands_waiting += 1
        try:
            while self._state is not ReplicaState.AWAKE and not self.held:
                if await self._step_to_awake(reason, cause):
                    return
        finally:
            self._commands_waiting -= 1

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody waits for it to be awake, or has requests in it."""
        return bool(self.waiting_for_wake or self._commands_waiting or self.idle.in_flight)

    def _sleeps_in_s(self) -> float:
        """Until it may sleep by being idle; math.inf while it does not idle.

        Who waits for a wake that has just ended goes on a little later, and would find it asleep again.
        """
        if self._state is not ReplicaState.AWAKE or self._is_wanted:
            return math.inf
        return self.idle.left_s()

    def _deepens_in_s(self) -> float:
        """Until its sleep gets deep; math.inf if that is not to be. One that could not is tried again as late."""
        if self._state is not ReplicaState.ASLEEP or self.deep or self._is_wanted:
            return math.inf
        after_s = self._config.deep_after_s
        return math.inf if after_s is None else self._asleep_since_s + after_s - self._now()

    def _look_if_due(self) -> None:
        """Have the watch look, where it might not for too long: something has ended that kept it awake."""
        if self._sleeps_in_s() <= self._config.idle_check_interval_s:
            self._look.set()

    async def _until_look(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._look.wait()
        except TimeoutError:
            return  # it is time

    def _why_idle(self) -> str:
        timeout: IdleTimeout = self.idle.timeout()
        text = f"idle {self.idle.idle_s():.1f} s >= {timeout.seconds:g} s"
        return text if timeout.source is TimeoutSource.SETTING else f"{text}, by {timeout.source}"

    async def _await_awake(self, request_id: str) -> None:
        started_s = self._now() if self._state is not ReplicaState.AWAKE else None
        try:
            async with self._waiting():
                self._check_not_held()  # also awake: what came before the hold is to end, and nothing more
                while self._state is not ReplicaState.AWAKE:
                    self._check_not_held()
                    await self._step_to_awake(f"request {request_id}", WakeCause.REQUEST)
        finally:
            if started_s is not None:
                self._observer.waited(self._now() - started_s)

    @asynccontextmanager
    async def _waiting(self) -> AsyncIterator[None]:
        """Count a request among those that wait for a wake, for no longer than it may take."""
        self.waiting_for_wake += 1
        if self.waiting_for_wake == 1:
            self._effects.requests_wait(True)
        try:
            async with asyncio.timeout(self._config.wake_timeout_s):
                yield
        except TimeoutError:
            raise WakeTimeout(
                f"the model did not wake within {self._config.wake_timeout_s:g} s "
                "(sleep.wake_timeout_s)",
                self.last_wake_s or 1.0,
            ) from None
        finally:
            self.waiting_for_wake -= 1
            if not self.waiting_for_wake:
                self._effects.requests_wait(False)
            self._give_up_unwanted_wake()
            self._look_if_due()

    def _give_up_unwanted_wake(self) -> None:
        """Nobody sleeps to make room for a wake that nobody waits for."""
        if self._state is ReplicaState.WAKING and not self._is_wanted:
            self._give_up_wake("nobody waits for the wake any more")

    def _give_up_wake(self, reason: str) -> None:
        self._is_shared = False  # who comes now begins another one, if this one comes to nothing
        if self._effects.give_up_waiting(reason):
            self._given_up = reason

    def _check_not_held(self) -> None:
        if self.held:
            raise HeldAsleep(
                "the model is held asleep by an operator; POST /wake_up ends it",
                _HELD_RETRY_AFTER_S,
            )

    async def _step_to_awake(self, reason: str, cause: WakeCause) -> bool:
        """Wait for the transition under way, or begin the wake that everybody then shares.

        Returns:
            Whether the replica woke; by now it may be on its way to sleep again.
        """
        self._check_not_failed()
        is_shared = self._state is ReplicaState.WAKING and self._is_shared
        if self._transition is not None and not is_shared:
            await self._join(self._transition)  # its outcome is for others
            return False
        task = self._transition or self._begin(ReplicaState.WAKING, self._run_wake(cause), reason)
        return await asyncio.shield(task)

    def _check_not_failed(self) -> None:
        if self._state is ReplicaState.FAILED:
            raise ReplicaFailed(f"{self._name} has failed: {self.reason}")

    async def _until_settled(self) -> None:
        """Wait until no transition is under way."""
        while self._transition is not None:
            await self._join(self._transition)

    @staticmethod
    async def _join(task: asyncio.Task[bool]) -> None:
        """Wait until a transition has settled, whatever it came to."""
        await asyncio.wait([task])

    def _begin(
        self, via: ReplicaState, work: Coroutine[None, None, None], reason: str
    ) -> asyncio.Task[bool]:
        self._enter(via, reason)  # before the first await: nobody may act on the old state
        # Not the one in a restart: it waits for no room, and who comes meanwhile would.
        self._is_shared = via is ReplicaState.WAKING
        self._work = asyncio.create_task(work)
        task = asyncio.create_task(self._run(self._work), name=f"{self._name} {via}")
        # Retrieve the outcome even if every caller has left, or asyncio logs it as lost.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._transition = task
        return task

    async def _run(self, work: asyncio.Task[None]) -> bool:
        """Whether the transition came to its end; if not, another worker is being started."""
        try:
            await work
            return self._work is work
        except asyncio.CancelledError:
            if self._work is work:
                raise  # not by `restart`
            return False
        except Unavailable:
            raise  # the work settled the state before it raised
        except Exception as exc:
            logger.exception("%s: transition failed", self._name)
            if self._work is not work:
                return False  # `restart` knew it already
            failure = (
                exc
                if isinstance(exc, ReplicaFailed)
                else ReplicaFailed(f"{self._name} failed: {type(exc).__name__}")
            )
            if self._state is ReplicaState.RESTARTING:
                self._fail(failure)
                raise failure from exc
            self.restart(failure)
            return False
        finally:
            if self._work is work:
                self._transition = self._work = None

    async def _run_restart(self, wakes: bool) -> None:
        await self._effects.restart()
        self._observer.restarted()
        self.level, self.deep = 1, False  # the next worker has the image
        self._enter(ReplicaState.ASLEEP, "another worker is ready")
        if wakes and not self.held:
            self._enter(ReplicaState.WAKING, "awake before its worker failed")
            await self._run_wake(WakeCause.START)
        elif not wakes and self._drops_image and (self.held or not self.waiting_for_wake):
            self._enter(ReplicaState.DRAINING, "to sleep at level 2, as before its worker failed")
            await self._give_memory_back(2, False, self._drops_image)

    async def _run_wake(self, cause: WakeCause) -> None:
        started_s = self._now()
        drops_image, self._drops_image = self._drops_image, None
        result = WakeResult.FAILED
        try:
            if self._given_up is not None:
                raise Untouched(Unavailable(self._given_up))
            change = await self._effects.wake(cause)
            result = WakeResult.OK
        except Untouched as exc:
            result = WakeResult.REFUSED
            self._drops_image = drops_image
            self._enter(ReplicaState.ASLEEP, f"could not wake: {exc.refusal}")
            raise exc.refusal from None
        except Unavailable as exc:
            result = WakeResult.REFUSED
            # The image may have come back, and what a deep sleep had given back.
            self.level, self.deep = min(self.level, 1), False
            self._enter(ReplicaState.ASLEEP, f"could not wake: {exc}")
            raise
        finally:
            self._observer.woke(cause, result, self._now() - started_s)
        self.last_wake_s = self._now() - started_s
        self.wakes += 1
        self.level, self.deep = 0, False
        # Here, because who waits for this goes on a little later: the idle clock may be looked at before.
        self.idle.touch()
        self._enter(ReplicaState.AWAKE, self.reason, self.last_wake_s, change)

    async def _drain_and_sleep(
        self,
        command: SleepCommand,
        cause: SleepCause,
        for_model: str,
        taken_back: asyncio.Event | None,
    ) -> None:
        if command.mode is SleepMode.ABORT:
            self._effects.abort_in_flight()
        if self._drains:
            await self._drain(taken_back or asyncio.Event())
        await self._give_memory_back(command.level, command.deep, cause, for_model)

    async def _give_memory_back(
        self, level: int, deep: bool, cause: SleepCause, for_model: str = ""
    ) -> None:
        started_s = self._now()
        try:
            change = await self._effects.sleep(level, deep)
        except Unavailable as exc:  # nobody knows what is mapped
            raise ReplicaFailed(f"{self._name} could not sleep: {exc}") from exc
        self.last_sleep_s = self._now() - started_s
        self.last_sleep = change
        self._slept_for = cause, for_model, self._now()
        self.sleeps += 1
        self.level = max(self.level, level)
        self.deep = change.deep
        self._asleep_since_s = self._now()
        if not self.idle.in_flight:  # what is frozen goes on, and its word holds
            self.idle.forget()
        self._observer.slept(cause, level, self.last_sleep_s, change)
        self._enter(ReplicaState.ASLEEP, self.reason, self.last_sleep_s, change)

    def _cut_drain_short(self, mode: SleepMode) -> None:
        if mode is SleepMode.ABORT:
            self._effects.abort_in_flight()
        elif mode is SleepMode.KEEP and self._drains:
            self._drained.set()

    async def _drain(self, taken_back: asyncio.Event) -> None:
        timeout_s = self._config.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await one_of(self._drained, taken_back)
            if taken_back.is_set():
                self._observer.drain_taken_back()
                self._enter(ReplicaState.AWAKE, "nobody wants its room any more")
                raise DrainTimeout("the model that wanted room has left; this one stays awake")
        except TimeoutError:
            in_flight = self.idle.in_flight
            self._enter(ReplicaState.AWAKE, f"{in_flight} in flight after {timeout_s:g} s of drain")
            raise DrainTimeout(
                f"{in_flight} requests still run after {timeout_s:g} s (sleep.drain_timeout_s); "
                "the model stays awake. mode=abort ends them, mode=keep freezes them",
                timeout_s,
            ) from None
        finally:
            self._drains = False
            if self.idle.in_flight:  # kept: the next drain has to wait for them
                self._drained.clear()

    def _enter(
        self,
        state: ReplicaState,
        reason: str,
        seconds: float | None = None,
        change: MemoryChange | None = None,
    ) -> None:
        """The one writer of the state, and the one place of its log line."""
        before, self._state, self.reason = self._state, state, reason
        self._given_up = None
        try:
            self._on_change()
        except Exception:
            logger.exception("%s: not everybody was told that it is %s", self._name, state)
        self._limit_frozen()
        if state in _NOTHING_FROZEN and self._going_on is not None:
            self._going_on.cancel()  # what another sleep freezes may be an operator's
        if change is None or seconds is None:
            level = logging.ERROR if state is ReplicaState.FAILED else logging.INFO
            logger.log(level, "%s: %s -> %s (%s)", self._name, before, state, reason)
            return
        logger.info(
            "%s: %s -> %s (%s) in %.1f ms; %s",
            self._name,
            before,
            state,
            reason,
            1e3 * seconds,
            change,
        )

    def _limit_frozen(self) -> None:
        """Bound how long requests in flight wait for a replica that sleeps; with each new state."""
        if self._frozen_limit is not None:
            self._frozen_limit.cancel()
            self._frozen_limit = None
        if self._state in (ReplicaState.AWAKE, ReplicaState.FAILED):
            self._frozen_since_s = None
        elif self._state is ReplicaState.ASLEEP and self.idle.in_flight:
            if self._frozen_since_s is None:
                self._frozen_since_s = self._now()
            limit_s = self._frozen_since_s + self._config.frozen_timeout_s
            loop = asyncio.get_running_loop()
            self._frozen_limit = loop.call_later(limit_s - self._now(), self._end_frozen)

    def _end_frozen(self) -> None:
        limit_s = self._config.frozen_timeout_s
        logger.info("%s: nobody woke %d frozen requests", self._name, self.idle.in_flight)
        self._effects.fail_in_flight(
            FrozenTooLong(
                f"a sleep in mode keep froze this request, and nobody woke the model within {limit_s:g} s "
                "(sleep.frozen_timeout_s)",
                self.last_wake_s or 1.0,
            )
        )
