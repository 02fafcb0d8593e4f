"""Which changes are recorded, of what was seen and of what must have been between two looks."""

from dataclasses import replace

import pytest

from actors.protocol import ReplicaState, ReplicaStatus
from serve_app.front.status.history import History
from tests.fakes import FakeModel

AWAKE, ASLEEP, WAKING = ReplicaState.AWAKE, ReplicaState.ASLEEP, ReplicaState.WAKING


def status(state: ReplicaState, sleeps: int = 0, wakes: int = 0, name: str = "r") -> ReplicaStatus:
    (one,) = FakeModel(states=[state])._statuses()
    return replace(one, replica_id=name, sleeps=sleeps, wakes=wakes, last_wake_s=0.3)


def told(history: History) -> list[tuple[float, str, str, float | None, int]]:
    fields = ("at", "replica", "state", "seconds", "missed")
    return [tuple(entry[name] for name in fields) for entry in history.entries.values()]


def test_each_change_is_recorded_once_with_what_it_took() -> None:
    history = History()
    looks = [
        status(AWAKE),
        status(AWAKE),
        status(ASLEEP, sleeps=1),
        status(WAKING, sleeps=1),
        status(WAKING, sleeps=1),
        status(AWAKE, sleeps=1, wakes=1),
    ]
    for at, look in enumerate(looks):
        history.saw("fake", [look], at)
    assert told(history) == [
        (0, "r", "awake", None, 0),
        (2, "r", "asleep", 0.2, 0),
        (3, "r", "waking", None, 0),
        (5, "r", "awake", 0.3, 0),
    ]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (status(AWAKE, sleeps=1, wakes=1), (1, "r", "awake", 0.3, 1)),
        (status(AWAKE, sleeps=2, wakes=2), (1, "r", "awake", 0.3, 3)),
        (status(ASLEEP, sleeps=2, wakes=1), (1, "r", "asleep", 0.2, 2)),
        (status(WAKING, sleeps=1), (1, "r", "waking", None, 1)),
    ],
)
def test_sleeps_and_wakes_between_two_looks_are_counted(
    now: ReplicaStatus, expected: tuple[object, ...]
) -> None:
    history = History()
    history.saw("fake", [status(AWAKE)], 0)
    history.saw("fake", [now], 1)
    assert told(history)[-1] == expected


def test_replicas_come_and_go() -> None:
    history = History()
    history.saw("fake", [status(AWAKE, name="a")], 0)
    history.saw("fake", [status(AWAKE, name="b")], 1)
    history.saw("other", [], 2)
    history.saw("fake", [status(AWAKE, name="b")], 3)
    assert [entry[:3] for entry in told(history)] == [
        (0, "a", "awake"),
        (1, "b", "awake"),
        (1, "a", "gone"),
    ]


def test_silence_is_recorded_once_and_so_is_its_end() -> None:
    history = History()
    history.saw("fake", [status(AWAKE)], 0)
    for at in (1, 2, 3):
        history.silent("fake", "did not tell in time", at)
    for at in (4, 5):
        history.saw("fake", [status(AWAKE)], at)
    assert [entry[:3] for entry in told(history)] == [
        (0, "r", "awake"),
        (1, "r", "silent"),
        (4, "r", "awake"),
    ]


def test_what_nobody_watched_is_a_gap() -> None:
    history = History()
    history.saw("fake", [status(AWAKE)], 0)
    history.unseen(10)
    history.saw("fake", [status(ASLEEP, sleeps=7, wakes=6)], 60)
    assert told(history) == [
        (0, "r", "awake", None, 0),
        (10, "r", "unseen", None, 0),
        (60, "r", "asleep", None, 0),  # it may have slept for long: no claim what this sleep took
    ]


def test_only_the_newest_are_kept_and_numbers_go_on() -> None:
    history = History(limit=3)
    for at in range(10):
        state = AWAKE if at % 2 else ASLEEP
        history.saw("fake", [status(state, sleeps=at, wakes=at)], at)
    assert list(history.entries) == ["7", "8", "9"]


def test_what_was_handed_out_does_not_change() -> None:
    history = History()
    history.saw("fake", [status(AWAKE)], 0)
    before = history.entries
    history.saw("fake", [status(ASLEEP, sleeps=1)], 1)
    assert list(before) == ["0"]
