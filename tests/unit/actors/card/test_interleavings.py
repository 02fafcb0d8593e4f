"""Six models, one card and its ledger, in every order that hypothesis thinks of."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from actors.card.ledger import Staying
from actors.card.plan import GROWTH_QUIET_S
from tests.unit.actors.card.world import (
    BUDGET,
    MAX_AWAKE,
    MAX_WAIT_S,
    PART,
    World,
    everybody_is_served_in_turn,
    everything_settles,
)

MODELS = st.integers(0, 5)
ANSWER_S = 2.4  # of the longest; a drain takes as long


class Interleavings(RuleBasedStateMachine):
    """Requests, sleeps, deaths and messages; what is read when is the machine's to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(model=MODELS)
    def request(self, model: int) -> None:
        self.world.request(model)

    @rule(model=MODELS)
    def finish(self, model: int) -> None:
        self.world.finish(model)

    @rule(model=MODELS)
    def woken(self, model: int) -> None:
        self.world.woken(model)

    @rule(model=MODELS)
    def advance(self, model: int) -> None:
        self.world.advance(model)

    @rule(model=MODELS)
    def leave(self, model: int) -> None:
        self.world.leave(model)

    @rule(model=MODELS)
    def grow(self, model: int) -> None:
        self.world.grow(model)

    @rule(model=MODELS, size=st.integers(0, BUDGET))
    def use(self, model: int, size: int) -> None:
        self.world.use(model, size)

    @rule(model=MODELS)
    def sleep(self, model: int) -> None:
        self.world.idle_sleep(model)

    @rule(model=MODELS)
    def deepen(self, model: int) -> None:
        self.world.deepen(model)

    @rule(model=MODELS)
    def refuse(self, model: int) -> None:
        self.world.refuse(model)

    @rule()
    def read_up(self) -> None:
        self.world.deliver_up()

    @rule(model=MODELS)
    def read_down(self, model: int) -> None:
        self.world.deliver_down(model)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(model=MODELS)
    def kill_or_start(self, model: int) -> None:
        if self.world.models[model].state == "dead":
            self.world.start_again(model)
        else:
            self.world.kill(model)

    @rule()
    def kill_keeper(self) -> None:
        self.world.kill_keeper()

    @invariant()
    def no_byte_is_given_twice(self) -> None:
        world = self.world
        assert world._used() <= BUDGET
        if not world.lost_keepers:  # otherwise some went by the driver's word
            assert not world.short, "a grant that was not there"
            assert sum(model.mapped > 0 for model in world.models) <= MAX_AWAKE

    @invariant()
    def nobody_waits_beyond_the_limit(self) -> None:
        for ask in self.world.ledger._asks.values():
            late_s = self.world.now_s - ask.limit_s
            assert late_s <= 0 or self.world.now_s < self.world.gathers_until_s

    @invariant()
    def nobody_drains_for_nobody(self) -> None:
        world = self.world
        if world.now_s < world.gathers_until_s or self._somebody_waits():
            return
        assert not any(tenant.drains for tenant in world.ledger._tenants.values())
        if world.outbox:
            return  # the keeper has not heard of all that there is
        for model in world.models:
            if model.state == "draining":
                told = [each.number for each in model.inbox if isinstance(each, Staying)]
                assert model.draining_for in told

    def _somebody_waits(self) -> bool:
        return any(not ask.grows for ask in self.world.ledger._asks.values())

    def teardown(self) -> None:
        for model in self.world.models:
            model.refuses = False
        everything_settles(self.world)
        everybody_is_served_in_turn(self.world)


class AroundADrain(Interleavings):
    """Begins where a busy model has been told to drain, and who waited has left; neither side has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = busy_model_and_who_waits(4, 3)
        self.world.leave(3)


class AroundTheNextKeeper(Interleavings):
    """Begins where a busy model drains, and its keeper is gone and who waited, too. The next one knows that."""

    def __init__(self) -> None:
        super().__init__()
        self.world = busy_model_and_who_waits(4, 3)
        _read_all(self.world)
        self.world.kill_keeper()
        self.world.leave(3)
        self.world.deliver_all_up()


def busy_model_and_who_waits(busy: int, waits: int) -> World:
    """Until the order is on its way."""
    world = World()
    world.request(busy)
    _read_all(world)
    world.woken(busy)
    world.advance(busy)
    world.request(waits)
    world.deliver_all_up()
    while not world.models[busy].inbox:
        world.tick(0.1)
    return world


def _run(examples: int, machine: type[Interleavings] = Interleavings) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_thousand_interleavings() -> None:
    _run(1000)


def test_interleavings_around_a_drain() -> None:
    _run(300, AroundADrain)


def test_interleavings_around_the_next_keeper() -> None:
    _run(300, AroundTheNextKeeper)


@pytest.mark.slow
def test_ten_thousand_interleavings() -> None:
    _run(10_000)


def test_models_alone_have_all_of_the_card_and_give_it_back() -> None:
    world = World()
    for round_ in range(12):
        index = (0, 2)[round_ % 2]
        world.tick(1.5)  # the one before may have to make room
        world.request(index)
        _read_all(world)
        world.woken(index)
        for _ in range(20):
            world.grow(index)
            _read_all(world)
        _read_all(world)
        assert world.ledger.card().free < PART
        world.finish(index)
        _read_all(world)
    assert world.given_back > 0
    assert not world.short
    assert [world.models[i].state for i in (0, 2)] == ["awake", "awake"], "nobody had to sleep"
    everything_settles(world)


def test_idle_neighbour_sleeps_for_a_busy_model_that_is_short_of_cache() -> None:
    world = World()
    for index in (4, 1):
        world.request(index)
        _read_all(world)
        world.woken(index)
    world.finish(4)
    idle, busy = world.models[4], world.models[1]

    def grow(until_s: float) -> None:
        while world.now_s < until_s:
            world.grow(1)
            _read_all(world)
            world.tick(0.1)

    grow(GROWTH_QUIET_S - 0.2)
    assert (idle.state, busy.grown) == ("awake", PART)
    grow(GROWTH_QUIET_S + 2.0)
    assert (idle.state, busy.state) == ("asleep", "awake")
    assert world.ledger.card().free < PART
    world.request(4)  # it has its room back
    for _ in range(20):
        world.tick(0.1)
        _read_all(world)
        world.woken(4)
    assert idle.state == "awake"
    assert not world.refused
    everything_settles(world)


def test_model_that_drains_goes_on_when_who_waited_has_left() -> None:
    world = busy_model_and_who_waits(4, 3)
    _read_all(world)
    model = world.models[4]
    assert model.state == "draining"
    world.request(4)
    world.leave(3)
    _read_all(world)
    assert (model.state, model.in_flight, model.waiting) == ("awake", 2, [])
    assert world.stayed == 1
    everything_settles(world)


@pytest.mark.parametrize("waits", [True, False])
def test_model_that_drains_when_its_keeper_dies_goes_on_if_nobody_waits(waits: bool) -> None:
    world = busy_model_and_who_waits(4, 3)
    _read_all(world)
    world.kill_keeper()
    if not waits:
        world.leave(3)
    world.deliver_all_up()
    world.tick(1.0)
    _read_all(world)
    assert world.models[4].state == ("draining" if waits else "awake")
    assert world.stayed == (not waits)
    everything_settles(world)


def _read_all(world: World) -> None:
    for _ in range(4):
        world.deliver_all_up()
        for index in range(len(world.models)):
            while world.models[index].inbox:
                world.deliver_down(index)
    world.deliver_all_up()


def test_waits_of_a_quiet_server_are_within_the_limit() -> None:
    """Where messages are read at once, whoever waits knows within `max_wait_s`, and the drain he came into."""
    world = World()
    for round_ in range(60):
        world.request((round_ * 5) % 6)
        for _ in range(3):
            world.deliver_all_up()
            for index in range(6):
                while world.models[index].inbox:
                    world.deliver_down(index)
                world.woken(index)
                world.advance(index)
        world.deliver_all_up()
        world.tick(0.4)
        world.finish(round_ % 6)
    everything_settles(world)
    assert max(world.answered + world.refused) <= MAX_WAIT_S + ANSWER_S
    assert len(world.answered) >= 20  # of 60, on a card for two at a time
