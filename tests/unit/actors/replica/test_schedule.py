"""When a schedule wants a model awake, or asleep. The clock is passed in."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.replica.schedule import Hours, Schedule, ScheduleConfig, Wanted, hours_at

BERLIN = ZoneInfo("Europe/Berlin")
AWAKE, ASLEEP, NEITHER = Wanted.AWAKE, Wanted.ASLEEP, Wanted.NEITHER
OFFICE = {"cron": "0 8 * * MON-FRI", "timezone": "Europe/Berlin", "duration": "10h"}
NIGHT = {"cron": "0 22 * * *", "timezone": "Europe/Berlin", "duration": "9h"}


def schedule(awake: Any = (), asleep: Any = ()) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"awake": awake, "asleep": asleep})


def berlin(*parts: int, fold: int = 0) -> datetime:
    return datetime(*parts, tzinfo=BERLIN, fold=fold)  # type: ignore[misc,arg-type]


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("now", "wanted", "until"),
    [
        (berlin(2026, 11, 23, 7, 59, 59), NEITHER, berlin(2026, 11, 23, 8)),  # Monday
        (berlin(2026, 11, 23, 8), AWAKE, berlin(2026, 11, 23, 18)),
        (berlin(2026, 11, 23, 17, 59, 59), AWAKE, berlin(2026, 11, 23, 18)),
        (berlin(2026, 11, 23, 18), NEITHER, berlin(2026, 11, 23, 22)),
        (berlin(2026, 11, 23, 23), ASLEEP, berlin(2026, 11, 24, 7)),
        (berlin(2026, 11, 28, 12), NEITHER, berlin(2026, 11, 28, 22)),  # Saturday
    ],
)
def test_office_hours(now: datetime, wanted: Wanted, until: datetime) -> None:
    assert hours_at(schedule([OFFICE], [NIGHT]), now) == Hours(wanted, until.astimezone(UTC))


def test_awake_where_both_are_wanted() -> None:
    both = schedule([OFFICE], [{"cron": "0 0 * * *", "duration": "24h"}])
    assert hours_at(both, berlin(2026, 11, 23, 12)).wanted is AWAKE
    assert hours_at(both, berlin(2026, 11, 23, 19)).wanted is ASLEEP


def test_windows_that_meet_are_one() -> None:
    halves = [{"cron": "0 8 * * *", "duration": "4h"}, {"cron": "0 12 * * *", "duration": "4h"}]
    assert hours_at(schedule(halves), utc(2026, 1, 1, 9)) == Hours(AWAKE, utc(2026, 1, 1, 16))


def test_window_that_begins_again_before_its_end_goes_on() -> None:
    config = schedule([{"cron": "0 */2 * * *", "duration": "2h30m"}])
    hours = hours_at(config, utc(2026, 1, 1, 9))
    assert hours.wanted is AWAKE
    assert hours.until is not None
    assert hours.until > utc(2026, 1, 2)


def test_empty_schedule_wants_nothing_for_good() -> None:
    assert hours_at(schedule(), utc(2026, 1, 1)) == Hours(NEITHER, None)


# Summer time begins in Berlin at 2:00 on 2026-03-29, which is 3:00 then, and ends at 3:00 on
# 2026-10-25, which is 2:00 then.


def test_start_in_the_hour_that_is_skipped_is_at_its_end() -> None:
    config = schedule([{"cron": "30 2 * * *", "timezone": "Europe/Berlin", "duration": "1h"}])
    assert hours_at(config, utc(2026, 3, 29, 0, 59)) == Hours(NEITHER, utc(2026, 3, 29, 1))
    assert hours_at(config, utc(2026, 3, 29, 1)) == Hours(AWAKE, utc(2026, 3, 29, 2))
    assert hours_at(config, utc(2026, 3, 29, 2)).wanted is NEITHER


def test_start_in_the_hour_that_comes_twice_is_in_the_first_of_them() -> None:
    config = schedule([{"cron": "30 2 * * *", "timezone": "Europe/Berlin", "duration": "40m"}])
    first, second = berlin(2026, 10, 25, 2, 30), berlin(2026, 10, 25, 2, 30, fold=1)
    assert hours_at(config, first) == Hours(AWAKE, utc(2026, 10, 25, 1, 10))
    # 2:10 and 2:30 come again: still in the window that began at the first 2:30, and no second one.
    assert hours_at(config, berlin(2026, 10, 25, 2, 5, fold=1)).wanted is AWAKE
    assert hours_at(config, second).wanted is NEITHER
    assert hours_at(config, second).until == berlin(2026, 10, 26, 2, 30).astimezone(UTC)


@pytest.mark.parametrize("day", [28, 29, 30])
def test_ten_hours_are_ten_hours_on_any_day(day: int) -> None:
    config = schedule([{"cron": "0 0 * * *", "timezone": "Europe/Berlin", "duration": "10h"}])
    start = berlin(2026, 3, day).astimezone(UTC)
    assert hours_at(config, start) == Hours(AWAKE, start + timedelta(hours=10))


def test_offset_of_a_start_is_that_of_its_day() -> None:
    assert hours_at(schedule([OFFICE]), utc(2026, 7, 1, 6)).wanted is AWAKE  # 8:00 in summer
    assert hours_at(schedule([OFFICE]), utc(2026, 12, 1, 6)).wanted is NEITHER  # 7:00 in winter


_CRONS = st.sampled_from(
    [
        "* * * * *",
        "*/7 * * * *",
        "0 * * * *",
        "30 2 * * *",
        "0 8 * * MON-FRI",
        "15 1,2,3 * * *",
        "0 0 1 * *",
        "0 0 29 2 *",
        "59 23 * * SUN",
    ]
)
_ZONES = st.sampled_from(
    ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]
)
_WINDOW = st.fixed_dictionaries(
    {"cron": _CRONS, "timezone": _ZONES, "duration": st.integers(60, 200_000)}
)
_WINDOWS = st.lists(_WINDOW, max_size=2)
_MOMENTS = st.datetimes(
    datetime(2026, 1, 1), datetime(2027, 12, 31), timezones=st.sampled_from([UTC, BERLIN])
)


@settings(max_examples=60)
@given(awake=_WINDOWS, asleep=_WINDOWS, now=_MOMENTS, share=st.floats(0, 0.999))
def test_nothing_changes_before_the_next_change(
    awake: Any, asleep: Any, now: datetime, share: float
) -> None:
    config = schedule(awake, asleep)
    hours = hours_at(config, now)
    if hours.until is None:
        assert not awake
        assert not asleep
        return
    since = now.astimezone(UTC)
    assert hours.until > since
    between = since + share * (hours.until - since)
    assert hours_at(config, between).wanted is hours.wanted
    # The zone in which one asks says nothing.
    elsewhere = now.astimezone(timezone(timedelta(hours=-11)))
    assert hours_at(config, elsewhere) == hours


@settings(max_examples=60)
@given(window=_WINDOW, now=_MOMENTS)
def test_window_is_open_for_its_duration_behind_each_start(window: Any, now: datetime) -> None:
    (first,) = schedule([window]).awake
    start = next(first.starts_after(now))
    assert start > now
    lasts = timedelta(seconds=first.duration)
    assert first.end_at(start) == start + lasts
    last = first.end_at(start + lasts - timedelta(seconds=1))
    assert last is not None
    assert last >= start + lasts


def test_clock_is_followed_forwards_and_backwards() -> None:
    now = berlin(2026, 11, 23, 7)
    hours = Schedule(schedule([OFFICE]), lambda: now)
    for hour, wanted in [(7, NEITHER), (8, AWAKE), (17, AWAKE), (18, NEITHER), (9, AWAKE)]:
        now = berlin(2026, 11, 23, hour)
        assert hours.wanted() is wanted


def test_what_is_found_is_kept_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(config: ScheduleConfig, now: datetime) -> Hours:
        asked.append(now)
        return hours_at(config, now)

    monkeypatch.setattr("actors.replica.schedule.hours_at", counted)
    now = berlin(2026, 11, 23, 8)
    hours = Schedule(schedule([OFFICE]), lambda: now)
    for minute in range(60):
        now = berlin(2026, 11, 23, 9, minute)
        hours.wanted()
    assert len(asked) == 1
