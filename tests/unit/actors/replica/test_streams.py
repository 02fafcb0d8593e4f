import pickle

from actors.protocol import FinishReason, MessageForm, TokenEvent, TokenLogprob
from actors.replica.streams import pieces


def logprob(number: int, tops: int) -> TokenLogprob:
    text = f" token {number}"
    top = tuple(logprob(1000 * number + i, 0) for i in range(tops))
    return TokenLogprob(number, text, text.encode(), -1.25 * number, top)


def test_event_with_many_logprobs_comes_in_pieces_that_fit_a_message() -> None:
    ids = tuple(range(5000))
    event = TokenEvent(1, "the text", ids, 7, FinishReason.STOP, "x", tuple(logprob(i, 20) for i in ids), MessageForm())  # fmt: skip
    found = list(pieces(event))
    assert len(found) == 10
    assert max(len(pickle.dumps(piece)) for piece in found) < 4 * 2**20
    assert [piece.text for piece in found] == ["the text", *[""] * 9]
    assert [piece.form for piece in found] == [MessageForm(), *[None] * 9]
    assert [(p.finish_reason, p.stop_reason) for p in found] == [(None, None)] * 9 + [(FinishReason.STOP, "x")]  # fmt: skip
    assert tuple(i for piece in found for i in piece.token_ids) == ids
    assert tuple(each for piece in found for each in piece.logprobs or ()) == event.logprobs
    assert {(piece.index, piece.prompt_tokens) for piece in found} == {(1, 7)}


def test_other_events_are_left_as_they_are() -> None:
    for logprobs in (None, (), (logprob(1, 2),)):
        event = TokenEvent(0, "text", (1,), 3, logprobs=logprobs)
        assert list(pieces(event)) == [event]


def test_echo_has_no_tokens_of_its_own() -> None:
    event = TokenEvent(
        0, "a long prompt", (), 5000, logprobs=tuple(logprob(i, 0) for i in range(5000))
    )
    found = list(pieces(event))
    assert len(found) == 10
    assert all(piece.token_ids == () for piece in found)
