"""Per-sequence sampling: each sequence's next token by its own parameters, seed and position."""

# B sequences, P parameters, V vocabulary

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.outputs import RawLogprob
from actors.engine.sampling import logits as on_cpu
from actors.engine.sampling.adjustments import BiasTable, CountTable, Place
from actors.engine.sampling.grammar import SequenceGrammar, allowed_tokens
from actors.engine.sampling.logits import Param, forbid, logprobs, perturb
from actors.memory import whole_device
from actors.text.sampling_defaults import ResolvedSampling
from actors.text.validation import MAX_LOGPROBS

_INT32_MAX = 2**31 - 1


@dataclass(eq=False)
class SequenceSampling:
    """What sampling must know of one sequence; lives as long as it does, across requeues.

    Belongs to the engine's thread once the sequence has been submitted.
    """

    params: ResolvedSampling
    prompt_ids: tuple[int, ...]
    seed: int
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens; end the sequence
    output_ids: list[int] = field(default_factory=list)  # the engine appends after every step
    grammar: SequenceGrammar | None = None  # its end is among `stop_ids`
    _pending: dict[int, tuple["_StepLogprobs", int]] = field(default_factory=dict, init=False)
    counted_prompt: Tensor | None = field(default=None, init=False)  # see `Adjusted`
    biased: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        p = self.params
        # In the order of Param, which goes on with what differs from step to step.
        self.packed = (
            _float_bits(p.temperature),
            min(p.top_k, _INT32_MAX) if p.top_k > 0 else _INT32_MAX,
            _float_bits(p.top_p),
            _float_bits(p.min_p),
            *struct.unpack("<ii", struct.pack("<q", self.seed)),
        )
        self.penalties = tuple(
            map(_float_bits, (p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
        )
        self.is_filtered = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        self.is_penalised = (
            p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        )
        if p.repetition_penalty != 1:  # the only one that looks at the prompt
            self.counted_prompt = torch.tensor(self.prompt_ids, dtype=torch.int64)
        # With a grammar the end is withheld by that.
        forbidden = self.stop_ids if p.min_tokens > 0 and self.grammar is None else frozenset()
        if p.logit_bias or forbidden:
            self.biased = torch.tensor(
                [
                    (
                        token,
                        _float_bits(p.logit_bias.get(token, 0.0)),
                        min(p.min_tokens, _INT32_MAX) if token in forbidden else 0,
                    )
                    for token in sorted({*p.logit_bias, *forbidden})
                ],
                dtype=torch.int32,
            ).T.contiguous()

    def is_biased(self, generated: int) -> bool:
        """Whether `biased` changes anything, after `generated` tokens."""
        if self.params.logit_bias:
            return True
        return self.biased is not None and generated < self.params.min_tokens

    def withheld(self, generated: int) -> frozenset[int]:
        """Tokens that its grammar must do without, after `generated` tokens."""
        assert self.grammar is not None
        if generated < self.params.min_tokens:
            return self.stop_ids
        return self.grammar.end_ids if self.params.ignore_eos else frozenset()

    def take_logprobs(self, count: int) -> tuple[RawLogprob, ...] | None:
        """Those of the newest `count` tokens in `output_ids`; None if the request wants none.

        Waits for the device the first time a step's results are read.
        """
        if self.params.logprobs is None:
            return None
        end = len(self.output_ids)
        taken = []
        for position in range(end - count, end):
            step, row = self._pending.pop(position)
            taken.append(step.read(row, self.params.logprobs))
        return tuple(taken)


class BatchSampler:
    """Chooses the tokens of each step, in two parts: `prepare` on the host, then `choose`.

    The number of tokens a sequence has generated is told with each step and never counted here, so a
    sequence that starts over after a requeue, or is scheduled ahead of its newest token
    (asynchronous batching), goes on with the same noise.

    A grammar must know the newest token: while `needs_results` is true, what a step gave must be read
    before the next one is prepared.
    """

    def __init__(self, max_sequences: int = 256) -> None:
        """Make a sampler.

        Args:
            max_sequences: in a batch.
        """
        self._counts = CountTable(max_sequences)
        self._bias = BiasTable(max_sequences)
        self._samples = self._filters = False
        self._counted_rows: list[tuple[Place, SequenceSampling, int]] = []
        self._biased_rows: list[tuple[Place, SequenceSampling]] = []
        self._logprob_rows: list[tuple[int, SequenceSampling, int]] = []
        self._grammar_rows: list[tuple[int, SequenceSampling, int]] = []

    @property
    def needs_results(self) -> bool:
        """Whether the batch after the one prepared last depends on this one's tokens."""
        return bool(self._grammar_rows)

    def free(self) -> None:
        """Give the device's memory back, for a sleep; sequences go on right all the same."""
        self._counts.free()
        self._bias.free()

    def warm_up(self, device: torch.device, vocab_size: int) -> None:
        """Compile the kernels, so that no request has to wait for it. Waits for the device."""
        from actors.engine.sampling.kernels import adjust, sample

        logits_BV = torch.zeros((1, vocab_size), dtype=torch.float32, device=device)
        params_PB = torch.ones((len(Param), 1), dtype=torch.int32, device=device)
        ids_B = torch.zeros(1, dtype=torch.int32, device=device)
        counts_SV = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        bias_S3W = torch.zeros((1, 3, 1), dtype=torch.int32, device=device)
        adjust(logits_BV, ids_B, params_PB, counts_SV, bias_S3W)
        for filters in (False, True):
            sample(logits_BV, params_PB, filters=filters)
        whole_device.synchronize(device)

    def prepare(
        self, rows: Sequence[tuple[SequenceSampling, int] | None], params_PB: Tensor
    ) -> None:
        """Write the parameters of a step's rows, and remember what they wish for.

        Args:
            rows: each row's sequence, and how many tokens that has generated; None for one whose token
                nobody wants. Those get one all the same, a greedy one.
            params_PB: int32 [P, any], on the host; written as far as there are rows.
        """
        batch: list[tuple[int, SequenceSampling, int]] = []  # row, sequence, tokens generated
        packed = [_GREEDY] * len(rows)
        self._counted_rows, self._biased_rows = [], []
        self._counts.places.begin_step()
        self._bias.places.begin_step()
        for number, row in enumerate(rows):
            if row is None:
                continue
            sequence, generated = row
            batch.append((number, sequence, generated))
            counts = bias = 0
            if sequence.is_penalised:
                place = self._counts.places.of(sequence)
                self._counted_rows.append((place, sequence, generated))
                counts = 1 + place.number
            if sequence.is_biased(generated):
                place = self._bias.places.of(sequence)
                self._biased_rows.append((place, sequence))
                bias = 1 + place.number
            packed[number] = (*sequence.packed, generated, *sequence.penalties, counts, bias)
        if packed:
            # A tensor of so many Python integers takes a millisecond.
            flat = np.fromiter(chain.from_iterable(packed), np.int32, len(packed) * len(Param))
            params_PB[:, : len(packed)] = torch.from_numpy(flat).view(-1, len(Param)).T
        self._samples = any(sequence.params.temperature > 0 for _, sequence, _ in batch)
        self._filters = any(sequence.is_filtered for _, sequence, _ in batch)
        self._logprob_rows = [entry for entry in batch if entry[1].params.logprobs is not None]
        self._grammar_rows = [entry for entry in batch if entry[1].grammar is not None]

    def choose(self, input_ids: Tensor, logits_BV: Tensor, params_PB: Tensor) -> Tensor:
        """Each row's next token [B]; takes what a call takes, of any type. On CUDA nothing waits for the device."""
        wishes = self._counted_rows or self._biased_rows or self._logprob_rows or self._grammar_rows
        if not (wishes or self._samples):
            return logits_BV.argmax(
                -1
            )  # a copy in float32 would take as long as that, and change nothing
        scores_BV = logits_BV.float()
        if scores_BV.is_cuda:
            return self.sample(input_ids, scores_BV, params_PB)
        return self(input_ids, scores_BV, params_PB).argmax(-1)

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Scores [B, V] whose argmax is each sequence's next token.

        Args:
            input_ids: the token each row was computed from [B].
            scores: the model's logits [B, V], float32; left as they are.
            logits_processor_args: [P, B], rows as in `Param`. Rows of B beyond the batch are padding.
        """
        allowed, result = self._restrict(input_ids, scores, logits_processor_args)
        if self._samples:
            result = perturb(result, logits_processor_args, filters=self._filters)
        if self._logprob_rows:
            self._keep_logprobs(scores, allowed, result.argmax(-1))
        return result

    def sample(self, input_ids: Tensor, logits_BV: Tensor, params_PB: Tensor) -> Tensor:
        """Each sequence's next token [B], the argmax of what a call gives; on CUDA, by kernels.

        Takes what a call takes. Nothing waits for the device.
        """
        from actors.engine.sampling import kernels as on_cuda

        allowed, result = self._restrict(input_ids, logits_BV, params_PB)
        if self._samples:
            chosen_B = on_cuda.sample(result, params_PB, filters=self._filters)
        else:
            chosen_B = result.argmax(-1)
        if self._logprob_rows:
            self._keep_logprobs(logits_BV, allowed, chosen_B)
        return chosen_B

    def _restrict(
        self, input_ids: Tensor, logits_BV: Tensor, params_PB: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor]:
        """What grammars allow, as `forbid` takes it; and the logits after all but temperature and filters."""
        result, device = logits_BV, logits_BV.device
        if self._counted_rows or self._biased_rows:
            counts_SV = bias_S3W = None
            if self._counted_rows:
                counts_SV = self._counts.prepare(self._counted_rows, logits_BV.size(1), device)
            if self._biased_rows:
                bias_S3W = self._bias.prepare(self._biased_rows, device)
            result = _adjust_on(device)(logits_BV, input_ids, params_PB, counts_SV, bias_S3W)
        if not self._grammar_rows:
            return None, result
        # Only now, while the device computes the logits. What is forbidden stays so whatever the
        # adjustments were.
        allowed = self._follow_grammars(logits_BV)
        return allowed, forbid(result, *allowed)

    def _follow_grammars(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with a grammar, and the tokens that it allows, as `forbid` takes them."""
        steps = []
        for _, sequence, generated in self._grammar_rows:
            assert sequence.grammar is not None
            assert generated == len(sequence.output_ids), "the batch before has been read"
            sequence.grammar.follow(sequence.output_ids)
            steps.append((sequence.grammar, sequence.withheld(generated)))
        allowed_RW = allowed_tokens(steps, logits_BV.size(1), pinned=logits_BV.is_cuda)
        rows_R = torch.tensor([row for row, _, _ in self._grammar_rows])
        device = logits_BV.device
        return rows_R.to(device, non_blocking=True), allowed_RW.to(device, non_blocking=True)

    def _keep_logprobs(
        self, logits_BV: Tensor, allowed: tuple[Tensor, Tensor] | None, chosen_B: Tensor
    ) -> None:
        if allowed is not None:
            logits_BV = forbid(logits_BV, *allowed)
        rows_R = torch.tensor([row for row, _, _ in self._logprob_rows])
        rows_R = rows_R.to(logits_BV.device, non_blocking=True)
        # Always the most, so that how many a neighbour wants cannot change which of two tokens with
        # the same logit is listed.
        step = _StepLogprobs(logprobs(logits_BV, chosen_B, rows_R, MAX_LOGPROBS))
        for i, (_, sequence, generated) in enumerate(self._logprob_rows):
            sequence._pending[generated] = (step, i)


class _StepLogprobs:
    """One step's log-probabilities, on the device until somebody reads them."""

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self._tensors = tensors
        self._lists: list[list[Any]] | None = None

    def read(self, row: int, top: int) -> RawLogprob:
        if self._lists is None:
            self._lists = [tensor.tolist() for tensor in self._tensors]
        token_id, logprob, top_ids, top_logprobs = (column[row] for column in self._lists)
        possible = (pair for pair in zip(top_ids, top_logprobs, strict=True) if pair[1] > -math.inf)
        likeliest = sorted(possible, key=lambda pair: (-pair[1], pair[0]))
        return RawLogprob(token_id, logprob, tuple(likeliest[:top]))


def _adjust_on(device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        return on_cpu.adjust
    from actors.engine.sampling import kernels as sampling_kernels

    return sampling_kernels.adjust


def _float_bits(value: float) -> int:
    """The bits of a float32 as an int32."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


_GREEDY = (0, _INT32_MAX, _float_bits(1.0), 0, 0, 0, 0, 0, 0, 0, 0, 0)
