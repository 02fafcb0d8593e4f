"""What crosses a process border arrives as it was."""

import pickle
from dataclasses import fields

from actors.protocol import FinishReason, MessageForm, TokenEvent, TokenLogprob


def test_event_arrives_with_every_field() -> None:
    logprob = TokenLogprob(7, "x", b"x", -0.5, (TokenLogprob(8, "y", b"y", -1.5),))
    event = TokenEvent(
        index=1,
        text="x",
        token_ids=(7,),
        prompt_tokens=3,
        finish_reason=FinishReason.STOP,
        stop_reason="x",
        logprobs=(logprob,),
        form=MessageForm("think", "hermes", in_reasoning=True),
        cached_tokens=2,
    )
    defaults = TokenEvent(0, "", (), 0)
    assert all(getattr(event, f.name) != getattr(defaults, f.name) for f in fields(TokenEvent))
    assert pickle.loads(pickle.dumps(event)) == event
