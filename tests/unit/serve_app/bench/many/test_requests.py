"""Requests of a trace: their lengths, and the questions among them."""

import pickle
from collections import Counter

import pytest

from serve_app.bench.http.workload import Lengths, Scale, Workload
from serve_app.bench.many.requests import (
    QUESTIONS,
    Caps,
    Planned,
    Question,
    TraceRequests,
    candidates,
    choose,
    plan,
    question_of,
)
from serve_app.bench.many.trace import Arrival

CAPS = Caps(100, 20)


def test_without_caps_both_fit_the_model() -> None:
    caps = Caps.within(2048, None, None)
    assert caps.output_tokens == 512
    assert caps.prompt_tokens + caps.output_tokens < 2048
    assert Caps.within(2048, None, 1500).output_tokens == 1500


def test_caps_beyond_the_model_are_refused() -> None:
    assert Caps.within(2048, 2000, 48) == Caps(2000, 48)
    with pytest.raises(ValueError, match="longer than a model's 2048; lower --max-prompt-tokens"):
        Caps.within(2048, 2000, 49)


def test_what_is_too_long_is_shortened_and_the_rest_is_as_it_was() -> None:
    dealt = [(Arrival(1.0, "a", 500, 50), "m"), (Arrival(2.0, "a", 7, 3), "m")]
    long, short = plan(dealt, {"m": CAPS})
    assert (long.prompt_tokens, long.output_tokens) == (100, 20)
    assert short == Planned("m", 2.0, 7, 3)


def test_one_in_ten_of_each_model_is_a_question_the_first_among_them() -> None:
    dealt = [(Arrival(float(i), "a", 10, 5), "m" if i % 2 else "n") for i in range(60)]
    planned = plan(dealt, {"m": CAPS, "n": CAPS})
    asked = [(each.model, each.question) for each in planned if each.question is not None]
    assert asked == [("n", 0), ("m", 0), ("n", 1), ("m", 1), ("n", 0), ("m", 0)]
    assert [each.question for each in planned[:3]] == [0, 0, None]
    assert Counter(each.model for each in planned) == {"m": 30, "n": 30}


def requests() -> TraceRequests:
    question = Question({"model": "m", "prompt": "why", "stream": True}, " because", 2, 1.0)
    workload = Workload("m", "completions", scale=Scale(2.0, 4.0))
    planned = [Planned("m", 0.0, 24, 5, question=0), Planned("m", 1.0, 24, 5)]
    return TraceRequests(planned, {"m": workload}, {"m": [question]})


def test_body_has_the_lengths_of_the_trace_in_the_models_own_tokens() -> None:
    body = requests().body(0, 1)
    assert len(body["prompt"].split()) == 10
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 5, True)
    assert requests().body(0, 1) == body


def test_requests_go_to_the_processes_that_send() -> None:
    sent = pickle.loads(pickle.dumps(requests()))
    assert [sent.body(0, index) for index in (0, 1)] == [requests().body(0, i) for i in (0, 1)]
    assert sent.path == "/v1/completions"


def test_only_questions_have_a_right_answer() -> None:
    assert requests().body(0, 0)["prompt"] == "why"
    assert requests().is_right(0, " because") is True
    assert requests().is_right(0, " because of rounding") is True
    assert requests().is_right(0, " becaus") is False
    assert requests().is_right(1, "anything") is None


def test_candidate_becomes_a_streamed_question_with_its_smallest_lead() -> None:
    body = candidates("m")[0]
    assert body["logprobs"] == 2
    assert body["ignore_eos"]
    tops = [{"a": -0.1, "b": -2.6}, {"c": -1.2, "d": -0.7}, {"e": -1.0, "f": -1.1}]
    choice = {"text": "ade", "logprobs": {"tokens": ["a", "d", "e"], "top_logprobs": tops}}
    found = question_of(body, choice, 0.4)
    assert (found.answer, found.tokens) == ("ad", 2)
    assert found.margin == pytest.approx(0.5)
    assert question_of(body, choice, 3.0).tokens == 0
    assert found.body["stream"]
    assert "logprobs" not in found.body
    assert found.body["prompt"] == body["prompt"]


def test_tokens_that_read_the_same_lead_by_nothing() -> None:
    choice = {"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": -0.1}]}}
    assert question_of({}, choice, 0.1).tokens == 0


def test_half_a_character_is_not_judged() -> None:
    tops = [{"a": -0.1, "b": -2.6}] * 3
    choice = {
        "text": "a\N{SNOWMAN}",
        "logprobs": {"tokens": ["a", "\ufffd", "\ufffd"], "top_logprobs": tops},
    }
    assert question_of({}, choice, 1.0).answer == "a"


def test_longest_sure_answers_are_asked_for() -> None:
    found = [
        Question({}, str(margin), tokens, margin)
        for tokens, margin in ((1, 9.0), (2, 3.0), (2, 0.5), (3, 2.0))
    ]
    assert [each.margin for each in choose(found)] == [2.0, 3.0]
    assert QUESTIONS == 2


def test_model_without_sure_answers_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="rounding"):
        choose([Question({}, "", 0, 0.0), Question({}, "a", 1, 1.0)])


def test_candidates_differ_and_are_short() -> None:
    prompts = [body["prompt"] for body in candidates("m")]
    assert len(set(prompts)) == len(prompts)
    assert Lengths(16, 16).low == len(prompts[0].split())
