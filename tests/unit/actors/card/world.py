"""A card, six models and the ledger, with every message and its delay in the hands of a test."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from actors.card.config import Preempt, Terms
from actors.card.ledger import CardLedger, Granting, Ordering, Refusing, Shrinking, Staying
from actors.card.messages import Account, KvNow
from actors.protocol import SleepMode

BUDGET = 100
MAX_WAIT_S = 8.0
SIZES = (20, 34, 33, 50, 51, 100)  # one byte too many for two of them, and for three
MAX_AWAKE = 2
PART = 7  # of a KV cache that grows
RESIDUES = (
    2,
    2,
    2,
    0,
    0,
    0,
)  # of their processes, unless they sleep deep; so the last one fits only then
TERMS = (
    Terms(min_awake_s=0.5, max_wait_s=MAX_WAIT_S),
    Terms(min_awake_s=0.0, max_wait_s=MAX_WAIT_S, preempt=Preempt.FREEZE),
    Terms(min_awake_s=0.5, max_wait_s=MAX_WAIT_S, preempt=Preempt.NEVER),
    Terms(min_awake_s=1.0, max_wait_s=MAX_WAIT_S, priority=1),
    Terms(min_awake_s=0.5, max_wait_s=MAX_WAIT_S),
    Terms(min_awake_s=0.0, max_wait_s=MAX_WAIT_S),
)


@dataclass
class Model:
    """A replica as far as the card goes: one worker, requests that wait or run."""

    name: str
    size: int
    terms: Terms
    state: str = "asleep"  # "asking", "waking", "awake", "draining", "dead"
    residue: int = 0
    deep: bool = False  # the residue is given back
    refuses: bool = False  # a deep sleep
    mapped: int = 0
    in_flight: int = 0
    waiting: list[float] = field(default_factory=list)  # since when
    awake_since_s: float = 0.0
    quiet_since_s: float = 0.0
    reached: bool = True
    number: int = -1
    read_ask: int = -1
    answered: int = -1
    draining_for: int | None = None
    grown: int = 0  # of `mapped`, parts that came since the wake
    used: int = 0  # of these
    grows: bool = False  # has asked for one more
    inbox: deque[object] = field(default_factory=deque)  # from the keeper


class World:
    """Nothing moves by itself.

    Attributes:
        answered, refused: how long each request waited that got a worker, or a refusal.
        short: grants that the driver could not honour.
        grants, given_back: parts that came and went.
        deepened: deep sleeps.
        stayed: drains that were taken back.
        lost_keepers: how many have died.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.models = [
            Model(f"m{i}", *each) for i, each in enumerate(zip(SIZES, TERMS, strict=True))
        ]
        for model, residue in zip(self.models, RESIDUES, strict=True):
            model.residue = residue
        self.answered: list[float] = []
        self.refused: list[float] = []
        self.short = 0
        self.grants = self.given_back = self.deepened = self.stayed = 0
        self.lost_keepers = 0
        self.outbox: deque[tuple[int, Callable[[CardLedger], None]]] = deque()  # to which keeper
        self.keeper = 0  # which one there is
        self.ledger = CardLedger(BUDGET, MAX_AWAKE)
        self.gathers_until_s = 0.0
        for model in self.models:
            self._join(model)
        self.deliver_all_up()

    # --- what happens ---

    def request(self, index: int) -> None:
        model = self.models[index]
        if model.state == "dead":
            return
        if model.state == "awake":
            self._begin(model, [self.now_s])
            return
        model.waiting.append(self.now_s)
        if model.state == "asleep":
            self._ask(model)
        elif model.state == "asking":
            self._tell(model)  # who was frozen is not alone any more

    def finish(self, index: int) -> None:
        model = self.models[index]
        if not model.in_flight or model.state not in ("awake", "draining"):
            return
        model.in_flight -= 1
        if not model.in_flight:
            model.quiet_since_s, model.reached = self.now_s, True
            self._tell(model)
            if model.state == "draining":
                self._sleep(model)

    def leave(self, index: int) -> None:
        """Everybody who waits for the model gives up."""
        model = self.models[index]
        if model.state == "asking" and not model.in_flight:
            model.waiting.clear()
            number = model.number
            model.state, model.read_ask = "asleep", number
            self._up(lambda ledger: ledger.withdraw(model.name, number))
            self._tell(model)

    def woken(self, index: int) -> None:
        """A wake is over."""
        model = self.models[index]
        if model.state != "waking":
            return
        model.state, model.awake_since_s, model.quiet_since_s = "awake", self.now_s, self.now_s
        model.reached = False
        self._tell(model)
        self._begin(model, model.waiting)
        model.waiting = []

    def advance(self, index: int) -> None:
        """Each request that a model woke for has had a token."""
        model = self.models[index]
        if model.state in ("awake", "draining") and not model.reached:
            model.reached = True
            self._tell(model)

    def grow(self, index: int) -> None:
        """A busy model is short of blocks."""
        model = self.models[index]
        if model.state in ("awake", "draining") and model.in_flight and not model.grows:
            self._ask(model, grows=True)

    def use(self, index: int, size: int) -> None:
        """Sequences have so much of what has grown, as far as it goes. The keeper may hear of it later."""
        model = self.models[index]
        before, model.used = model.used, min(size, model.grown) if model.in_flight else 0
        if model.used != before:
            self._tell(model)

    def idle_sleep(self, index: int) -> None:
        model = self.models[index]
        if model.state == "awake" and not model.in_flight:
            self._sleep(model)

    def deepen(self, index: int) -> None:
        """A sleeper has slept for long."""
        model = self.models[index]
        if model.state == "asleep" and not (model.in_flight or model.waiting):
            self._deepen(model)
            self._tell(model)

    def refuse(self, index: int) -> None:
        """Its layers are being compiled, or no longer."""
        self.models[index].refuses = not self.models[index].refuses

    def kill(self, index: int) -> None:
        """The worker's process, and its replica with it: the keeper sees the process end."""
        model = self.models[index]
        self.refused += [self.now_s - since_s for since_s in model.waiting]
        # The next worker has its residue with its first wake, and not before there is room for both.
        self.models[index] = Model(
            model.name, model.size, model.terms, "dead", model.residue, deep=True
        )
        self._up(lambda ledger: ledger.end(model.name) if model.name in ledger._tenants else None)

    def start_again(self, index: int) -> None:
        model = self.models[index]
        if model.state == "dead":
            model.state = "asleep"
            self._join(model)

    def kill_keeper(self) -> None:
        """The next one knows nothing; what is under way to the last one is lost."""
        self.lost_keepers += 1
        self.keeper += 1
        self.ledger = CardLedger(BUDGET, MAX_AWAKE)
        self.gathers_until_s = self.now_s + 0.5
        for model in self.models:
            model.inbox.clear()
            model.answered = -1
            model.grows = False  # not without a keeper
            if model.state == "asking":  # by the driver's word
                model.read_ask = model.number
                if not self._map(model):
                    model.state = "asleep"
            if model.state != "dead":
                self._join(model)
            if model.state == "asleep" and (model.waiting or model.in_flight):
                self._ask(model)

    def deliver_up(self) -> None:
        """The oldest message to the keeper."""
        if self.outbox:
            keeper, message = self.outbox.popleft()
            if keeper == self.keeper:
                message(self.ledger)
                self.decide()

    def deliver_all_up(self) -> None:
        while self.outbox:
            self.deliver_up()

    def deliver_down(self, index: int) -> None:
        """The oldest message to a model."""
        model = self.models[index]
        if not model.inbox:
            return
        message = model.inbox.popleft()
        if isinstance(message, Shrinking):
            self._give_back(model, message)
        elif isinstance(message, Granting | Refusing) and message.number == model.number:
            self._answered(model, message)
        elif isinstance(message, Ordering):
            self._make_room(model, message)
        elif isinstance(message, Staying):
            self._stay(model, message)

    def _answered(self, model: Model, message: Granting | Refusing) -> None:
        if model.grows:
            model.grows = False
            if isinstance(message, Granting):
                model.read_ask = message.number
                self._map_part(model)
        elif model.state != "asking":
            return  # it was withdrawn
        elif isinstance(message, Granting):
            model.read_ask = message.number
            if not self._map(model):
                self.short += 1
                self._tell(model, short=True)
                self._ask(model)
        else:
            model.state = "asleep"
            if model.in_flight:  # frozen ones try again
                self._ask(model)
            self.refused += [self.now_s - since_s for since_s in model.waiting]
            model.waiting = []

    def tick(self, seconds: float) -> None:
        """Time passes, no further than the ledger wants to be asked again."""
        until_s = self.now_s + seconds
        while self.ledger.next_s < until_s and self.now_s >= self.gathers_until_s:
            self.now_s = max(self.now_s, self.ledger.next_s) + 1e-3
            self.decide()
        self.now_s = max(self.now_s, until_s)
        self.decide()

    def decide(self) -> None:
        if self.now_s < self.gathers_until_s:
            return
        for decision in self.ledger.decide(self.now_s):
            if isinstance(decision, Granting | Refusing | Ordering | Shrinking | Staying):
                model = next(m for m in self.models if m.name == decision.tenant)
                model.inbox.append(decision)

    # --- how a replica behaves ---

    def _begin(self, model: Model, since: list[float]) -> None:
        self.answered += [self.now_s - since_s for since_s in since]
        if since:
            model.in_flight += len(since)
            self._tell(model)
        elif model.in_flight:  # what was frozen goes on
            self._tell(model)

    def _ask(self, model: Model, grows: bool = False) -> None:
        model.grows = grows
        if not grows:
            model.state = "asking"
            self._tell(model)
        model.number += 1
        number, waited_s = model.number, model.terms.max_wait_s
        size = PART if grows else model.size - model.mapped + model.deep * model.residue
        self._up(
            lambda ledger: (
                ledger.ask(model.name, number, size, not grows, self.now_s, waited_s, grows)
                if model.name in ledger._tenants
                else None
            )
        )

    def _map(self, model: Model) -> bool:
        """The driver's word."""
        if self._used() + model.size + model.deep * model.residue > BUDGET:
            return False
        model.mapped, model.state, model.deep = model.size, "waking", False
        self._tell(model)
        return True

    def _used(self) -> int:
        return sum(m.mapped + (not m.deep) * m.residue for m in self.models)

    def _deepen(self, model: Model) -> None:
        if not (model.deep or model.refuses):
            model.deep = True
            self.deepened += 1

    def _map_part(self, model: Model) -> None:
        if self._used() + PART > BUDGET:
            self.short += 1
            self._tell(model, short=True)
            return
        self.grants += 1
        model.mapped += PART
        model.grown += PART
        self._tell(model)

    def _give_back(self, model: Model, order: Shrinking) -> None:
        """Whole parts, as far as nobody uses them by now."""
        if model.state == "awake":
            parts = min(-(-order.shrink.size // PART), (model.grown - model.used) // PART)
            self.given_back += parts
            model.mapped -= parts * PART
            model.grown -= parts * PART
        model.answered = order.number
        self._tell(model)

    def _sleep(self, model: Model) -> None:
        if model.grows:
            number = model.number
            model.grows, model.read_ask = False, number
            self._up(lambda ledger: ledger.withdraw(model.name, number))
        model.mapped, model.state = 0, "asleep"
        model.grown = model.used = 0
        if model.draining_for is not None:
            model.answered, model.draining_for = model.draining_for, None
        self._tell(model)
        if model.waiting or model.in_flight:
            self._ask(model)

    def _make_room(self, model: Model, order: Ordering) -> None:
        busy = model.in_flight or model.waiting
        if order.evict.deep and model.state == "asleep" and not busy:
            self._deepen(model)
        if order.evict.deep or model.state != "awake" or (order.evict.mode is None and busy):
            model.answered = order.number
            self._tell(model)
            return
        model.draining_for = order.number
        if order.evict.mode is SleepMode.WAIT and model.in_flight:
            model.state = "draining"
            return
        self._sleep(model)

    def _stay(self, model: Model, order: Staying) -> None:
        if model.state != "draining" or model.draining_for != order.number:
            return  # it sleeps, or could not
        model.state, model.answered, model.draining_for = "awake", order.number, None
        self.stayed += 1
        self._tell(model)
        waiting, model.waiting = model.waiting, []
        self._begin(model, waiting)

    # --- the wire ---

    def _account(self, model: Model, short: bool = False) -> Account:
        return Account(
            process_id=1,
            held=model.mapped,
            kept=0,
            residue=0 if model.deep else model.residue,
            awake=model.state in ("waking", "awake", "draining"),
            busy=bool(model.in_flight),
            moving=model.state == "waking",
            reached=model.reached,
            resumes=model.state == "asking" and bool(model.in_flight) and not model.waiting,
            awake_s=self.now_s - model.awake_since_s,
            quiet_s=self.now_s - model.quiet_since_s,
            read_ask=model.read_ask,
            answered_order=model.answered,
            short=short,
            kv=KvNow(
                model.grown,
                grown=model.grown,
                spare=(model.grown - model.used) // PART * PART,
            ),
        )

    def _tell(self, model: Model, short: bool = False) -> None:
        account, since_s = self._account(model, short), self.now_s
        free = BUDGET - self._used()

        def tell(ledger: CardLedger) -> None:
            if model.name not in ledger._tenants:
                return
            ledger.account(model.name, account, since_s)
            ledger.read_device(BUDGET, free, short)

        self._up(tell)

    def _join(self, model: Model) -> None:
        account = self._account(model)
        order = -1 if model.draining_for is None else model.draining_for

        def join(ledger: CardLedger) -> None:
            model.inbox.clear()  # what was for the one before is lost with its connection
            ledger.join(model.name, model.name, model.terms, account, self.now_s, order=order)

        self._up(join)

    def _up(self, message: Callable[[CardLedger], None]) -> None:
        self.outbox.append((self.keeper, message))


def everybody_is_served_in_turn(world: World) -> None:
    """On a quiet card nothing that went before keeps anybody out."""
    for index, model in enumerate(world.models):
        if model.state == "dead":
            continue
        world.tick(1.5)  # the one before may have to sleep
        refused = len(world.refused)
        world.request(index)
        everything_settles(world)
        assert len(world.refused) == refused, f"{model.name}: {world.ledger.status('', 0)}"


def everything_settles(world: World, limit_s: float = 6 * MAX_WAIT_S) -> None:
    """Once nobody asks for more and answers end, all who wait are served or refused."""
    ends_s = world.now_s + limit_s
    while world.now_s < ends_s:
        for _ in range(4):
            world.deliver_all_up()
            for index in range(len(world.models)):
                while world.models[index].inbox:
                    world.deliver_down(index)
                world.woken(index)
                while world.models[index].in_flight and world.models[index].state in (
                    "awake",
                    "draining",
                ):
                    world.finish(index)
        world.deliver_all_up()
        if not any(m.waiting or m.in_flight for m in world.models):
            return
        world.tick(0.25)
    stuck = [replace(m, inbox=deque()) for m in world.models if m.waiting or m.in_flight]
    raise AssertionError(
        f"still waiting after {limit_s:g} s: {stuck}; {world.ledger.status('', 0)}"
    )
