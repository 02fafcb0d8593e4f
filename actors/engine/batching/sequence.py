"""A sequence as the loop keeps it, from its submission to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import SequenceSampling
from actors.protocol import FinishReason

Sink = Callable[[Sequence[EngineOutput]], None]


@dataclass(eq=False, slots=True)
class LoopSequence:
    """Belongs to the loop's thread once it was submitted.

    A step covers the positions from `computed` on. With batches in flight the host does not know the newest
    `pending` tokens yet; the device does.

    Attributes:
        end: tokens of prompt and output at most.
        tokens: of the prompt, and of the output as far as it was read.
        computed: tokens whose keys and values are in the cache, or will be by the steps launched so far.
        pending: tokens that these steps give and that were not read yet.
        epoch: how often it has started over; what a step gives to an earlier one is not wanted any more.
        row: of the last step that it was in.
        blocks: its blocks in the cache, of each group of layers; the cache writes them.
        place: its row in the table of blocks, while it has blocks.
        remembered: of its blocks, those that the prefix cache has seen.
        digests: of all tokens up to the end of each of its first pages, as far as anybody has looked.
        cached_tokens: of its prompt, found in the cache; None before it has blocks, and where nobody looks.
    """

    name: str
    sampling: SequenceSampling
    end: int
    tokens: list[int] = field(init=False)
    computed: int = 0
    pending: int = 0
    epoch: int = 0
    row: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    place: int | None = None
    remembered: int = 0
    digests: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    started_s: float | None = None
    _is_told: bool = field(default=False, init=False)  # how many tokens were found

    def __post_init__(self) -> None:
        self.tokens = list(self.sampling.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens that it has, those included that were not read yet."""
        return len(self.tokens) + self.pending

    @property
    def left(self) -> int:
        """Tokens that it has and that no step has covered; 0 once the last token is on its way."""
        return self.length - self.computed if self.length < self.end else 0

    @property
    def is_new(self) -> bool:
        """Whether nobody has seen a token of it."""
        return not self.sampling.output_ids

    def start_over(self) -> None:
        """Nothing of it is in the cache any more: its tokens so far are computed again."""
        self.computed = self.pending = self.remembered = 0
        self.epoch += 1

    def take(self, token: int) -> EngineOutput:
        """Its next token, as the step gave it; with a finish, if it ends with that."""
        self.tokens.append(token)
        self.pending -= 1
        self.sampling.output_ids.append(token)
        finish: FinishReason | None = None
        stopped = token in self.sampling.stop_ids
        if stopped or len(self.tokens) >= self.end:
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        # Told once. One that starts over finds again what it had.
        cached_tokens = None if self._is_told else self.cached_tokens
        self._is_told = True
        grammar = self.sampling.grammar
        return EngineOutput(
            self.name,
            (token,),
            self.sampling.take_logprobs(1),
            finish,
            token if stopped else None,
            None if grammar is None else grammar.refusal,
            self.started_s,
            cached_tokens,
        )
