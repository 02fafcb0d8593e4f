"""Cards that swap too much: when another replica helps, and where Ray would place it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from serve_app.scaling.cards import (
    CardReport,
    CardTable,
    Crowding,
    NodeRoom,
    Place,
    crowding,
    is_thrashing,
    places,
    swap_share,
)

LEFT, RIGHT = 1.0, 2.0  # nodes
GPU = {"CPU": 1.0, "GPU": 0.25}
CPU = {"CPU": 1.0}


def card(number: float, node: float = LEFT, **told: float) -> CardReport:
    """Of 100 bytes, all free; a wake takes 40."""
    return replace(CardReport(number, node, 100, 40, 0.25), **told)


def thrashing(number: float, node: float = LEFT, **told: float) -> CardReport:
    return card(
        number,
        node,
        **({"free_bytes": 0, "swaps_per_min": 30, "swap_s": 0.5, "own_swap_share": 0.2} | told),
    )


def node(number: float, gpus: float = 0.0, cpus: float = 8.0, cards: int = 2) -> NodeRoom:
    return NodeRoom(number, {"CPU": cpus, "GPU": gpus}, cards)


@pytest.mark.parametrize(
    ("swaps_per_min", "swap_s", "share"),
    [(0, 5, 0), (12, 0.5, 0.1), (60, 0.25, 0.25), (600, 1, 1.0)],
)
def test_share_of_time_is_rate_by_cost(swaps_per_min: float, swap_s: float, share: float) -> None:
    assert swap_share(swaps_per_min, swap_s) == pytest.approx(share)


@pytest.mark.parametrize(
    ("swaps_per_min", "swap_s", "is_too_much"),
    [
        (20, 0.29, False),  # a 7B model's swap
        (21, 0.29, True),
        (1, 5, False),
        (1.3, 5, True),  # what takes seconds may seldom happen
        (0, 0, False),
    ],
)
def test_dear_swaps_are_too_many_sooner(
    swaps_per_min: float, swap_s: float, is_too_much: bool
) -> None:
    report = card(1, swaps_per_min=swaps_per_min, swap_s=swap_s)
    assert is_thrashing(report) is is_too_much


@pytest.mark.parametrize(
    ("nodes", "cards", "needs", "expected"),
    [
        pytest.param([], [], GPU, [], id="no node"),
        pytest.param([node(LEFT, 0.2)], [], GPU, [], id="no node has so much left"),
        pytest.param([node(LEFT, 2.0)], [], GPU, [None], id="a card that nobody has told of"),
        pytest.param(
            [node(LEFT, 1.5)], [card(1, gpus=0.5)], GPU, [1.0], id="a card is filled first"
        ),
        pytest.param(
            [node(LEFT, 0.75)],
            [card(1, gpus=0.5), card(2, gpus=0.75)],
            GPU,
            [2.0],
            id="the fullest with a place",
        ),
        pytest.param([node(LEFT, 1.0)], [card(1, gpus=1.0)], GPU, [None], id="then the next"),
        pytest.param(
            [node(LEFT, 0.25)], [card(1, gpus=0.75)], GPU, [1.0], id="shares that add up to one"
        ),
        pytest.param(
            [node(LEFT, 0.3)],
            [card(1, gpus=0.85), card(2, gpus=0.85)],
            GPU,
            [],
            id="what is left is of two cards",
        ),
        pytest.param(
            [node(LEFT, 1.0), node(RIGHT, 1.5)],
            [card(1), card(2, RIGHT, gpus=0.5)],
            GPU,
            [2.0],
            id="the emptiest node",
        ),
        pytest.param(
            [node(LEFT, 1.75), node(RIGHT, 1.75)],
            [card(1), card(2, RIGHT)],
            GPU,
            [1.0, 2.0],
            id="either of two",
        ),
        pytest.param(
            [node(LEFT, cpus=1), node(RIGHT, cpus=2)], [card(1)], CPU, [None], id="without GPUs"
        ),
        pytest.param([node(LEFT, cpus=2)], [card(1)], CPU, [1.0], id="one card to a node"),
        pytest.param([node(LEFT, cpus=0.5)], [card(1)], CPU, [], id="no core left"),
    ],
)
def test_where_ray_places_next(
    nodes: Sequence[NodeRoom],
    cards: Sequence[CardReport],
    needs: Mapping[str, float],
    expected: list[Place],
) -> None:
    assert places(nodes, cards, needs) == expected


FULL = thrashing(1, gpus=1.0)


@pytest.mark.parametrize(
    ("own", "others", "gpus_left", "expected"),
    [
        pytest.param([card(1)], [], 1.0, None, id="it does not thrash"),
        pytest.param([FULL], [], 1.0, "another card has room", id="the next one is empty"),
        pytest.param([FULL], [card(2)], 0.75, "another card has room", id="the next one has room"),
        pytest.param(
            [FULL], [card(2, free_bytes=39)], 0.75, "no room for", id="others are awake there"
        ),
        pytest.param(
            [FULL],
            [thrashing(2, free_bytes=100)],
            0.75,
            "no room for",
            id="the next one thrashes as well",
        ),
        pytest.param([FULL], [], 0.0, "Ray has no place", id="there is no other"),
        pytest.param(
            [thrashing(1, gpus=0.5)],
            [],
            1.5,
            "on a card that has one",
            id="Ray would fill the same one",
        ),
        pytest.param(
            [FULL, FULL], [], 1.0, "two of its replicas on one card", id="Ray did so before"
        ),
        pytest.param(
            [thrashing(1, gpus=1.0, takes_bytes=0)], [], 1.0, "not known", id="it never woke"
        ),
    ],
)
def test_another_replica_helps_where_another_card_has_room(
    own: Sequence[CardReport],
    others: Sequence[CardReport],
    gpus_left: float,
    expected: str | None,
) -> None:
    known = {report.card: report for report in (*own, *others)}
    found = crowding(own, known, known, [node(LEFT, gpus_left)], GPU)
    if expected is None:
        assert found is None
        return
    assert isinstance(found, Crowding)
    assert found.elsewhere is (expected == "another card has room")
    assert expected in found.text
    assert "30.0 times a minute, 0.25 of its time" in found.text


def test_only_one_of_those_who_make_a_card_swap_goes() -> None:
    table = CardTable()
    told = {"a": 0.1, "b": 0.15, "c": 0.15, "most": 0.3}
    for model, share in told.items():
        report = thrashing(1, own_swap_share=share)
        table.update(model, [(10.0, report)], can_grow=model != "most", oldest_s=0.0)
    assert {model: table.where_first(model) for model in told} == {
        "a": set(),
        "b": set(),
        "c": {1.0},
        "most": {1.0},  # and is told that it may have no more
    }
    assert table.where_first("unknown") == set()


def test_what_is_old_is_forgotten() -> None:
    table = CardTable()
    table.update("a", [(10.0, thrashing(1))], can_grow=True, oldest_s=0.0)
    table.update("b", [(20.0, thrashing(1, free_bytes=7))], can_grow=True, oldest_s=0.0)
    table.update("a", [(15.0, thrashing(1))], can_grow=True, oldest_s=0.0)
    assert table.cards[1.0].free_bytes == 7  # the newest word
    table.update("a", [], can_grow=True, oldest_s=30.0)
    assert table.cards == {}
    assert table.where_first("b") == set()


def test_replicas_of_a_model_on_one_card_count_together() -> None:
    table = CardTable()
    two = [(1.0, thrashing(1, own_swap_share=0.11))] * 2
    table.update("a", two, can_grow=True, oldest_s=-math.inf)
    table.update("b", [(1.0, thrashing(1, own_swap_share=0.2))], can_grow=True, oldest_s=-math.inf)
    assert table.where_first("a") == {1.0}
