"""Who is asked first, given what is known of the replicas."""

from dataclasses import replace
from itertools import permutations

import pytest

from actors.protocol import CardRoom, ChatPrompt, Prompt, ReplicaState
from serve_app.routing.rank import Candidate, PrefixMemory, prefix_key, rank
from serve_app.signals.news import RoutingNews, RoutingReport, newest_report

AWAKE, DRAINING, ASLEEP = ReplicaState.AWAKE, ReplicaState.DRAINING, ReplicaState.ASLEEP
WAKING, FAILED = ReplicaState.WAKING, ReplicaState.FAILED
FREE, EVICT, QUEUE = CardRoom.FREE, CardRoom.EVICT, CardRoom.QUEUE
LIMIT = 4


def replica(
    name: str,
    state: ReplicaState | None,
    in_flight: int | None = 0,
    *,
    held: bool = False,
    local: bool = False,
    just_sent: bool = False,
    room: CardRoom = CardRoom.FREE,
    waiting: int = 0,
    deep: bool = False,
) -> Candidate:
    report = None if state is None else RoutingReport(1, state, held, room, waiting, deep)
    return Candidate(name, report, in_flight, LIMIT, local, just_sent)


@pytest.mark.parametrize(
    ("candidates", "order"),
    [
        pytest.param([], [], id="nobody"),
        pytest.param(
            [replica("a", ASLEEP), replica("b", WAKING), replica("c", AWAKE, 3)],
            [["c"], ["b"], ["a"]],
            id="awake before waking before asleep, however busy",
        ),
        pytest.param(
            [replica("a", AWAKE, 2), replica("b", AWAKE, 1), replica("c", AWAKE, 1)],
            [["b"], ["c"], ["a"]],
            id="fewest in flight, then the oldest",
        ),
        pytest.param(
            [replica("a", AWAKE, 4), replica("b", WAKING), replica("c", ASLEEP)],
            [["a"], ["b"], ["c"]],
            id="a full one is asked again before one is woken",
        ),
        pytest.param(
            [
                replica("a", ASLEEP, room=EVICT),
                replica("b", ASLEEP, deep=True),
                replica("c", ASLEEP, room=EVICT, deep=True),
                replica("d", ASLEEP),
            ],
            [["d"], ["b"], ["a"], ["c"]],
            id="who sleeps deep takes longer to wake; to put another one to sleep costs that one's next request",
        ),
        pytest.param(
            [replica("a", AWAKE, 4), replica("b", AWAKE, 5), replica("c", AWAKE, 3)],
            [["c"], ["a", "b"]],
            id="full ones are asked all at once",
        ),
        pytest.param(
            [replica("a", AWAKE, 4), replica("b", WAKING, 4), replica("c", ASLEEP)],
            [["a"], ["b"], ["c"]],
            id="the waking one is full, too",
        ),
        pytest.param(
            [replica("a", ASLEEP), replica("b", ASLEEP, just_sent=True)],
            [["b"], ["a"]],
            id="whom we just sent a request wakes already",
        ),
        pytest.param(
            [replica("a", ASLEEP), replica("b", ASLEEP, local=True)],
            [["a"], ["b"]],
            id="every router wakes the same one, wherever it runs",
        ),
        pytest.param(
            [
                replica("a", ASLEEP, room=QUEUE, waiting=1),
                replica("b", ASLEEP, room=EVICT),
                replica("c", ASLEEP),
                replica("d", ASLEEP),
                replica("e", AWAKE, 3),
            ],
            [["e"], ["c"], ["d"], ["b"], ["a"]],
            id="whose card has room, then who must have others sleep, then whose card has a queue",
        ),
        pytest.param(
            [
                replica("a", ASLEEP, room=QUEUE, waiting=3),
                replica("b", ASLEEP, room=QUEUE, waiting=1),
                replica("c", WAKING, room=QUEUE, waiting=1),
            ],
            [["c"], ["b"], ["a"]],
            id="the shortest queue, and of equal ones that which it stands in",
        ),
        pytest.param(
            [replica("a", WAKING, 1, room=QUEUE, waiting=1), replica("b", ASLEEP, room=EVICT)],
            [["b"], ["a"]],
            id="one that waits for room is not as good as waking",
        ),
        pytest.param(
            [replica("a", WAKING), replica("b", ASLEEP)],
            [["a"], ["b"]],
            id="one that has its room is",
        ),
        pytest.param(
            [replica("a", ASLEEP), replica("b", ASLEEP, room=EVICT, just_sent=True)],
            [["b"], ["a"]],
            id="whom we just sent a request makes its room already",
        ),
        pytest.param(
            [replica("a", ASLEEP, 4), replica("b", ASLEEP, room=EVICT)],
            [["a"], ["b"]],
            id="a full one is asked again before others have to sleep",
        ),
        pytest.param(
            [replica("a", ASLEEP), replica("b", DRAINING)],
            [["a"], ["b"]],
            id="a draining one serves last",
        ),
        pytest.param(
            [replica("a", AWAKE, None), replica("b", AWAKE, 0)],
            [["a"], ["b"]],
            id="in flight unknown: the router asks",
        ),
        pytest.param(
            [replica("a", WAKING), replica("b", None), replica("c", AWAKE, 3)],
            [["c"], ["b"], ["a"]],
            id="one that told nothing has just started",
        ),
        pytest.param(
            [replica("a", AWAKE), replica("b", AWAKE, local=True)],
            [["b"], ["a"]],
            id="on the same node",
        ),
        pytest.param(
            [replica("a", AWAKE, 0), replica("b", AWAKE, 1, local=True)],
            [["a"], ["b"]],
            id="but not with more in flight",
        ),
        pytest.param(
            [replica("a", FAILED), replica("b", ASLEEP, held=True), replica("c", AWAKE, 4)],
            [["c"]],
            id="who would refuse is not asked while another may have room later",
        ),
        pytest.param(
            [replica("a", FAILED), replica("b", ASLEEP, held=True)],
            [["b"]],
            id="if all would refuse, the client learns why",
        ),
        pytest.param(
            [replica("a", FAILED), replica("b", FAILED)],
            [],
            id="a failed one is not asked: what comes in its place is waited for",
        ),
    ],
)
def test_order(candidates: list[Candidate], order: list[list[str]]) -> None:
    assert rank(candidates) == order


@pytest.mark.parametrize(
    ("states", "avoid", "order"),
    [
        ([AWAKE, ASLEEP], {"0"}, [["1"]]),  # another card's replica wakes
        ([ASLEEP, ASLEEP], {"0"}, [["1"]]),
        ([AWAKE, FAILED], {"0"}, [["0"]]),  # there is no other
        ([ASLEEP], {"0"}, [["0"]]),
    ],
)
def test_who_could_not_serve_a_request_is_avoided_while_there_is_another(
    states: list[ReplicaState], avoid: set[str], order: list[list[str]]
) -> None:
    candidates = [replica(str(i), state) for i, state in enumerate(states)]
    assert rank(candidates, avoid=avoid) == order


def test_few_requests_stay_with_the_oldest_up_to_what_it_is_meant_to_have() -> None:
    def first(*in_flight: int) -> str:
        candidates = [replica(f"{i}", AWAKE, n) for i, n in enumerate(in_flight)]
        return rank(candidates, packed_requests=2)[0][0]

    assert first(0, 0, 0) == "0"
    assert first(1, 0, 0) == "0"
    assert first(2, 0, 0) == "1"
    assert first(2, 1, 0) == "1"
    assert first(3, 2, 2) == "1"
    assert first(2, 2, 1) == "2"


def test_a_prefix_is_worth_a_few_requests_more_where_work_is_done_anyway() -> None:
    def first(a: int, b: int, packed: float = 0.0) -> str:
        candidates = [replica("a", AWAKE, a), replica("b", AWAKE, b)]
        roomy = [replace(each, limit=16) for each in candidates]
        return rank(roomy, packed, favourite="b")[0][0]

    assert first(1, 1) == "b"
    assert first(0, 3) == "b"
    assert first(1, 4) == "b"
    assert first(0, 4) == first(1, 5) == first(2, 9) == "a"
    assert first(0, 0) == "a"  # b may fall asleep
    assert first(2, 2, packed=3) == "a"
    assert first(3, 3, packed=3) == "b"


def test_everybody_is_ranked_once() -> None:
    states = (AWAKE, WAKING, ASLEEP, DRAINING)
    for in_flight in permutations((None, 0, 3, 4)):
        candidates = [
            replica(f"{state}", state, n) for state, n in zip(states, in_flight, strict=True)
        ]
        names = [name for names in rank(candidates) for name in names]
        assert sorted(names) == sorted(states)


# --- prefixes ---


def test_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "You are terse. " * 100}
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    first = prefix_key(ChatPrompt((system, turns[0])))
    assert first is not None
    assert prefix_key(ChatPrompt((system, *turns, turns[0]))) == first
    other = system | {"content": "You are verbose. " * 100}
    assert prefix_key(ChatPrompt((other, *turns))) != first


@pytest.mark.parametrize(
    "prompt", ["short", (1, 2, 3), ChatPrompt(({"role": "user", "content": "Hello"},))]
)
def test_short_prompts_share_no_pages(prompt: Prompt) -> None:
    assert prefix_key(prompt) is None


def test_long_prompts_are_known_by_their_beginning() -> None:
    assert prefix_key("a" * 1024 + "b") == prefix_key("a" * 1024 + "c")
    assert prefix_key((7,) * 256 + (1,)) == prefix_key((7,) * 256 + (2, 3))


def test_memory_of_prefixes_forgets_what_was_not_seen_for_longest() -> None:
    memory = PrefixMemory(capacity=2)
    memory.remember(1, "a")
    memory.remember(2, "b")
    memory.remember(1, "c")
    memory.remember(3, "d")
    assert [memory.who_served(key) for key in (1, 2, 3, None)] == ["c", None, "d", None]


# --- reports ---


def test_each_change_is_news_once() -> None:
    news = RoutingNews()
    awake, queue = RoutingReport(0, AWAKE), RoutingReport(0, ASLEEP, True, QUEUE, 1)
    first, is_new = news.of(awake)
    assert is_new
    assert news.of(awake) == (first, False)
    held, is_new = news.of(replace(awake, held=True))
    assert is_new
    assert held.version > first.version
    waits, is_new = news.of(queue)
    assert is_new
    assert news.of(queue) == (waits, False)
    assert news.of(replace(queue, waiting=2))[1]
    assert news.of(replace(queue, waiting=2, deep=True))[1]


@pytest.mark.parametrize("sent_first", [True, False])
def test_newest_report_counts_whichever_way_it_came(sent_first: bool) -> None:
    older, newer = RoutingReport(3, ASLEEP, True), RoutingReport(4, WAKING, False, QUEUE, 2, True)
    sent, asked = (older, newer) if sent_first else (newer, older)
    assert newest_report(asked.as_stats(), sent.as_names()) == newer
    assert newest_report(asked.as_stats(), []) == asked
    assert newest_report({}, sent.as_names()) == sent


@pytest.mark.parametrize(
    ("stats", "names"),
    [
        ({}, []),
        (
            {"sleepserve": ["sleepserve:1:asleep:0:free:0"]},
            ["sleepserve:1:drowsy:0:free:0:0"],
        ),
        (
            {"sleepserve": ["sleepserve:x:asleep:0:free:0:0"]},
            ["somebody:1:awake:0:free:0:0", "lora"],
        ),
        (
            {"sleepserve": ["sleepserve:1:asleep:0:cosy:0:0"]},
            ["sleepserve:1:asleep:0:free:few:0"],
        ),
        ({"state": "awake"}, ["sleepserve:1:awake"]),
    ],
)
def test_strange_reports_are_none(stats: dict[str, object], names: list[str]) -> None:
    assert newest_report(stats, names) is None
