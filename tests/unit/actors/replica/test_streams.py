import asyncio
import pickle
from collections.abc import Sequence

from actors.errors import ReplicaFailed
from actors.protocol import FinishReason, MessageForm, TokenEvent, TokenLogprob
from actors.replica.streams import RequestStream, pieces
from actors.text.output import OutputAssembler


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


LONG_S = 3600.0


class Silent:
    """A decoder of no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def test_stream_is_held_up_only_when_its_last_event_is_too_recent() -> None:
    async def scenario() -> None:
        stream = RequestStream([], [], ())
        await stream.pace(LONG_S)  # the first event
        paced = asyncio.create_task(stream.pace(LONG_S))
        await asyncio.sleep(0)
        assert not paced.done()
        paced.cancel()
        await asyncio.wait([paced])
        await stream.pace(0.0)  # so long ago
        assert not stream.settled.is_set()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_end_is_not_held_up() -> None:
    async def scenario() -> None:
        stream = RequestStream([OutputAssembler(Silent())], ["seq-0"], ())
        await stream.pace(LONG_S)
        paced = asyncio.create_task(stream.pace(LONG_S))
        await asyncio.sleep(0)
        stream.fail(ReplicaFailed("gone"))
        await paced
        await stream.pace(LONG_S)

    asyncio.run(asyncio.wait_for(scenario(), 10))
