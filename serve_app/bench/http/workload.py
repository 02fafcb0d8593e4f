"""What a load test sends, and when: loads, prompts, arrivals. No clock and no network here.

Everything follows from a seed and a request's place in the run, so processes that share a load need
not talk to each other, and the same command sends the same requests again.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any, Literal, Protocol, Self

Endpoint = Literal["chat", "completions"]

_PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# Of one length, so that a tokenizer that knows none of them still gives each as many tokens.
_WORDS_TEXT = (
    "able also area away back base bear best bird blue body book both call care case city cold "
    "come cost dark data door down draw east even ever face fact fall farm fast feel film find "
    "fine fire fish five food foot form four free full game girl give goes gold good half hall "
    "hand hard have head hear heat help high hold home hope hour idea iron just keep kind king "
    "know land last late lead left less life like line list live long look lost love make many "
    "mark mind moon more most move much must name near need next once only open over page part "
    "past path plan play poor pull rain read rest rich ring rise road rock room rule safe same "
    "sand seem ship shop show side size snow soft some song soon star stay step stop such sure "
    "take talk team tell than them then they time town tree true turn type upon very view wait "
    "walk wall want warm wash week well west what when wide wife wild wind wish with wood word "
    "work year"
)
_WORDS = tuple(_WORDS_TEXT.split())

_LEAST_REQUESTS = 32
_PER_PLACE = 4  # requests for each place of a closed loop
_DEFAULT_OPEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths in tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`128`, or `64:256`.

        Raises:
            ValueError: it is neither.
        """
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low))
        except ValueError:
            lengths = cls(0, 0)
        if not 0 < lengths.low <= lengths.high:
            raise ValueError(f"a length in tokens is N or LOW:HIGH, 1 or more, found {text!r}")
        return lengths

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How many prompt tokens the server makes of so many of our words."""

    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0  # of a chat template, for example

    @classmethod
    def fit(cls, few: tuple[int, int], many: tuple[int, int]) -> Self | None:
        """Through two prompts of (words, tokens); None where they tell nothing."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(slope, few[1] - slope * few[0]) if slope > 0 else None

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.extra_tokens) / self.tokens_per_word))


class Requests(Protocol):
    """What is sent: request `index` of a round, the same whenever it is asked for."""

    @property
    def path(self) -> str: ...
    def body(self, round_number: int, index: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    Attributes:
        extra_body: fields for every request; they replace ours, and null takes a field away.
    """

    model: str
    endpoint: Endpoint = "chat"
    stream: bool = True
    prompt_tokens: Lengths = Lengths(128, 128)
    max_tokens: int = 128
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    scale: Scale = Scale()

    @property
    def path(self) -> str:
        return _PATHS[self.endpoint]

    def body(self, round_number: int, index: int) -> dict[str, Any]:
        """Request `index` of a round. No two begin alike, so that no server knows a prefix."""
        source = self._source(round_number, index)
        return self._body(source, self.scale.words(self._length(source)), self.max_tokens)

    def prompt_length(self, round_number: int, index: int) -> int:
        """How many prompt tokens request `index` of a round is to have."""
        return self._length(self._source(round_number, index))

    def probe(self, words: int) -> dict[str, Any]:
        """A request of so many words for one token."""
        return self._for_one_token(random.Random(f"{self.seed}/probe/{words}"), words)

    def warm_up(self, round_number: int) -> dict[str, Any]:
        """A request for one token, with a prompt as those of a round; none of them begins like it."""
        source = random.Random(f"{self.seed}/{round_number}/warm-up")
        return self._for_one_token(source, self.scale.words(self._length(source)))

    def probe_words(self) -> tuple[int, int]:
        """Two lengths to fit a scale to; short enough for a word of five tokens."""
        few = max(1, self.prompt_tokens.low // 16)
        return few, few + max(1, self.prompt_tokens.low // 8)

    def _source(self, round_number: int, index: int) -> random.Random:
        return random.Random(f"{self.seed}/{round_number}/{index}")

    def _length(self, source: random.Random) -> int:
        return source.randint(self.prompt_tokens.low, self.prompt_tokens.high)

    def _for_one_token(self, source: random.Random, words: int) -> dict[str, Any]:
        body = self._body(source, words, 1)
        return {**body, "stream": False, "stream_options": None, "min_tokens": None}

    def _body(self, source: random.Random, words: int, max_tokens: int) -> dict[str, Any]:
        text = " ".join(source.choices(_WORDS, k=words))
        body: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        body |= {"max_tokens": max_tokens, "temperature": 0}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {**body, **self.extra_body}


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Gap:
    """A pause after every so many requests, in which the model is to sleep.

    Attributes:
        idle_s: how long to leave the model alone; None: POST /sleep puts it to sleep.
    """

    every: int
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests between two gaps; `count` None: without end."""

    number: int
    first: int
    count: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """One round: a closed loop of `concurrency` places, or arrivals at `request_rate` per second.

    It ends after `requests`, or when `duration_s` is over, whichever is first. What is in flight
    then is waited for.
    """

    concurrency: int | None = None
    request_rate: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    gap: Gap | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.request_rate is None)
        assert self.requests is not None or self.duration_s is not None

    @property
    def begins_warm(self) -> bool:
        """Not where the model is left alone so that it sleeps: there a round begins as the model is."""
        return self.gap is None or self.gap.idle_s is None

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return f"{self.request_rate:g} per second"

    def segments(self) -> Iterator[Segment]:
        """In order; without end where only the duration ends the round."""
        size = self.requests if self.gap is None else self.gap.every
        for number in count():
            first = number * (size or 0)
            if self.requests is None:
                yield Segment(number, first, size)
            elif first < self.requests:
                yield Segment(number, first, min(size or 0, self.requests - first))
            else:
                return
            if size is None:
                return


def default_requests(concurrency: int | None, request_rate: float | None) -> int:
    """How many requests make a round where neither their number nor a duration was asked for."""
    if concurrency is not None:
        return max(_LEAST_REQUESTS, _PER_PLACE * concurrency)
    return max(_LEAST_REQUESTS, ceil(_DEFAULT_OPEN_S * (request_rate or 0)))


@dataclass(frozen=True, slots=True)
class Share:
    """What one of `workers` processes sends of a segment.

    Requests are dealt to `slots` in turn, and slots to workers, so that a worker with more places
    of a closed loop gets more of the requests.

    Attributes:
        starts_s, ends_s: on the machine's monotonic clock; nothing is sent from `ends_s` on, which may be infinite.
        trace_s: when the requests of an open loop are sent, seconds from the start; None: Poisson arrivals.
    """

    round_number: int
    segment: Segment
    worker: int
    workers: int
    slots: int
    request_rate: float | None
    seed: int
    starts_s: float
    ends_s: float
    trace_s: Sequence[float] | None = None

    @property
    def places(self) -> int:
        """Requests at a time, in a closed loop."""
        return len(range(self.worker, self.slots, self.workers))

    def indices(self) -> Iterator[int]:
        return (self.segment.first + offset for offset in self._offsets() if self._ours(offset))

    def arrivals(self) -> Iterator[tuple[int, float]]:
        """Requests of an open loop, with the time at which each is to be sent."""
        assert self.request_rate is not None
        seed = f"{self.seed}/{self.round_number}/{self.segment.number}"
        poisson = arrival_times(self.request_rate, seed)
        times = poisson if self.trace_s is None else self.trace_s
        for offset, after_s in zip(self._offsets(), times, strict=False):
            if self._ours(offset):
                yield self.segment.first + offset, self.starts_s + after_s

    def _offsets(self) -> Iterator[int]:
        return iter(count() if self.segment.count is None else range(self.segment.count))

    def _ours(self, offset: int) -> bool:
        return offset % self.slots % self.workers == self.worker


def deal(
    load: Load,
    round_number: int,
    segment: Segment,
    workers: int,
    seed: int,
    starts_s: float,
    ends_s: float,
) -> Sequence[Share]:
    """A segment's share for each worker that has something to do, at most `workers` of them."""
    slots = workers if load.concurrency is None else load.concurrency
    workers = min(workers, slots)
    return [
        Share(
            round_number=round_number,
            segment=segment,
            worker=worker,
            workers=workers,
            slots=slots,
            request_rate=load.request_rate,
            seed=seed,
            starts_s=starts_s,
            ends_s=ends_s,
        )
        for worker in range(workers)
    ]


def arrival_times(rate: float, seed: str) -> Iterator[float]:
    """A Poisson process: seconds from its start, `rate` of them in a second on average."""
    source = random.Random(seed)
    now_s = 0.0
    while True:
        now_s += source.expovariate(rate)
        yield now_s
