"""Requests of a trace as they are sent, with questions among them whose answers are known. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.bench.http.workload import Lengths, Requests, Workload
from serve_app.bench.many.trace import Arrival

QUESTIONS = 2  # of each model
_ASKED_EVERY = 10  # of a model's requests one is a question
_CANDIDATES = 24
_WORDS = 16
_ANSWER_TOKENS = 8
_OUTPUT_PART = 4  # of a model's length, the most for an answer where nothing else is asked for
_SURE = 0.9  # of the rest: how many tokens our words become is only nearly known
_IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}  # answers as long as the trace has them


@dataclass(frozen=True, slots=True)
class Caps:
    """The most tokens that a prompt and an answer may have."""

    prompt_tokens: int
    output_tokens: int

    @classmethod
    def within(cls, length: int, prompt: int | None, output: int | None) -> "Caps":
        """What was asked for, or what a model of that length takes.

        Raises:
            ValueError: together they are longer than the model.
        """
        output = output or max(1, length // _OUTPUT_PART)
        prompt = prompt or max(1, int(_SURE * (length - output)))
        if prompt + output > length:
            raise ValueError(
                f"prompts of {prompt} and answers of {output} tokens are longer than a model's {length}; "
                "lower --max-prompt-tokens or --max-output-tokens"
            )
        return cls(prompt, output)

    def cap(self, arrival: Arrival) -> Arrival:
        return replace(
            arrival,
            prompt_tokens=min(arrival.prompt_tokens, self.prompt_tokens),
            output_tokens=min(arrival.output_tokens, self.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: of the trace's lengths, or one of the model's questions by its number."""

    model: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    question: int | None = None


def plan(dealt: Sequence[tuple[Arrival, str]], caps: Mapping[str, Caps]) -> list[Planned]:
    """Shorten what is too long; of each model's requests, the first and every tenth then is a question."""
    asked = Counter[str]()
    planned = []
    for arrival, model in dealt:
        number, is_asked = divmod(asked[model], _ASKED_EVERY)
        asked[model] += 1
        fitting = caps[model].cap(arrival)
        question = None if is_asked else number % QUESTIONS
        planned.append(
            Planned(model, arrival.at_s, fitting.prompt_tokens, fitting.output_tokens, question)
        )
    return planned


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and how the answer begins to which the model is led by more than rounding.

    Attributes:
        answer: what the model says when nobody else is served, up to the first token that is not sure.
        tokens: how many these are.
        margin: by how much each of them was likelier than the next best, in nats at least.
    """

    body: Mapping[str, Any]
    answer: str
    tokens: int
    margin: float

    def is_answer(self, text: str) -> bool:
        return text.startswith(self.answer)


def candidates(model: str) -> list[dict[str, Any]]:
    """Prompts of which the best become questions, to be asked with the likeliest two of each token."""
    workload = Workload(
        model=model,
        endpoint="completions",
        stream=False,
        prompt_tokens=Lengths(_WORDS, _WORDS),
        max_tokens=_ANSWER_TOKENS,
        extra_body=_IGNORE_EOS,
        seed=1,  # none that a trace's own request begins like
    )
    return [workload.body(0, number) | {"logprobs": 2} for number in range(_CANDIDATES)]


def question_of(body: Mapping[str, Any], choice: Mapping[str, Any], sure: float) -> Question:
    """Of a candidate and the answer to it.

    Args:
        sure: nats that a token leads the next best by, if no rounding is to change it.

    Raises:
        LookupError, TypeError, ValueError: the answer has no log-probabilities.
    """
    answer, margins = "", []
    for token, likeliest in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        best, *others = sorted(likeliest.values(), reverse=True)
        margin = best - others[0] if others else 0.0  # two tokens that read the same
        if margin < sure or not choice["text"].startswith(answer + token):  # part of a character
            break
        answer += token
        margins.append(margin)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {name: value for name, value in body.items() if name != "logprobs"}
    return Question(plain | streamed, answer, len(margins), min(margins, default=0.0))


def choose(found: Sequence[Question]) -> tuple[Question, ...]:
    """Those with the longest sure answers.

    Raises:
        ValueError: no answer has a sure token.
    """
    best = sorted(found, key=lambda question: (-question.tokens, -question.margin))[:QUESTIONS]
    if not best[-1].tokens:
        raise ValueError("too few answers begin with a token that rounding cannot change")
    return tuple(best)


def sure_nats(dtype: str) -> float:
    """By how much a token leads the next best that neither a batch's size nor compiled layers change.

    In half precision logits themselves are rounded, to 0.125 from 16 on: up to 0.5 nats were seen on an H100.
    """
    return 0.01 if dtype == "float32" else 1.0


def workload_of(model: str, caps: Caps) -> Workload:
    """To ask a model how it counts our words."""
    longest = Lengths(caps.prompt_tokens, caps.prompt_tokens)
    return Workload(model, "completions", prompt_tokens=longest, extra_body=_IGNORE_EOS)


@dataclass(frozen=True, slots=True)
class TraceRequests(Requests):
    """What is sent.

    Attributes:
        workloads: of each model, with its scale.
        questions: of each model.
    """

    planned: Sequence[Planned]
    workloads: Mapping[str, Workload]
    questions: Mapping[str, Sequence[Question]]

    @property
    def path(self) -> str:
        return next(iter(self.workloads.values())).path

    def body(self, round_number: int, index: int) -> dict[str, Any]:
        planned = self.planned[index]
        if planned.question is not None:
            return dict(self.questions[planned.model][planned.question].body)
        lengths = Lengths(planned.prompt_tokens, planned.prompt_tokens)
        workload = replace(
            self.workloads[planned.model], prompt_tokens=lengths, max_tokens=planned.output_tokens
        )
        return workload.body(round_number, index)

    def is_right(self, index: int, text: str) -> bool | None:
        """Whether a whole answer is what it should be; None where that is not known."""
        planned = self.planned[index]
        if planned.question is None:
            return None
        return self.questions[planned.model][planned.question].is_answer(text)
