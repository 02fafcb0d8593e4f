"""One request's events on their way up: merged while nobody takes them, paced under load."""

import asyncio
from dataclasses import dataclass, field

from actors.engine.output import OutputAssembler
from actors.protocol import TokenEvent

_WORTH_A_TIMER_S = 0.005


@dataclass(slots=True)
class RequestStream:
    """The continuations of one request, between engine and client. Lives on the event loop."""

    assemblers: list[OutputAssembler]
    sequence_ids: list[str]
    stop_token_ids: tuple[int, ...]  # the request's own, which the client is told about
    events: list[TokenEvent] = field(default_factory=list)  # not yet taken by the consumer
    error: Exception | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # finished or failed

    def push(self, event: TokenEvent | None) -> None:
        if event is not None:
            self.events.append(event)
            self.arrived.set()
        if all(assembler.done for assembler in self.assemblers):
            self.settled.set()
            self.arrived.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.settled.set()
        self.arrived.set()

    def take(self) -> list[TokenEvent]:
        """All events so far, those of one continuation merged into one."""
        self.arrived.clear()
        taken, self.events = self.events, []
        merged: dict[int, TokenEvent] = {}
        for event in taken:
            earlier = merged.get(event.index)
            merged[event.index] = event if earlier is None else merge_events(earlier, event)
        return list(merged.values())

    async def pace(self, interval_s: float) -> None:
        """Let tokens gather for `interval_s`, or until the last one is there."""
        if interval_s < _WORTH_A_TIMER_S or self.settled.is_set():
            return
        try:
            async with asyncio.timeout(interval_s):
                await self.settled.wait()
        except TimeoutError:
            return  # the ordinary case: the interval is over


def merge_events(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """Two consecutive events of one continuation as one."""
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or ()) + (second.logprobs or ())
    return TokenEvent(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        prompt_tokens=first.prompt_tokens,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        form=first.form,
    )
