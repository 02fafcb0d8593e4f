"""When a worker asks for more KV cache, and when it does not."""

from actors.worker.kv_demand import ASK_AGAIN_S, KvDemand


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.next_part = 7
        self.told: list[int] = []
        self.demand = KvDemand(lambda: self.next_part, self.told.append, lambda: self.now_s)


def test_one_question_until_it_is_answered() -> None:
    world = World()
    for _ in range(3):
        world.demand.short()
    assert world.told == [7]
    world.demand.answered(granted=True)
    world.demand.short()
    assert world.told == [7, 7]


def test_who_was_refused_asks_again_a_little_later() -> None:
    world = World()
    world.demand.short()
    world.demand.answered(granted=False)
    world.demand.short()
    assert world.told == [7]
    world.now_s = ASK_AGAIN_S
    world.demand.short()
    assert world.told == [7, 7]


def test_nobody_asks_for_more_than_there_can_be() -> None:
    world = World()
    world.next_part = 0
    world.demand.short()
    assert world.told == []
    world.next_part = 3
    world.demand.short()
    assert world.told == [3]
