"""Hours in which a model is to be awake, or asleep. Pure: the time is passed in.

A window begins when its cron expression fires in its time zone, and lasts for its duration in elapsed time:
ten hours are ten hours, also on the days on which summer time begins and ends.
A start in the hour that is skipped then is at its end; one in the hour that comes twice is in the first of
them. That is how Debian's cron has it, and CronSim (https://github.com/cuu508/cronsim) after it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from actors.durations import parse_duration_s

_MAX_DURATION_S = 7 * 86_400.0
# CronSim counts on a wall: around the end of summer time its first answers may lie before where it began.
_AROUND = timedelta(hours=3)
# Firings are looked for from now backwards, in larger and larger steps: those that come often are found in the first.
_LOOK_BACK = (timedelta(minutes=5), timedelta(hours=1), timedelta(days=1))
_LOOK_AHEAD = 50  # edges of windows until a change is no longer looked for


class Wanted(StrEnum):
    """What a schedule wants of a model."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    NEITHER = "neither"


def _seconds(value: object) -> object:
    return parse_duration_s(value) if isinstance(value, str) else value


class Window(BaseModel):
    """Hours that come again and again."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cron: str = Field(
        max_length=256,
        description="When it begins: minute, hour, day of the month, month, day of the week.",
    )
    timezone: str = Field(
        default="UTC",
        max_length=256,
        description="IANA's name of the time zone that `cron` means, as Europe/Berlin.",
    )
    duration: Annotated[float, BeforeValidator(_seconds)] = Field(
        gt=0,
        le=_MAX_DURATION_S,
        description="How long it lasts, a week at most: seconds, or as 10h, 1h30m.",
    )

    @field_validator("cron")
    @classmethod
    def _fires(cls, cron: str) -> str:
        if len(cron.split()) != 5:
            raise ValueError(
                f"expected five fields: minute, hour, day of the month, month, day of the week; found {cron!r}"
            )
        try:
            CronSim(cron, datetime(2000, 1, 1))
        except CronSimError as error:
            raise ValueError(f"no cron expression: {error}, found {cron!r}") from None
        return cron

    @field_validator("timezone")
    @classmethod
    def _is_known(cls, timezone: str) -> str:
        try:
            ZoneInfo(timezone)
        # It looks for a file of that name, with all that may be wrong with a name of a file.
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(
                f"no time zone of IANA's that is known here, found {timezone!r}; where all are "
                "unknown, install the system's package tzdata, or Python's"
            ) from None
        return timezone

    def starts_after(self, moment: datetime) -> Iterator[datetime]:
        """Firings after a moment, in UTC, in order.

        In UTC, because datetimes of one other zone are compared, and added to, by their walls.
        """
        zone = ZoneInfo(self.timezone)
        around = (moment - _AROUND, moment, moment + _AROUND)
        # Elsewhere there is no need to begin so early, which are 180 firings of a window of every minute.
        is_even = len({each.astimezone(zone).utcoffset() for each in around}) == 1
        last = moment
        for firing in CronSim(
            self.cron, (moment if is_even else moment - _AROUND).astimezone(zone)
        ):
            start = firing.astimezone(UTC)
            if start > last:  # two may be one, at the end of an hour that is skipped
                last = start
                yield start

    def end_at(self, moment: datetime) -> datetime | None:
        """When the window around a moment ends; None: it is in none. The moment of the end is not in it."""
        lasts = timedelta(seconds=self.duration)
        for back in (*(each for each in _LOOK_BACK if each < lasts), lasts):
            last = None
            for start in self.starts_after(moment - back):
                if start > moment:
                    break
                last = start
            if last is not None:
                return last + lasts
        return None


class ScheduleConfig(BaseModel):
    """When a model is to be awake, and when asleep."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    awake: tuple[Window, ...] = Field(
        default=(),
        description="Hours in which the model is woken, and does not fall asleep by being idle.",
    )
    asleep: tuple[Window, ...] = Field(
        default=(),
        description="Hours in which it sleeps as soon as it is idle. A request still wakes it, and in hours of both "
        "kinds it is awake.",
    )


@dataclass(frozen=True, slots=True)
class Hours:
    """What a schedule wants at a moment.

    Attributes:
        until: it is the same before that; None: for good.
    """

    wanted: Wanted
    until: datetime | None


def hours_at(config: ScheduleConfig, now: datetime) -> Hours:
    """What a schedule wants now, and until when.

    Args:
        now: with a time zone.
    """
    now = now.astimezone(UTC)
    wanted, moment = _wanted_at(config, now), now
    for _ in range(_LOOK_AHEAD):
        edges = [edge for window in config.awake + config.asleep for edge in _next(window, moment)]
        if not edges:
            return Hours(wanted, None)
        moment = min(edges)
        if _wanted_at(config, moment) is not wanted:
            break
    return Hours(wanted, moment)


def _wanted_at(config: ScheduleConfig, moment: datetime) -> Wanted:
    if any(window.end_at(moment) for window in config.awake):
        return Wanted.AWAKE
    if any(window.end_at(moment) for window in config.asleep):
        return Wanted.ASLEEP
    return Wanted.NEITHER


def _next(window: Window, moment: datetime) -> Iterator[datetime]:
    """The window's next edges after a moment."""
    if (start := next(window.starts_after(moment), None)) is not None:
        yield start
    if (end := window.end_at(moment)) is not None:
        yield end


class Schedule:
    """A schedule and a clock; remembers what it found until that changes, so asking costs nothing."""

    def __init__(self, config: ScheduleConfig, wall: Callable[[], datetime]) -> None:
        """Make one.

        Args:
            wall: the time of day, with a time zone. It may be set, forwards and backwards.
        """
        self._config = config
        self._wall = wall
        self._asked_at: datetime | None = None
        self._hours = Hours(Wanted.NEITHER, None)

    @property
    def is_empty(self) -> bool:
        return not (self._config.awake or self._config.asleep)

    def now(self) -> Hours:
        """What it wants now."""
        if self.is_empty:
            return self._hours
        now = self._wall()
        until = self._hours.until
        if self._asked_at is None or now < self._asked_at or (until is not None and now >= until):
            self._asked_at, self._hours = now, hours_at(self._config, now)
        return self._hours

    def wanted(self) -> Wanted:
        return self.now().wanted
