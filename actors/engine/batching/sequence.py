"""A sequence as the manager keeps it, and the way of its tokens out of the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.batching.upstream import RequestState, RequestStatus
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import SequenceSampling
from actors.protocol import FinishReason

Sink = Callable[[Sequence[EngineOutput]], None]


@dataclass(eq=False)
class SequenceState(RequestState):
    """A request of the manager that carries its sampling state and reports only what is new."""

    sampling: SequenceSampling = field(kw_only=True)
    # Of its prompt, found in the KV cache; None before its first batch, and where nothing is looked up.
    cached_tokens: int | None = field(default=None, init=False)
    _reported: int = field(default=0, init=False)

    def to_generation_output(self) -> EngineOutput:
        """What came since the last call; the base class would copy the whole list every step."""
        new = tuple(self.generated_tokens[self._reported :])
        self._reported += len(new)
        # Told once. One that starts over has all it computed before for a prompt.
        cached_tokens = None if self.sampling.output_ids else self.cached_tokens
        self.sampling.output_ids.extend(new)
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if self.status is RequestStatus.FINISHED:
            stopped = bool(new) and new[-1] in self._eos_token_ids
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            stop_token_id = new[-1] if stopped else None
        logprobs = self.sampling.take_logprobs(len(new))
        grammar = self.sampling.grammar
        error = None if grammar is None else grammar.refusal
        return EngineOutput(
            self.request_id,
            new,
            logprobs,
            finish,
            stop_token_id,
            error,
            self.lifespan[0],
            cached_tokens,
        )

    def create_equivalent_initial_request(self) -> "SequenceState":
        """The same sequence with its tokens so far as the prompt, for a requeue."""
        base = super().create_equivalent_initial_request()
        return SequenceState(
            request_id=base.request_id,
            initial_tokens=base.initial_tokens,
            streaming=True,
            max_new_tokens=base.max_new_tokens,
            eos_token_id=self.eos_token_id,
            sampling=self.sampling,
        )


class StepRouter:
    """Stands in for the manager's OutputRouter: one call of the sink per step, on its thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def deliver(self, output: EngineOutput) -> None:
        self._sink([output])

    def deliver_batch(self, outputs: list[EngineOutput]) -> None:
        self._sink(outputs)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        state.error = str(error)
        self._sink([EngineOutput(state.request_id, (), None, error=error)])
