"""Differences between snapshots are what RFC 7386 says, and quiet replicas are no news."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol import CardStatus, CardWait, LastSleep
from serve_app.front.status.snapshot import host_view, merge_patch, replica_views
from tests.fakes import FakeModel

leaves = st.one_of(st.booleans(), st.integers(), st.text(max_size=3), st.lists(st.integers()))
trees = st.recursive(
    leaves, lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=4), max_leaves=12
)
documents = st.dictionaries(st.text(max_size=2), trees, max_size=4)


def apply(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply(result.get(name), value)
    return result


@given(documents, documents)
def test_patch_leads_from_one_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert apply(before, merge_patch(before, after)) == after


@given(documents)
def test_no_difference_is_an_empty_patch(document: dict[str, Any]) -> None:
    assert merge_patch(document, document) == {}


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({}, {"a": None}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"c": 3}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": None}}),
        ({"a": True}, {"a": 1.5}, {"a": 1.5}),
    ],
)
def test_patches(before: Any, after: Any, patch: Any) -> None:
    assert merge_patch(before, after) == patch


def test_idle_seconds_become_a_time_that_stays() -> None:
    (status,) = FakeModel()._statuses()
    first = replica_views([replace(status, idle_s=10.0)], 100.0, {})
    again = replica_views([replace(status, idle_s=11.1)], 101.3, first)
    assert again == first
    assert first["replica-0"]["quiet_since"] == 90.0
    assert "idle_s" not in first["replica-0"]


def test_a_request_moves_that_time() -> None:
    (status,) = FakeModel()._statuses()
    first = replica_views([replace(status, idle_s=10.0)], 100.0, {})
    later = replica_views([replace(status, idle_s=0.0)], 101.0, first)
    assert later["replica-0"]["quiet_since"] == 101.0


def waiting(
    *waits: tuple[str, float, float | None],
) -> CardStatus:
    """Who waits, for how long by now, and for how long until somebody else's turn."""
    shown = (CardWait("m", who, 60, waited_s, 30.0, "", turn) for who, waited_s, turn in waits)
    return CardStatus("cpu", 100, 100, 0, 0, 0, (), tuple(shown), 0.0)


def test_waits_for_a_card_become_times_that_stay() -> None:
    (status,) = FakeModel()._statuses()
    told = replace(status, card=waiting(("a", 2.0, 5.5)))
    first = replica_views([told], 100.0, {})
    (wait,) = first["replica-0"]["card"]["waiting"]
    assert (wait["since"], wait["turn"], wait["limit_s"]) == (98.0, 105.5, 30.0)
    told = replace(status, card=waiting(("a", 3.1, 4.2)))
    assert replica_views([told], 101.3, first)["replica-0"]["card"] == first["replica-0"]["card"]
    told = replace(status, card=waiting(("b", 0.5, None), ("a", 3.1, None)))
    b, a = replica_views([told], 101.3, first)["replica-0"]["card"]["waiting"]
    assert (b["since"], b["turn"]) == (100.8, None)
    assert (a["since"], a["turn"]) == (98.0, None)


def test_last_sleep_has_a_time_that_stays() -> None:
    (status,) = FakeModel()._statuses()
    assert replica_views([status], 100.0, {})["replica-0"]["last_sleep"] is None
    first = replica_views([replace(status, last_sleep=LastSleep("room", "b", 9.0))], 100.0, {})
    assert first["replica-0"]["last_sleep"] == {"cause": "room", "for_model": "b", "at": 91.0}
    again = replace(status, last_sleep=LastSleep("room", "b", 10.2))
    shown = replica_views([again], 101.3, first)["replica-0"]["last_sleep"]
    assert shown == first["replica-0"]["last_sleep"]
    slept = replace(status, last_sleep=LastSleep("idle", "", 1.0))
    later = replica_views([slept], 102.0, first)["replica-0"]["last_sleep"]
    assert later == {"cause": "idle", "for_model": "", "at": 101.0}


def test_host_without_holder_says_so() -> None:
    host = host_view(None)
    assert host["images"] is None
    assert 0 < host["available"] < host["total"]
