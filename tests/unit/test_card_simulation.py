"""Many models on one card in simulated time: what must follow from its costs, and how near it comes to a measurement."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actors.card.config import Preempt, Terms
from actors.card.state import FREEZE_AFTER_S
from serve_app.bench.many.requests import Planned
from tests.simulation import capacity
from tests.simulation.card import SMALL, Clock, Node, Shared

MEASURED = Path(__file__).parents[2] / "docs/results/2026-11-28_h200_many/many.json"
COPY_S = SMALL.copied_bytes / SMALL.link_bytes_per_s
HOPS_S = 0.001  # an ask, and its answer
ROOM = SMALL.awake_bytes + SMALL.residue_bytes
FREEZE = Terms(min_awake_s=0.0, max_wait_s=4.0, preempt=Preempt.FREEZE)


def node(
    planned: Sequence[Planned], models: int, budget: float, terms: Terms = FREEZE, **costs: float
) -> Node:
    names = [str(number) for number in range(models)]
    made = Node(names, planned, budget, terms, replace(SMALL, **costs))  # type: ignore[arg-type]
    made.run()
    assert all(each.end_s is not None for each in made.asked)
    return made


def test_what_is_shared_goes_in_even_parts_to_who_is_there() -> None:
    clock = Clock()
    card, ends = Shared(clock), dict[str, float]()
    clock.at(0.0, lambda: card.use(1.0, lambda: ends.update(short=clock.now_s)))
    clock.at(0.0, lambda: card.use(2.0, lambda: ends.update(long=clock.now_s)))
    clock.at(5.0, lambda: card.use(1.0, lambda: ends.update(late=clock.now_s)))
    clock.run(lambda: False)
    assert ends == pytest.approx({"short": 2.0, "long": 3.0, "late": 6.0})
    assert card.busy_s == pytest.approx(4.0)


def test_one_request_takes_a_wake_its_prompt_and_its_tokens() -> None:
    found = node([Planned("0", 1.0, 1000, 11)], 1, 2 * ROOM)
    (asked,) = found.asked
    prompt_s = SMALL.step_s + 1000 * SMALL.token_s
    assert asked.was_cold
    assert asked.ttft_s == pytest.approx(HOPS_S + SMALL.wake_s + COPY_S + prompt_s)
    step_s = SMALL.step_s + SMALL.sequence_s + SMALL.host_s
    assert asked.tpot_s == pytest.approx(step_s)
    assert found.wakes == 1


def test_a_prompt_is_computed_in_steps_and_one_more_sequence_costs_little() -> None:
    found = node([Planned("0", 1.0, 4096, 2), Planned("0", 1.0, 1, 2)], 1, math.inf)
    long, short = found.asked
    two_steps_s = 2 * SMALL.step_s + SMALL.host_s + 4096 * SMALL.token_s
    assert long.ttft_s == pytest.approx(two_steps_s + SMALL.token_s, abs=2 * SMALL.sequence_s)
    assert not long.was_cold
    assert short.first_s is not None
    assert found.wakes == 0


def test_models_that_compute_at_once_switch_and_share_the_card() -> None:
    alone = node([Planned("0", 0.0, 1, 101)], 1, math.inf).asked[0]
    both = node([Planned(model, 0.0, 1, 101) for model in "01"], 2, math.inf, host_s=0.0).asked
    for each in both:
        assert each.tpot_s == pytest.approx(
            2 * (SMALL.step_s + SMALL.switch_s + SMALL.sequence_s), rel=0.03
        )
        assert each.tpot_s > 2 * alone.tpot_s


def test_two_models_and_room_for_one_swap_for_each_request() -> None:
    asked = [Planned(str(number % 2), 1.0 * number, 16, 4) for number in range(10)]
    found = node(asked, 2, ROOM + SMALL.residue_bytes)
    assert found.wakes == 10
    assert found.frozen == 0
    swap_s = SMALL.sleep_s + SMALL.wake_s + COPY_S
    for each in found.asked[1:]:
        assert each.ttft_s == pytest.approx(swap_s + SMALL.step_s, abs=0.003)


def test_busy_model_freezes_for_who_has_waited_and_loses_no_request() -> None:
    found = node(
        [Planned("0", 0.0, 16, 2000), Planned("1", 1.0, 16, 4)], 2, ROOM + SMALL.residue_bytes
    )
    long, short = found.asked
    assert found.frozen == 1
    assert found.wakes == 3
    assert FREEZE_AFTER_S < short.ttft_s < 1.0
    assert long.tokens == 2000
    assert not long.refused


def test_who_gets_no_room_in_time_is_refused() -> None:
    never = Terms(max_wait_s=0.5, preempt=Preempt.NEVER)
    found = node(
        [Planned("0", 0.0, 16, 2000), Planned("1", 1.0, 16, 4)],
        2,
        ROOM + SMALL.residue_bytes,
        never,
    )
    long, short = found.asked
    assert short.refused
    assert short.ttft_s == short.tpot_s == math.inf
    assert capacity.in_time(found.asked) == 0.5
    assert not long.refused


def test_sleepers_sleep_deep_where_their_residues_take_the_room() -> None:
    budget = ROOM + SMALL.residue_bytes // 2
    found = node([Planned(str(number), 40.0 * number, 16, 4) for number in range(3)], 2 + 1, budget)
    assert found.deep_wakes >= 1
    assert not any(each.refused for each in found.asked)


def test_sixteen_models_are_as_fast_as_they_were_on_a_card() -> None:
    result = json.loads(MEASURED.read_text(encoding="utf-8"))
    sent = result["sent"]
    arrivals = capacity.read_trace(capacity.SAMPLE)[: sent["requests"]]
    found = capacity.replay(arrivals, sent["apps"], sent["budget_bytes"], SMALL)
    says = capacity.figures(found, SMALL.http_s)
    seen = capacity.measured(result["variants"]["shared"])
    for figure in (
        "first token, p50",
        "later tokens, p50",
        "later tokens, p99",
        "of those that waited for a wake, p50",
        "wakes a minute",
        "the card computed",
    ):
        assert says[figure] == pytest.approx(seen[figure], rel=0.2), figure


def test_command_tells_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main([str(MEASURED), "--models", "2", "4", "--duration", "30"]) == 0
    told = capsys.readouterr().out
    assert "shared: measured" in told
    assert [line.split()[0] for line in told.splitlines()[-3:]] == ["models", "2", "4"]
