"""What an evaluation found, as it goes to JSON, and the judgement over it. No torch here."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from actors.protocol import MemoryLeft

_CONTEXT_CHARS = 60  # of text on either side of a token that differs


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class _Fact(_Part):
    model_config = ConfigDict(frozen=True)


# --- what is asked ---


class Plan(_Fact):
    """What to do with a model."""

    prompt: str
    max_tokens: int = Field(default=50, ge=1)
    ttft_tokens: int = Field(default=1, ge=1)
    cycles: int = Field(default=1, ge=1)
    pause_s: float = Field(default=0.0, ge=0)  # between a sleep and the request that ends it
    level: Literal[1, 2] = 1
    ttft_limit_s: float | None = Field(default=None, gt=0)


class About(_Fact):
    """Which model it is, and where."""

    model: str
    where: str  # "in process", or the URL of a server
    device: str | None = None
    memory_of: Literal["card", "process"] | None = None  # what the used bytes are of, where known
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    keep_layers: int | None = None
    used_bytes: int | None = None  # awake, before anything was generated
    total_bytes: int | None = None
    image_s: float | None = None  # checkpoint to image
    engine_s: float | None = None  # building the engine, and on a GPU its graphs


# --- what is found ---


class Tokens(_Fact):
    """A piece of output, token by token."""

    texts: tuple[str, ...]  # U+FFFD where a character spans tokens
    ids: tuple[int, ...] | None = None  # None over HTTP

    def __len__(self) -> int:
        return len(self.texts)

    def first(self, count: int) -> Self:
        return type(self)(
            texts=self.texts[:count], ids=None if self.ids is None else self.ids[:count]
        )

    def text(self, start: int, stop: int | None = None) -> str:
        return "".join(self.texts[start:stop])

    def id_at(self, position: int) -> int | None:
        return None if self.ids is None or position >= len(self) else self.ids[position]

    def at(self, position: int) -> str | None:
        return self.texts[position] if position < len(self) else None


class Answer(_Fact):
    """One greedy answer. Seconds count from the request's arrival."""

    text: str
    tokens: Tokens
    prompt_tokens: int
    first_s: float
    seconds: float


class Perplexity(_Fact):
    """Of a text, in windows of at most so many tokens, each for itself."""

    passage: str
    window_tokens: int
    predicted_tokens: int  # all but the first of each window
    log_likelihood: float  # natural; summed in float64
    perplexity: float
    seconds: float


class Slept(_Fact):
    """A sleep, and the memory before and after it."""

    seconds: float
    used_before_bytes: int
    used_bytes: int
    total_bytes: int
    released_bytes: int
    left: MemoryLeft | None = None


class FirstToken(_Fact):
    """A request that found the model asleep; the parts add up, and are unknown over HTTP."""

    ttft_s: float
    tokenise_s: float | None = None
    wake_call_s: float | None = None
    first_token_s: float | None = None
    answer: Answer


class Woke(_Fact):
    """The wake, once all its bytes had arrived and were checked."""

    used_bytes: int
    reloaded_bytes: int  # used now, minus used asleep
    copied_bytes: int
    link_s: float  # the link's own time for them
    link_gb_per_s: float
    checked_segments: int
    checked_bytes: int
    check_s: float
    intact: bool
    failure: str | None = None


class Difference(_Fact):
    """The first token that is not the baseline's."""

    seen_in: Literal["first answer", "answer", "weights"]
    position: int  # from 0
    expected: str | None  # None: the baseline had ended
    found: str | None
    expected_id: int | None
    found_id: int | None
    before: str  # the text in front, which is the same in both
    expected_after: str
    found_after: str


class Cycle(_Part):
    """One sleep and one wake; what comes after a failure stays None."""

    number: int
    slept: Slept | None = None
    first: FirstToken | None = None
    woke: Woke | None = None
    answer: Answer | None = None
    difference: Difference | None = None
    perplexity: Perplexity | None = None
    failure: str | None = None


class Baseline(_Part):
    """Before the first sleep."""

    first: Answer | None = None  # behind the model's first wake, as the cycles' first answers are
    answer: Answer | None = None
    perplexity: Perplexity | None = None


CheckName = Literal["tokens", "perplexity", "ttft", "checksum", "cycles"]


class Check(_Fact):
    name: CheckName
    passed: bool | None  # None: there was nothing to check yet
    told: str


class Report(_Part):
    """Everything; grows while the evaluation runs."""

    format: Literal[1] = 1
    environment: dict[str, str | int | float | bool | None] = {}
    about: About
    plan: Plan
    baseline: Baseline = Field(default_factory=Baseline)
    cycles: list[Cycle] = []
    interrupted: bool = False
    checks: list[Check] = []
    passed: bool = False

    def judge(self) -> None:
        """Fill in the checks of what was measured so far."""
        self.checks = list(_checks(self))
        self.passed = all(check.passed is True for check in self.checks)


# --- comparing and judging ---

_Judged = tuple[bool | None, str]  # `passed` and `told` of a check


def find_difference(
    expected: Tokens, found: Tokens, seen_in: Literal["first answer", "answer", "weights"]
) -> Difference | None:
    """The first token that differs, by ids where both have them, else by texts."""
    by_id = expected.ids is not None and found.ids is not None
    wanted, came = (expected.ids, found.ids) if by_id else (expected.texts, found.texts)
    assert wanted is not None
    assert came is not None
    if wanted == came:
        return None
    pairs = enumerate(zip(wanted, came, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(came)))
    return Difference(
        seen_in=seen_in,
        position=position,
        expected=expected.at(position),
        found=found.at(position),
        expected_id=expected.id_at(position),
        found_id=found.id_at(position),
        before=expected.text(0, position)[-_CONTEXT_CHARS:],
        expected_after=expected.text(position + 1)[:_CONTEXT_CHARS],
        found_after=found.text(position + 1)[:_CONTEXT_CHARS],
    )


def _checks(report: Report) -> Iterator[Check]:
    judged: dict[CheckName, _Judged] = {"tokens": _tokens(report)}
    if report.baseline.perplexity is not None:
        judged["perplexity"] = _perplexity(report, report.baseline.perplexity)
    if report.plan.ttft_limit_s is not None:
        judged["ttft"] = _ttft(report, report.plan.ttft_limit_s)
    judged |= {"checksum": _checksum(report), "cycles": _cycles(report)}
    for name, (passed, told) in judged.items():
        yield Check(name=name, passed=passed, told=told)


def _tokens(report: Report) -> _Judged:
    for cycle in report.cycles:
        if (found := cycle.difference) is not None:
            where = {
                "first answer": "of the first answer behind the wake",
                "answer": "of the answer after the wake",
                "weights": "that the weights in memory would choose",
            }[found.seen_in]
            return False, f"cycle {cycle.number}: token {found.position + 1} {where} is wrong"
    compared = [cycle.answer for cycle in report.cycles if cycle.answer is not None]
    if not compared:
        return None, "nothing was compared"
    told = f"{len(compared[0].tokens)} tokens are those of before the sleep"
    return True, f"{told}, {_in_cycles(len(compared))}"


def _perplexity(report: Report, before: Perplexity) -> _Judged:
    found = [(c.number, c.perplexity) for c in report.cycles if c.perplexity is not None]
    for number, after in found:
        if after.log_likelihood != before.log_likelihood:
            return False, (
                f"cycle {number}: log-likelihood {after.log_likelihood!r}, "
                f"before the sleep {before.log_likelihood!r}"
            )
    if not found:
        return None, "nothing was compared"
    return True, f"the same to the last bit, {_in_cycles(len(found))}"


def _ttft(report: Report, limit_s: float) -> _Judged:
    worst_s = max((cycle.first.ttft_s for cycle in report.cycles if cycle.first), default=None)
    if worst_s is None:
        return None, "nothing was measured"
    return worst_s <= limit_s, f"the worst is {worst_s:.3f} s of {limit_s:g} s"


def _checksum(report: Report) -> _Judged:
    wakes = [(cycle.number, cycle.woke) for cycle in report.cycles if cycle.woke is not None]
    for number, woke in wakes:
        if not woke.intact:
            return False, f"cycle {number}: {woke.failure or 'what arrived is not what was packed'}"
    if not wakes:
        return None, "no wake was checked"
    checked = sum(woke.checked_bytes for _, woke in wakes)
    told = f"{checked} bytes are right where they landed"
    return True, f"{told}, {_in_cycles(len(wakes))}"


def _cycles(report: Report) -> _Judged:
    for cycle in report.cycles:
        if cycle.failure is not None:
            return False, f"cycle {cycle.number} failed: {cycle.failure}"
    # The perplexity is the last of a cycle, where there is any.
    with_text = report.baseline.perplexity is not None
    whole = [c for c in report.cycles if c.answer and (c.perplexity or not with_text)]
    told = f"complete are {len(whole)} of {report.plan.cycles}"
    return len(whole) == report.plan.cycles, told


def _in_cycles(count: int) -> str:
    return f"in {count} cycle{'s' if count > 1 else ''}"
