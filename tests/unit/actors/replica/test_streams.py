import asyncio
import pickle
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from actors.engine.outputs import EngineOutput
from actors.errors import ReplicaFailed
from actors.observer import EngineMeter, Observer
from actors.protocol import (
    ChatPrompt,
    FinishReason,
    GenerateRequest,
    MessageForm,
    Prompt,
    SamplingParams,
    TokenEvent,
    TokenLogprob,
)
from actors.replica.runtime import ModelRuntime
from actors.replica.streams import OpenStreams, Prepared, RequestStream, pieces
from actors.text.codec import TextCodec
from actors.text.output import OutputAssembler, StopStrings
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.messages import NewRequest


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


def test_sequences_carry_the_id_of_their_request_into_the_worker_s_log_and_none_comes_twice() -> (
    None
):
    submitted: list[NewRequest] = []

    class Worker:
        def submit(self, request: NewRequest) -> None:
            submitted.append(request)

        def cancel(self, sequence_id: str) -> None: ...

    codec: Any = Mock()
    streams = OpenStreams(Worker(), codec, EngineMeter(Observer()))
    request = GenerateRequest("chatcmpl-7-0", (1, 2), n=2)
    for _ in range(2):  # begun again, by the same worker as after a refusal elsewhere
        streams.open(
            Prepared(
                request, (1, 2), ResolvedSampling(), (3, 4), frozenset(), None, None, arrived_s=0.0
            )
        )
    assert [tuple(each.seeds.values()) for each in submitted] == [(3, 4)] * 2
    ids = [sequence_id for each in submitted for sequence_id in each.seeds]
    assert len(set(ids)) == 4
    assert all(each.startswith("chatcmpl-7-0-") for each in ids)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (ChatPrompt(({"role": "user", "content": "b"},)), "b"),
        (
            ChatPrompt(
                ({"role": "assistant", "content": "b"},),
                add_generation_prompt=False,
                template_kwargs={"continue_final_message": True},
            ),
            " b",
        ),
        ("b", " b"),
    ],
)
def test_space_before_a_text_is_lost_only_where_a_message_begins(prompt: Prompt, text: str) -> None:
    """As Llama 2's tokenizer has it."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "▁b": 1}, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), 2, [])
    streams = OpenStreams(Mock(), codec, EngineMeter(Observer()))

    async def scenario() -> list[TokenEvent]:
        stream = streams.open(
            Prepared(
                GenerateRequest("r", prompt),
                (1,),
                ResolvedSampling(),
                (0,),
                frozenset(),
                None,
                None,
                arrived_s=0.0,
            )
        )
        streams.deliver([EngineOutput(stream.sequence_ids[0], (1,), None)])
        return stream.take()

    (event,) = asyncio.run(scenario())
    assert event.text == text


def test_continuations_share_what_finds_their_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = StopStrings.__init__

    def count(self: StopStrings, stops: Sequence[str]) -> None:
        made.append(len(stops))
        make(self, stops)

    monkeypatch.setattr(StopStrings, "__init__", count)
    codec: Any = Mock()
    codec.stream = lambda context: Letters()
    codec.encode_prompt.return_value = (1,)
    codec.eos_ids = frozenset()
    worker: Any = Mock(facts=Mock(max_model_len=512, vocab_size=512))

    async def scenario() -> list[TokenEvent]:
        runtime = ModelRuntime(worker, codec, Observer(), ResolvedSampling(), 100.0)
        prepared = runtime.prepare(
            GenerateRequest("r", (1,), SamplingParams(stop=("bc", "bd")), n=3)
        )
        stream = OpenStreams(worker, codec, EngineMeter(Observer())).open(prepared)
        for assembler, text in zip(stream.assemblers, ("abc", "aabd", "abb"), strict=True):
            assembler.push(tuple(map(ord, text)))
        return stream.take()

    events = asyncio.run(scenario())
    assert [(event.text, event.stop_reason) for event in events] == [
        ("a", "bc"),
        ("aa", "bd"),
        ("ab", None),
    ]
    assert made == [2]


LONG_S = 3600.0


def test_prompt_goes_to_the_worker_once_whatever_n_is() -> None:
    def message_bytes(n: int) -> int:
        worker = Mock()
        request = GenerateRequest("r", tuple(range(30_000)), n=n)
        OpenStreams(worker, Mock(), EngineMeter(Observer())).open(
            Prepared(
                request,
                tuple(range(30_000)),
                ResolvedSampling(),
                tuple(range(n)),
                frozenset(),
                None,
                None,
                arrived_s=0.0,
            )
        )
        return sum(len(msgspec.msgpack.encode(call.args)) for call in worker.submit.call_args_list)

    assert message_bytes(128) < 1.1 * message_bytes(1)


class Silent:
    """A decoder of no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Letters:
    """A decoder whose tokens are characters."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

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


def test_first_tokens_go_up_before_those_of_streams_under_way() -> None:
    codec: Any = Mock()
    codec.stream = lambda prompt_ids: Silent()
    streams = OpenStreams(Mock(), codec, EngineMeter(Observer()))
    told: list[str] = []

    async def read(name: str, stream: RequestStream) -> None:
        await stream.arrived.wait()
        told.append(name)

    async def scenario() -> None:
        opened = [
            streams.open(
                Prepared(
                    GenerateRequest("chat", (1,)),
                    (1,),
                    ResolvedSampling(),
                    (3,),
                    frozenset(),
                    None,
                    None,
                    0.0,
                )
            )
            for _ in range(2)
        ]
        await opened[0].pace(0.0)
        async with asyncio.TaskGroup() as group:
            for name, stream in zip(("under way", "new"), opened, strict=True):
                group.create_task(read(name, stream))
            await asyncio.sleep(0)
            streams.deliver([EngineOutput(each.sequence_ids[0], (7,), None) for each in opened])

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert told == ["new", "under way"]


def opened(streams: OpenStreams, count: int = 1) -> RequestStream:
    prepared = Prepared(
        GenerateRequest("r", (1,), n=count),
        (1,),
        ResolvedSampling(),
        tuple(range(count)),
        frozenset(),
        None,
        None,
        arrived_s=0.0,
    )
    return streams.open(prepared)


def test_all_advance_once_each_that_is_open_has_a_token_more_or_has_left() -> None:
    streams, codec = OpenStreams(Mock(), Mock(), EngineMeter(Observer())), Mock()

    def token(stream: RequestStream, index: int = 0) -> None:
        streams.deliver([EngineOutput(stream.sequence_ids[index], (1,), None)])

    async def scenario() -> None:
        assert streams.all_have_tokens
        frozen, leaves = opened(streams, count=2), opened(streams)
        token(frozen)
        assert not streams.all_have_tokens
        advanced = Mock()
        streams.when_advanced(advanced)
        late = opened(streams)
        token(frozen)
        token(frozen)
        token(frozen, 1)
        advanced.assert_not_called()
        streams.close(leaves)
        advanced.assert_called_once()  # whoever came later is not waited for
        assert not streams.all_have_tokens
        token(late)
        assert streams.all_have_tokens
        advanced.assert_called_once()

    codec.stream = lambda context: Letters()
    asyncio.run(scenario())


def test_where_nothing_is_open_the_first_request_is_waited_for() -> None:
    streams = OpenStreams(Mock(), Mock(), EngineMeter(Observer()))

    async def scenario() -> None:
        advanced = Mock()
        streams.when_advanced(advanced)
        first = opened(streams)
        opened(streams)
        advanced.assert_not_called()
        streams.deliver([EngineOutput(first.sequence_ids[0], (1,), None)])
        advanced.assert_called_once()

    asyncio.run(scenario())
