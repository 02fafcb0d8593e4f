"""Many models on one card, in simulated time: the keeper's own ledger decides, what it decides takes the measured times.

What computes and what copies is shared evenly by whoever has something to compute or to copy at that moment, as a card
does with processes and a link with copies. KV caches do not grow.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from actors.card.config import Preempt, Terms
from actors.card.ledger import CardLedger, Granting, Ordering, Refusing
from actors.card.messages import Account
from actors.protocol import SleepMode
from serve_app.bench.many.requests import Planned

GIB = 2**30
_HOP_S = 0.0005  # a message to the keeper or back
_STEP_TOKENS = 2048  # of prompts, in one step


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model takes of one NVIDIA H200, in bf16.

    Measured, in docs/results: what a model has asleep; what it copies, and how fast; how long a sleep takes, and what a
    first token takes beside copies and prefill, over HTTP; how long a deep sleep takes, and the wake from one.
    """

    awake_bytes: int
    copied_bytes: float
    step_s: float  # of the card, for one token
    token_s: float  # of a prompt
    sequence_s: float = 2e-5  # for each of a step's sequences
    switch_s: float = 0.001  # to a model's step from another model's
    host_s: float = 0.0005  # between two steps, while the card has nothing of this model
    residue_bytes: int = int(0.93 * GIB)
    link_bytes_per_s: float = 55e9
    wake_s: float = 0.005
    sleep_s: float = 0.02
    http_s: float = 0.012
    deep_sleep_s: float = 0.6
    deep_wake_s: float = 0.9


# 1.5B, embeddings tied. Five awake beside eleven asleep are what fits 31 GiB, so `awake_bytes` is between 2.7 and 3.2 GiB.
# The card's times are fitted: sixteen that never sleep answer as fast, and keep the card as busy, as in `many.json`
# of 2026-11-28. What is said of those that sleep is a prediction.
SMALL = Costs(awake_bytes=int(3.1 * GIB), copied_bytes=3.09e9, step_s=0.002, token_s=7e-6)
# 7B: a token and a prompt of 2048 alone; to switch is supposed to cost the same.
LARGE = Costs(awake_bytes=int(15.2 * GIB), copied_bytes=15.2e9, step_s=0.0041, token_s=2.4e-5)


class Clock:
    """What happens next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now_s + seconds, what)

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(at_s, self.now_s), next(self._numbers), what))

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds, or nothing is left to happen."""
        while self._due and not until():
            self.now_s, _, what = heapq.heappop(self._due)
            what()


class Shared:
    """Something that all who use it have an even share of: a card's time, a link's rate.

    Attributes:
        busy_s: for how long somebody had it.
    """

    def __init__(self, clock: Clock) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._given = 0.0  # to each of those who were there all the time
        self._since_s = 0.0
        self._numbers = count()
        self._works: list[tuple[float, int, Callable[[], None]]] = []  # by `_given` at their end
        self._turn = 0

    @property
    def is_used(self) -> bool:
        return bool(self._works)

    def use(self, seconds: float, done: Callable[[], None]) -> None:
        """For so long, if it were for one alone."""
        self._advance()
        heapq.heappush(self._works, (self._given + seconds, next(self._numbers), done))
        self._look_again()

    def _advance(self) -> None:
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        if self._works:
            self.busy_s += passed_s
            self._given += passed_s / len(self._works)

    def _look_again(self) -> None:
        self._turn += 1
        if self._works:
            turn, left = self._turn, self._works[0][0] - self._given
            self._clock.after(max(0.0, left) * len(self._works), lambda: self._end_of(turn))

    def _end_of(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        _, _, done = heapq.heappop(self._works)
        self._look_again()
        done()


@dataclass(slots=True, eq=False)
class Asked:
    """One request on its way."""

    planned: Planned
    prompt_left: int  # to compute before the next token; also tokens that a sleep has lost
    tokens: int = 0
    first_s: float | None = None
    end_s: float | None = None
    was_cold: bool = False
    refused: bool = False

    @property
    def ttft_s(self) -> float:
        """Without HTTP's part."""
        return math.inf if self.first_s is None else self.first_s - self.planned.at_s

    @property
    def tpot_s(self) -> float:
        """The mean; 0 where there is one token only."""
        if self.refused or self.first_s is None or self.end_s is None:
            return math.inf
        return (self.end_s - self.first_s) / max(1, self.tokens - 1)


@dataclass(slots=True, eq=False)
class _Model:
    """One replica and its worker; `state` is as in the lifecycle, and `asking` waits for the keeper."""

    name: str
    terms: Terms
    state: str = "asleep"
    deep: bool = False
    steps: bool = False  # the card has a step of it, or the host prepares one
    requests: list[Asked] = field(default_factory=list)
    due: list[Asked] = field(default_factory=list)  # of these, who has had no token since the wake
    awake_since_s: float = 0.0
    quiet_since_s: float = 0.0
    number: int = -1
    read_ask: int = -1
    answered_order: int = -1
    order: Ordering | None = None  # it follows


class Node:
    """One card and its models.

    Attributes:
        asked: every request.
        wakes, deep_wakes, frozen: of all models; sleeps in which requests were kept.
    """

    def __init__(
        self,
        names: Sequence[str],
        planned: Sequence[Planned],
        budget: float,
        terms: Terms,
        costs: Costs,
    ) -> None:
        """All asleep; with an endless budget, all awake.

        Args:
            terms: of all models. Busy ones freeze or go on: drains are not simulated.
        """
        assert terms.preempt is not Preempt.DRAIN
        self.clock = Clock()
        self.card, self.link = Shared(self.clock), Shared(self.clock)
        self.asked = [Asked(each, each.prompt_tokens) for each in planned]
        self.wakes = self.deep_wakes = self.frozen = 0
        self._costs = costs
        self._left = len(self.asked)
        self._is_endless = math.isinf(budget)
        total = len(names) * (self._costs.awake_bytes + self._costs.residue_bytes)
        self._ledger = CardLedger(total if self._is_endless else int(budget), None)
        self._models = {name: _Model(name, terms) for name in names}
        for model in self._models.values():
            if self._is_endless:
                model.state = "awake"
            self._ledger.join(model.name, model.name, terms, self._account(model), 0.0)
        for each in self.asked:
            self.clock.at(each.planned.at_s, partial(self._arrive, each))

    def run(self) -> None:
        self.clock.run(lambda: not self._left)

    # --- a replica ---

    def _arrive(self, asked: Asked) -> None:
        model = self._models[asked.planned.model]
        asked.was_cold = model.state != "awake"
        model.requests.append(asked)
        if model.state == "asleep":
            self._ask(model)
        elif model.state == "asking":
            self._tell(model)  # who was frozen is not alone any more
        elif model.state == "awake":
            if len(model.requests) == 1:
                self._tell(model)
            self._go_on(model)

    def _go_on(self, model: _Model) -> None:
        """Compute a step, if there is anything to compute and nothing else to do."""
        if model.steps or model.state != "awake":
            return
        order = model.order
        if order is not None and (order.evict.mode is SleepMode.KEEP or not model.requests):
            self._sleep(model)
            return
        if not model.requests:
            return
        work_s, prompts, took = self._costs.step_s, _STEP_TOKENS, list[tuple[Asked, int]]()
        for asked in model.requests:
            if asked.prompt_left:
                tokens = min(asked.prompt_left, prompts)
                prompts -= tokens
                if tokens:
                    took.append((asked, tokens))
                    work_s += tokens * self._costs.token_s
            else:
                took.append((asked, 0))
                work_s += self._costs.sequence_s
        model.steps = True
        work_s += self._costs.switch_s * self.card.is_used
        self.card.use(work_s, lambda: self._stepped(model, took))

    def _stepped(self, model: _Model, took: Sequence[tuple[Asked, int]]) -> None:
        now_s, is_reached = self.clock.now_s, False
        for asked, tokens in took:
            asked.prompt_left -= tokens
            if asked.prompt_left:
                continue
            asked.tokens += 1
            asked.first_s = asked.first_s or now_s
            if asked in model.due:
                model.due.remove(asked)
                is_reached = not model.due
            if asked.tokens == asked.planned.output_tokens:
                asked.end_s = now_s
                model.requests.remove(asked)
                self._left -= 1
        if not model.requests:
            model.quiet_since_s = now_s
        if is_reached or not model.requests:
            self._tell(model)
        self.clock.after(self._costs.host_s, lambda: self._prepared(model))

    def _prepared(self, model: _Model) -> None:
        model.steps = False
        self._go_on(model)

    def _sleep(self, model: _Model) -> None:
        model.state = "sleeping"
        self.frozen += bool(model.requests)
        self.clock.after(self._costs.sleep_s, lambda: self._slept(model))

    def _slept(self, model: _Model) -> None:
        model.state = "asleep"
        for asked in model.requests:
            asked.prompt_left = asked.planned.prompt_tokens + asked.tokens
        self._answer(model)

    def _deepen(self, model: _Model) -> None:
        model.state = "deepening"
        self.clock.after(self._costs.deep_sleep_s, lambda: self._deepened(model))

    def _deepened(self, model: _Model) -> None:
        model.state, model.deep = "asleep", True
        self._answer(model)

    def _answer(self, model: _Model) -> None:
        """An order is done, or cannot be."""
        if model.order is not None:
            model.answered_order, model.order = model.order.number, None
        self._tell(model)
        if model.state == "asleep" and model.requests:
            self._ask(model)

    def _ask(self, model: _Model) -> None:
        model.state = "asking"
        self._tell(model)
        model.number += 1
        number, costs = model.number, self._costs
        size = costs.awake_bytes + model.deep * costs.residue_bytes
        self._to_keeper(
            lambda: self._ledger.ask(
                model.name, number, size, True, self.clock.now_s, model.terms.max_wait_s
            )
        )

    def _wake(self, model: _Model) -> None:
        costs = self._costs
        model.state, model.read_ask = "waking", model.number
        self.wakes += 1
        self.deep_wakes += model.deep
        before_s = costs.wake_s + model.deep * costs.deep_wake_s
        model.deep = False
        self._tell(model)
        model.awake_since_s = self.clock.now_s + before_s  # mapped: bytes come behind that
        copy_s = costs.copied_bytes / costs.link_bytes_per_s
        self.clock.after(before_s, lambda: self.link.use(copy_s, lambda: self._woken(model)))

    def _woken(self, model: _Model) -> None:
        now_s = self.clock.now_s
        model.state, model.due = "awake", model.requests.copy()
        model.quiet_since_s = now_s
        self._tell(model)
        self._go_on(model)

    # --- the keeper ---

    def _to_keeper(self, told: Callable[[], None]) -> None:
        def arrives() -> None:
            told()
            self._decide()

        self.clock.after(_HOP_S, arrives)

    def _tell(self, model: _Model) -> None:
        if self._is_endless:
            return  # nobody has to make room
        account = self._account(model)
        self._to_keeper(lambda: self._ledger.account(model.name, account, self.clock.now_s))

    def _decide(self) -> None:
        for decision in self._ledger.decide(self.clock.now_s):
            if isinstance(decision, Granting | Refusing | Ordering):
                self.clock.after(_HOP_S, partial(self._follow, decision))
        if math.isfinite(self._ledger.next_s):
            self.clock.at(self._ledger.next_s + 1e-6, self._decide_if_due)

    def _decide_if_due(self) -> None:
        if self._ledger.next_s <= self.clock.now_s:
            self._decide()

    def _follow(self, decision: Granting | Refusing | Ordering) -> None:
        model = self._models[decision.tenant]
        if isinstance(decision, Granting):
            self._wake(model)
        elif isinstance(decision, Refusing):
            self._refuse(model)
        else:
            self._obey(model, decision)

    def _refuse(self, model: _Model) -> None:
        """Nothing came in time: whoever has no token yet is refused, the others ask anew."""
        now_s, model.state = self.clock.now_s, "asleep"
        for asked in [each for each in model.requests if each.first_s is None]:
            asked.refused, asked.end_s = True, now_s
            model.requests.remove(asked)
            self._left -= 1
        if model.requests:
            self._ask(model)

    def _obey(self, model: _Model, order: Ordering) -> None:
        model.order = order
        evict = order.evict
        if model.state == "asleep" and evict.deep and not model.requests:
            self._deepen(model)
        elif model.state != "awake" or (evict.mode is None and model.requests):
            self._answer(model)
        elif not model.steps:
            self._go_on(model)

    def _account(self, model: _Model) -> Account:
        now_s, costs = self.clock.now_s, self._costs
        is_awake = model.state in ("waking", "awake", "sleeping")
        return Account(
            process_id=1,
            held=costs.awake_bytes * is_awake,
            residue=costs.residue_bytes * (not model.deep),
            copies=int(costs.copied_bytes),
            awake=is_awake,
            busy=bool(model.requests),
            moving=model.state in ("waking", "sleeping", "deepening"),
            reached=not model.due,
            resumes=model.state == "asking" and all(each.tokens for each in model.requests),
            awake_s=now_s - model.awake_since_s,
            quiet_s=now_s - model.quiet_since_s,
            read_ask=model.read_ask,
            answered_order=model.answered_order,
        )
