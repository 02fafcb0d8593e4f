"""A card's account over time: what messages that cross do to it, and what it says."""

from collections.abc import Callable

import msgspec
import pytest

from actors.card.config import Preempt, Terms
from actors.card.ledger import (
    CardLedger,
    Decision,
    Granting,
    Ordering,
    Refusing,
    Shrinking,
    Staying,
    Waiting,
)
from actors.card.messages import Account, KvNow, Sight
from actors.card.plan import RECENT_S
from actors.protocol import CardTenant, CardWait

ASLEEP = Account(process_id=1)
AWAKE = Account(process_id=1, held=60, awake=True, read_ask=1, awake_s=10.0, quiet_s=10.0)


def ledger(*names: str, budget: int = 100) -> CardLedger:
    book = CardLedger(budget, None)
    for name in names:
        book.join(name, name, Terms(), ASLEEP, 0.0)
    return book


def wants(book: CardLedger, name: str, size: int = 60, number: int = 1, at_s: float = 20.0) -> None:
    book.ask(name, number, size, True, at_s, 10.0)


def decide(book: CardLedger, at_s: float = 20.0) -> list[Decision]:
    return list(book.decide(at_s))


def test_two_first_requests_at_once_get_one_grant_each() -> None:
    """LM Studio #1751: parallel first requests loaded several copies."""
    book = ledger("a", "b")
    wants(book, "a")
    wants(book, "b")
    assert decide(book) == [
        Granting("a", 1, at_once=True),
        Waiting("b", 1, "a must end first"),
    ]
    assert decide(book) == []
    assert book.card().free == 40


def test_account_that_crosses_a_grant_does_not_undo_it() -> None:
    book = ledger("a", "b")
    wants(book, "a")
    decide(book)
    book.account("a", ASLEEP, 20.0)  # sent before the grant was read
    assert book.card().free == 40
    book.account("a", AWAKE, 20.1)
    assert book.card().free == 40
    book.account("a", Account(process_id=1, read_ask=1), 20.2)  # the wake was refused by the driver
    assert book.card().free == 100


def test_grant_that_nobody_wanted_any_more_comes_back() -> None:
    book = ledger("a")
    wants(book, "a")
    decide(book)
    book.withdraw("a", 1)
    book.account("a", Account(process_id=1, read_ask=1), 20.0)
    assert book.card().free == 100


GROWN = msgspec.structs.replace(AWAKE, held=90, kv=KvNow(50, 60, 40, 40))


def test_cache_that_is_given_back_is_granted_once() -> None:
    book = ledger("a", "b", "c")
    book.account("a", GROWN, 10.0)
    wants(book, "b", 30)
    wants(book, "c", 20)
    orders = [each for each in decide(book) if isinstance(each, Shrinking)]
    assert [(each.tenant, each.shrink.size) for each in orders] == [("a", 20)]
    less = msgspec.structs.replace(GROWN, held=70, kv=KvNow(30, 60, 20, 20), answered_order=0)
    book.account("a", less, 20.1)
    granted, order = [d for d in decide(book, 20.1) if isinstance(d, Granting | Shrinking)]
    assert granted == Granting("b", 1, at_once=False)
    assert isinstance(order, Shrinking)
    assert order.shrink.size == 20


def test_growth_counts_from_its_grant_on_and_no_longer_once_it_is_told() -> None:
    book = ledger("a")
    book.account("a", AWAKE, 10.0)
    book.ask("a", 2, 30, False, 20.0, 1.0, grows=True)
    assert decide(book) == [Granting("a", 2, at_once=True)]
    assert book.card().free == 10
    book.account("a", AWAKE, 20.0)  # sent before the grant was read
    assert book.card().free == 10
    tenant = book.card().tenant("a")
    assert tenant.awake
    assert not tenant.moving
    book.account("a", msgspec.structs.replace(AWAKE, held=90, read_ask=2), 20.1)
    assert book.card().free == 10


def test_growth_that_is_not_free_is_refused_at_once_and_idle_caches_shrink() -> None:
    book = ledger("a", "b")
    book.account("a", msgspec.structs.replace(GROWN, held=60), 10.0)
    book.account("b", msgspec.structs.replace(AWAKE, held=40, busy=True), 10.0)
    book.ask("b", 2, 10, False, 20.0, 1.0, grows=True)
    refused, order = decide(book)
    assert isinstance(refused, Refusing)
    assert isinstance(order, Shrinking)
    assert (order.tenant, order.shrink.size) == ("a", 10)
    less = msgspec.structs.replace(GROWN, held=50, kv=KvNow(50, 60, 30, 30), answered_order=0)
    book.account("a", less, 20.1)
    book.ask("b", 3, 10, False, 20.2, 1.0, grows=True)
    assert decide(book, 20.2) == [Granting("b", 3, at_once=True)]


def test_who_was_quiet_for_long_sleeps_for_growth_once() -> None:
    book = ledger("a", "b")
    book.account("a", msgspec.structs.replace(AWAKE, held=60), 10.0)
    book.account("b", msgspec.structs.replace(AWAKE, held=40, busy=True), 10.0)
    late_s = 20.0 + RECENT_S
    book.ask("b", 2, 10, False, late_s, 1.0, grows=True)
    refused, order = decide(book, late_s)
    assert isinstance(refused, Refusing)
    assert isinstance(order, Ordering)
    assert (order.tenant, order.evict.mode) == ("a", None)
    book.ask("b", 3, 10, False, late_s, 1.0, grows=True)
    (refused,) = decide(book, late_s)
    assert isinstance(refused, Refusing)
    asleep = Account(process_id=1, answered_order=order.number)
    book.account("a", asleep, late_s + 0.1)
    book.ask("b", 4, 10, False, late_s + 0.1, 1.0, grows=True)
    assert decide(book, late_s + 0.1) == [Granting("b", 4, at_once=True)]
    assert book.sight("b").swaps == 0


def test_who_gave_nothing_is_not_asked_without_end() -> None:
    book = ledger("a", "b")
    book.account("a", msgspec.structs.replace(GROWN, busy=True), 10.0)
    wants(book, "b", 30)
    assert any(isinstance(each, Shrinking) for each in decide(book))
    still = msgspec.structs.replace(GROWN, busy=True, answered_order=0)
    book.account("a", still, 20.0)
    assert not any(isinstance(each, Shrinking) for each in decide(book))
    assert book.next_s <= 20.2
    assert any(isinstance(each, Shrinking) for each in decide(book, 20.3))


def test_order_that_could_not_be_followed_goes_to_somebody_else() -> None:
    """Ollama #17408: a request revived the victim while another model waited for it, for ever."""
    book = ledger("a", "b", "c")
    book.account("a", AWAKE, 20.0)
    book.account("b", Account(process_id=1, held=40, awake=True, awake_s=9.0, quiet_s=1.0), 20.0)
    wants(book, "c", 40)
    order, waiting = decide(book)
    assert isinstance(order, Ordering)
    assert order.tenant == "a"
    assert isinstance(waiting, Waiting)
    revived = Account(
        process_id=1, held=60, awake=True, busy=True, awake_s=10.0, answered_order=order.number
    )
    book.account("a", revived, 20.1)
    again, _ = decide(book, 20.1)
    assert isinstance(again, Ordering)
    assert again.tenant == "b"


BUSY = msgspec.structs.replace(AWAKE, busy=True)


def draining_for(*names: str) -> CardLedger:
    """A card whose one model, `a`, was told to drain for these."""
    book = ledger("a", *names)
    book.account("a", BUSY, 20.0)
    for name in names:
        wants(book, name)
    decide(book, 20.0)
    assert [d.number for d in decide(book, 22.5) if isinstance(d, Ordering)] == [0]
    return book


def stayed(book: CardLedger, at_s: float) -> list[tuple[str, int]]:
    return [(d.tenant, d.number) for d in decide(book, at_s) if isinstance(d, Staying)]


@pytest.mark.parametrize(
    ("leave", "at_s"),
    [
        (lambda book: book.withdraw("b", 1), 23.0),  # its clients have
        (lambda book: book.lose("b"), 23.0),  # with its replica
        (lambda book: book.end("b"), 23.0),
        (lambda book: book.join("b", "b", Terms(), ASLEEP, 23.0), 23.0),
        (lambda book: None, 30.0),  # its limit has passed
    ],
)
def test_drain_is_taken_back_when_who_wanted_it_has_left(
    leave: Callable[[CardLedger], None], at_s: float
) -> None:
    book = draining_for("b")
    assert stayed(book, 22.6) == []
    leave(book)
    assert stayed(book, at_s) == [("a", 0)]
    assert stayed(book, at_s) == [], "once"
    assert not book.card().tenant("a").leaving


def test_drain_goes_on_for_the_next_who_waits() -> None:
    book = draining_for("b", "c")
    book.ask("b", 2, 10, False, 23.0, 1.0, grows=True)
    book.withdraw("b", 1)
    assert stayed(book, 23.0) == []
    book.withdraw("c", 1)
    assert stayed(book, 23.0) == [("a", 0)]


def test_nothing_is_taken_back_of_who_has_answered_or_is_gone() -> None:
    for tell in (
        lambda book: book.account("a", msgspec.structs.replace(BUSY, answered_order=0), 22.6),
        lambda book: book.account("a", Account(process_id=1, read_ask=1, answered_order=0), 22.6),
        lambda book: book.lose("a"),
        lambda book: book.end("a"),
    ):
        book = draining_for("b")
        tell(book)
        book.withdraw("b", 1)
        assert stayed(book, 22.6) == []


def test_who_fell_asleep_all_the_same_has_given_its_room() -> None:
    book = draining_for("b")
    book.withdraw("b", 1)
    assert stayed(book, 23.0) == [("a", 0)]
    wants(book, "b", number=2, at_s=23.0)
    assert not [d for d in decide(book, 23.0) if isinstance(d, Granting)], "not before it says so"
    book.account("a", Account(process_id=1, read_ask=1, answered_order=0), 23.1)
    assert decide(book, 23.1) == [Granting("b", 2, at_once=False)]


def test_who_stays_may_be_asked_again() -> None:
    book = draining_for("b")
    book.withdraw("b", 1)
    assert stayed(book, 23.0) == [("a", 0)]
    wants(book, "b", number=2, at_s=23.0)
    decide(book, 23.0)
    (order, _) = decide(book, 25.5)
    assert isinstance(order, Ordering)
    book.account("a", msgspec.structs.replace(BUSY, answered_order=0), 25.6)  # the first one
    assert book.card().tenant("a").leaving
    book.account("a", Account(process_id=1, read_ask=1, answered_order=1), 25.7)
    assert decide(book, 25.7) == [Granting("b", 2, at_once=False)]


def test_who_follows_an_order_of_the_keeper_before_is_on_its_way_until_it_has_answered() -> None:
    book = ledger("b")
    book.join("a", "a", Terms(), BUSY, 20.0, order=7)
    wants(book, "b")
    assert decide(book) == [Waiting("b", 1, "a on the way to make room")]
    book.account("a", Account(process_id=1, read_ask=1, answered_order=7), 20.1)
    assert decide(book, 20.1) == [Granting("b", 1, at_once=False)]


def test_wait_that_an_order_ends_is_told_once() -> None:
    book = ledger("a", "b")
    book.account("a", AWAKE, 20.0)
    wants(book, "b")
    assert decide(book)[1:] == [Waiting("b", 1, "a on the way to make room")]
    book.account("a", AWAKE, 20.1)
    assert decide(book, 20.1) == []


def test_answer_to_an_order_of_the_keeper_before_is_none_to_a_later_one() -> None:
    book = ledger("b")
    book.join("a", "a", Terms(), BUSY, 20.0, order=7)
    assert stayed(book, 20.0) == [("a", 7)]
    wants(book, "b")
    decide(book, 20.0)
    order = next(each for each in decide(book, 22.6) if isinstance(each, Ordering))
    book.account("a", msgspec.structs.replace(BUSY, answered_order=7), 22.7)
    assert book.card().tenant("a").leaving
    book.account("a", msgspec.structs.replace(BUSY, answered_order=order.number), 22.8)
    assert not book.card().tenant("a").leaving


def test_turns_that_are_cut_short_count_until_everybody_has_had_a_token() -> None:
    book = CardLedger(100, None)
    for name in ("a", "b"):
        book.join(name, name, Terms(preempt=Preempt.FREEZE), ASLEEP, 0.0)
    busy = Account(process_id=1, held=60, awake=True, busy=True, reached=False, awake_s=6.0)

    def freeze(number: int, at_s: float) -> None:
        """A turn of `a`, which `b` ends."""
        book.account("a", msgspec.structs.replace(busy, read_ask=number), at_s)
        wants(book, "b", number=number, at_s=at_s)
        orders = [each for each in decide(book, at_s + 9) if isinstance(each, Ordering)]
        assert [order.tenant for order in orders] == ["a"]
        left = msgspec.structs.replace(busy, held=0, awake=False, answered_order=orders[0].number)
        book.account("a", left, at_s + 9)
        book.withdraw("b", number)

    for turn in range(1, 4):
        freeze(turn, 100.0 * turn)
        assert book.card().tenant("a").cut_short == turn
    wants(book, "a", number=4, at_s=500.0)
    decide(book, 500.0)  # granted, and on its way
    assert book.card().tenant("a").cut_short == 3
    book.account("a", msgspec.structs.replace(busy, read_ask=4, reached=True), 501.0)
    assert book.card().tenant("a").cut_short == 0


def test_idle_models_and_those_that_are_frozen_are_not_told_to_stay() -> None:
    """They sleep as soon as they are told to."""
    for account, preempt in ((AWAKE, Preempt.DRAIN), (BUSY, Preempt.FREEZE)):
        book = ledger("b")
        book.join("a", "a", Terms(preempt=preempt), account, 10.0)
        wants(book, "b")
        decide(book, 20.0)
        decide(book, 22.5)
        assert book.card().tenant("a").leaving
        book.withdraw("b", 1)
        assert stayed(book, 22.6) == []


def test_sleeper_that_cannot_sleep_deep_now_is_asked_again_later() -> None:
    book = ledger("a", "b")
    sleeper = Account(process_id=1, residue=5)
    book.account("a", sleeper, 20.0)
    wants(book, "b", 100)
    order, _ = decide(book)
    assert isinstance(order, Ordering)
    assert order.evict.deep
    refused = msgspec.structs.replace(sleeper, answered_order=order.number)
    book.account("a", refused, 20.1)
    (waiting,) = decide(book, 20.1)
    assert isinstance(waiting, Waiting)
    again, _ = decide(book, book.next_s)
    assert isinstance(again, Ordering)
    book.account(
        "a", msgspec.structs.replace(refused, residue=0, answered_order=again.number), 20.9
    )
    assert decide(book, 20.9) == [Granting("b", 1, at_once=False)]


def test_sleeper_that_waits_for_room_itself_is_not_asked_to_sleep_deep() -> None:
    book = ledger("a", "b")
    book.account("a", Account(process_id=1, residue=5), 20.0)
    wants(book, "b", 100)
    wants(book, "a", number=7)
    assert {type(each) for each in decide(book)} == {Waiting}
    book.withdraw("a", 7)
    assert any(isinstance(each, Ordering) for each in decide(book))


def test_nobody_small_overtakes_who_waits_for_more() -> None:
    book = ledger("a", "b", "c")
    book.account("a", AWAKE, 20.0)
    wants(book, "b", 90, at_s=20.0)
    wants(book, "c", 10, at_s=20.1)
    told = decide(book, 20.1)
    assert [d.tenant for d in told if isinstance(d, Ordering)] == ["a"]
    assert not [d for d in told if isinstance(d, Granting)]
    book.account("a", Account(process_id=1, read_ask=1, answered_order=0), 20.2)
    assert decide(book, 20.2) == [Granting("b", 1, at_once=False), Granting("c", 1, at_once=False)]


def test_memory_of_a_lost_replica_is_back_when_its_process_has_ended() -> None:
    book = ledger("a", "b")
    book.account("a", AWAKE, 20.0)
    book.lose("a")
    wants(book, "b")
    assert not [d for d in decide(book) if isinstance(d, Granting)]
    book.end("a")
    assert decide(book) == [Granting("b", 1, at_once=False)]


def test_refusal_says_when_to_come_back() -> None:
    book = ledger("a", "b")
    book.account("a", Account(process_id=1, held=100, awake=True, busy=True, moving=True), 20.0)
    wants(book, "b")
    decide(book)
    assert book.next_s == 25.0  # half of the wait: it may come before others then
    decide(book, 25.0)
    assert book.next_s == 30.0
    (refusing,) = decide(book, 30.0)
    assert isinstance(refusing, Refusing)
    assert refusing.refuse.ever
    assert refusing.retry_after_s >= 1


def test_drift_is_believed_when_it_is_seen_twice() -> None:
    book = ledger("a")
    assert book.read_device(100, 70, short=False) == 0
    assert book.card().free == 100
    assert book.read_device(100, 70, short=False) == 30
    assert book.card().free == 70
    assert book.read_device(100, 100, short=False) == 30
    assert book.card().free == 100
    assert book.read_device(100, 105, short=False) == 0
    assert book.read_device(100, 110, short=False) == -5


def test_no_figure_counts_while_somebody_moves() -> None:
    """A neighbour that has read its grant is about to map: its account has the memory, the device has not."""
    book = ledger("a", "b")
    for _ in range(2):
        book.account("b", msgspec.structs.replace(AWAKE, moving=True), 20.0)
        assert book.read_device(100, 100, short=False) is None
    book.account("b", AWAKE, 20.1)
    assert [book.read_device(100, 40, short=False) for _ in range(2)] == [0, 0]


def test_grant_that_was_not_there_is_drift_at_once() -> None:
    book = ledger("a")
    assert book.read_device(100, 30, short=True) == 70
    assert book.card().free == 30


def test_figure_from_outside_counts_where_strangers_have_less_than_was_thought() -> None:
    book = ledger("a")
    book.read_device(100, 70, short=True)
    wants(book, "a", 80)
    decide(book)
    assert book.waits_beside_strangers
    for free in (70, 65, 60, 60):
        assert book.read_from_outside(100, free) is None
        assert book.card().foreign == 30
    book.read_from_outside(100, 95)
    assert book.card().foreign == 5
    assert decide(book) == [Granting("a", 1, at_once=False)]
    assert not book.waits_beside_strangers


def test_others_may_have_what_the_budget_leaves() -> None:
    book = ledger("a")
    book.read_device(150, 110, short=True)
    assert book.card().free == 100


def test_status_tells_who_has_what_and_what_ends_each_wait() -> None:
    book = ledger("a", "b")
    book.account("a", msgspec.structs.replace(AWAKE, residue=5, kv=KvNow(20, 40), busy=True), 10.0)
    wants(book, "b")
    told = book.status("card", 120, 21.0)
    assert (told.id, told.total, told.budget, told.held) == ("card", 120, 100, 65)
    assert told.tenants == (
        CardTenant("a", "a", 60, 5, True, 20, 40, moving=False),
        CardTenant("b", "b", 0, 0, False, 0, 0, moving=False),
    )
    assert told.waiting == (CardWait("b", "b", 60, 1.0, 10.0, ""),), "nothing is decided"
    assert decide(book, 21.0) == [Waiting("b", 1, "a may have to make room in 1.5 s")]
    assert decide(book, 21.5) == [], "the clock alone is no news"
    (wait,) = book.status("card", 120, 22.0).waiting
    assert wait == CardWait("b", "b", 60, 2.0, 10.0, "a may have to make room", 0.5)
    assert [type(each) for each in decide(book, 22.5)] == [Ordering, Waiting]
    told = book.status("card", 120, 22.5)
    assert told.tenants[0].moving
    assert (told.waiting[0].reason, told.waiting[0].turn_in_s) == (
        "a on the way to make room",
        None,
    )


def test_status_is_dated_by_when_it_became_so() -> None:
    book = ledger("a")
    assert [book.status("card", 100, at_s).seen_s for at_s in (1.0, 2.0)] == [1.0, 1.0]
    book.account("a", AWAKE, 3.0)
    assert [book.status("card", 100, at_s).seen_s for at_s in (4.0, 5.0)] == [4.0, 4.0]
    book.account("a", ASLEEP, 6.0)
    assert book.status("card", 100, 7.0).seen_s == 7.0, "as it was once is another time"


def test_status_tells_of_others_what_was_seen_twice() -> None:
    book = ledger("a", budget=90)
    book.read_device(100, 60, short=False)
    assert (book.status("card", 100, 1.0).others, book.status("card", 100, 1.0).drift) == (0, 40)
    book.read_device(100, 70, short=False)
    told = book.status("card", 100, 2.0)
    assert (told.others, told.drift) == (30, 30)
    assert book.card().free == 70, "ten of them are behind the budget's end"


def test_swap_is_a_wake_that_others_slept_for_and_costs_what_the_woken_one_says() -> None:
    book = ledger("a", "b", "c")
    book.account("a", AWAKE, 20.0)
    book.account("b", Account(process_id=1, swap_s=0.3), 20.0)
    wants(book, "c", 40)
    decide(book)  # there is room: no swap
    book.account("c", Account(process_id=1, held=40, awake=True, busy=True, read_ask=1), 20.1)
    assert book.sight("c") == Sight()
    wants(book, "b")
    decide(book)
    assert book.sight("b").swaps == 0  # nobody sleeps yet
    book.account("a", Account(process_id=1, read_ask=1, answered_order=0), 20.2)
    decide(book, 20.2)
    assert book.sight("b") == Sight(swaps=1, swap_s=0.3, own_swap_s=0.3)
    assert book.sight("a") == Sight(swaps=1, swap_s=0.3)


def test_swap_that_nobody_waits_for_any_more_is_none() -> None:
    book = ledger("a", "b")
    book.account("a", AWAKE, 20.0)
    wants(book, "b")
    decide(book)
    book.withdraw("b", 1)
    book.account("a", Account(process_id=1, read_ask=1, answered_order=0), 20.2)
    wants(book, "b", number=2, at_s=20.3)
    assert decide(book, 20.3) == [Granting("b", 2, at_once=True)]
    assert book.sight("b").swaps == 0


def test_sight_of_a_card_leaves_out_what_others_wait_for() -> None:
    book = ledger("a", "b", "c")
    book.account("a", AWAKE, 20.0)
    assert (book.sight("b").free, book.sight("b").waiting) == (40, 0)
    wants(book, "b", 90)
    assert (book.sight("c").free, book.sight("c").waiting) == (0, 1)
    book.ask("a", 2, 10, False, 20.0, 1.0, grows=True)  # growth waits for nothing
    assert book.sight("c").waiting == 1


def test_sight_has_no_room_where_no_more_may_be_awake_and_counts_what_ray_has_set_aside() -> None:
    book = CardLedger(100, 1)
    book.join("a", "a", Terms(), AWAKE, 0.0, 0.25)
    book.join("b", "b", Terms(), ASLEEP, 0.0, 0.5)
    assert (book.sight("b").free, book.sight("b").gpus) == (0, 0.75)
    book.end("a")
    assert (book.sight("b").free, book.sight("b").gpus) == (100, 0.5)
