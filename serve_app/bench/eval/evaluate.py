"""Does a model give the same after a sleep as before it, what did the sleep release, how fast is it back?

`evaluate` generates a baseline, then in each cycle puts the model to sleep, wakes it with a request
whose first token is timed, generates again and compares. Where the model is, a `Target` knows.
"""

import asyncio
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

from actors.errors import ServingError, WeightsCorrupted
from serve_app.bench.eval.verdict import (
    About,
    Answer,
    Baseline,
    Cycle,
    FirstToken,
    Perplexity,
    Plan,
    Report,
    Slept,
    Tokens,
    Woke,
    find_difference,
)
from serve_app.bench.figures import Progress, environment

_FETCHED_CHARS = 20_000  # of a text that nobody chose; the demo model takes seconds for them


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to compute the perplexity of."""

    name: str
    text: str

    @classmethod
    def shipped(cls) -> "Passage":
        """The one that comes with the project; serve_app/bench/eval/text/README.md says where it is from."""
        file = resources.files("serve_app.bench.eval") / "text" / "alice.txt"
        return cls("alice.txt", file.read_text(encoding="utf-8"))

    @classmethod
    def fetched(cls, file: Path) -> "Passage":
        """The beginning of a long one that was downloaded; as `read`."""
        text = cls.read(file).text[:_FETCHED_CHARS]
        return cls(f"{file.parent.name}, its first {len(text)} characters", text)

    @classmethod
    def read(cls, file: Path) -> "Passage":
        """A text, or the column `text` of a Parquet file.

        Raises:
            OSError, ValueError: it is neither, or pyarrow, which reads Parquet, is not installed.
        """
        if file.suffix == ".parquet":
            return cls(file.name, _parquet_text(file))
        try:
            return cls(file.name, file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not text in UTF-8") from error


def _parquet_text(file: Path) -> str:
    """Its rows, one behind the other."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(
            f"{file} is Parquet, which pyarrow reads; the extra `datasets` of sleepserve brings "
            "it: pip install -e '.[datasets]'"
        ) from None
    try:
        column = parquet.read_table(file, columns=["text"]).column("text")
    except (ArrowException, KeyError) as error:
        raise ValueError(f"{file} is no Parquet file with a column `text`: {error}") from error
    return "".join(column.to_pylist())


class Target(Protocol):
    """One model, awake at first, that nobody else uses meanwhile. Answers are greedy.

    Any method raises ServingError for what the model or its server refuses or fails at.
    """

    @property
    def about(self) -> About: ...

    async def ask(self, prompt: str, count: int) -> Answer:
        """That many tokens, whether or not one of them ends the text."""

    async def steady(self) -> None:
        """Return when nothing is under way that would make later answers round differently."""

    async def sleep(self, level: Literal[1, 2]) -> Slept:
        """Return when the model is asleep."""

    async def wake_with(self, prompt: str, count: int) -> FirstToken:
        """Ask a model that is asleep."""

    async def settled(self) -> Woke:
        """Return when the bytes of the wake have arrived and were checked, whatever came out."""

    async def perplexity(self, passage: Passage, on_progress: Progress) -> Perplexity | None:
        """None if this target cannot tell."""

    async def choices(self, prompt: str, answer: Tokens) -> Tokens | None:
        """What the weights would choose for each token of an answer, given those in front of it.

        Also of a model that has failed its check; None if this target cannot tell.
        """


def start(target: Target, plan: Plan) -> Report:
    """A report that nothing was measured for yet."""
    return Report(environment=environment(), about=target.about, plan=plan)


async def evaluate(
    target: Target, report: Report, passage: Passage | None, on_progress: Progress
) -> None:
    """Run a report's plan, and judge. A cycle in which the model failed is the last one.

    Args:
        report: from `start`; it grows meanwhile.
        passage: for the perplexity; none is computed without.

    Raises:
        ServingError: no baseline could be had, or the model did not go to sleep.
    """
    run = _Run(target, report.plan, passage, on_progress)
    await run.measure_baseline(report.baseline)
    for number in range(1, report.plan.cycles + 1):
        cycle = Cycle(number=number)
        report.cycles.append(cycle)
        await run.measure(cycle)
        if cycle.failure is not None:
            break
    report.judge()


class _Run:
    """One evaluation under way."""

    def __init__(
        self, target: Target, plan: Plan, passage: Passage | None, on_progress: Progress
    ) -> None:
        self._target = target
        self._plan = plan
        self._passage = passage
        self._on_progress = on_progress
        self._first: Tokens  # with `_expected`, what a first answer may be
        self._expected: Tokens
        self._choices: Tokens | None = None

    async def measure_baseline(self, baseline: Baseline) -> None:
        target, plan = self._target, self._plan
        self._tell("baseline: the first answer")
        # The first batch behind a wake runs layer by layer as the bytes arrive, and may round
        # otherwise than later ones do: so it is in every cycle, and so it is here.
        baseline.first = await target.ask(plan.prompt, plan.ttft_tokens)
        self._first = baseline.first.tokens
        self._tell("baseline: until nothing is compiled any more")
        await target.steady()
        self._tell(f"baseline: {plan.max_tokens} tokens")
        # In a cycle, too, the answer comes behind the first one, whose pages of the KV cache it may share.
        await target.ask(plan.prompt, plan.ttft_tokens)
        baseline.answer = await target.ask(plan.prompt, plan.max_tokens)
        self._expected = baseline.answer.tokens
        self._choices = await target.choices(plan.prompt, self._expected)
        baseline.perplexity = await self._perplexity("baseline")

    async def measure(self, cycle: Cycle) -> None:
        target, plan = self._target, self._plan
        name = f"cycle {cycle.number} of {plan.cycles}"
        self._tell(f"{name}: going to sleep")
        cycle.slept = await target.sleep(plan.level)
        await asyncio.sleep(plan.pause_s)
        try:
            self._tell(f"{name}: asleep; the first token")
            await self._wake(cycle)
            if cycle.woke is None or not cycle.woke.intact:
                await self._look_at_weights(cycle)
                return
            self._tell(f"{name}: {plan.max_tokens} tokens")
            cycle.answer = await target.ask(plan.prompt, plan.max_tokens)
            cycle.difference = cycle.difference or find_difference(
                self._expected, cycle.answer.tokens, "answer"
            )
            cycle.perplexity = await self._perplexity(name)
        except ServingError as exc:
            cycle.failure = _named(exc)

    async def _wake(self, cycle: Cycle) -> None:
        try:
            cycle.first = await self._target.wake_with(self._plan.prompt, self._plan.ttft_tokens)
        except WeightsCorrupted as exc:  # the check was done before the first token was
            cycle.failure = _named(exc)
        else:
            found = cycle.first.answer.tokens
            if find_difference(self._first, found, "first answer") is not None:
                expected = self._expected.first(len(found))
                cycle.difference = find_difference(expected, found, "first answer")
        cycle.woke = await self._target.settled()
        if not cycle.woke.intact:
            cycle.failure = cycle.failure or cycle.woke.failure or "the checksum differs"

    async def _look_at_weights(self, cycle: Cycle) -> None:
        """A model that failed its check answers no more; its weights can still be asked."""
        found = await self._target.choices(self._plan.prompt, self._expected)
        if cycle.difference is None and found is not None and self._choices is not None:
            cycle.difference = find_difference(self._choices, found, "weights")

    async def _perplexity(self, name: str) -> Perplexity | None:
        if self._passage is None:
            return None

        def tell(what: str, done: int, total: int) -> None:
            self._on_progress(f"{name}: {what}", done, total)

        return await self._target.perplexity(self._passage, tell)

    def _tell(self, what: str) -> None:
        self._on_progress(what, 0, 0)


def _named(exc: ServingError) -> str:
    return f"{type(exc).__name__}: {exc}"
