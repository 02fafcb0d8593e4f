"""Outputs of a prescribed form: which tokens a JSON schema, a pattern or a grammar allows next.

llguidance walks the tokens on the CPU (https://github.com/guidance-ai/llguidance). It is imported when
the first grammar comes, so that a replica without any pays nothing.
"""

# R rows of a batch whose sequences have a grammar, W words of 32 tokens each

import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.sampling.grammar_memory import CompiledGrammar, allocated_bytes
from actors.errors import InvalidRequest
from actors.rounding import cdiv

if TYPE_CHECKING:
    from llguidance import LLExecutor

TOO_LARGE = "it takes too much memory"
_MAX_REASON_CHARS = 300
_MAX_THREADS = 8


class SequenceGrammar:
    """How far one sequence has come in its grammar. Belongs to the engine's thread.

    It follows the sequence's outputs, which only grow: a sequence that starts over from its tokens so
    far, after a requeue or a sleep, finds it where it was.

    Attributes:
        compiled: what it shares with the others of the same grammar.
        refusal: why it cannot be followed any further; the sequence then ends at its next token.
    """

    def __init__(self, compiled: CompiledGrammar, param: str) -> None:
        self.refusal: InvalidRequest | None = None
        self.matcher = compiled.matcher.deep_copy()
        self.compiled = compiled
        self._param = param
        self._followed = 0  # outputs

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a sequence whose grammar has come to its end."""
        return self.compiled.end_ids

    def fork(self) -> "SequenceGrammar":
        """The same grammar from its beginning, for another sequence."""
        return SequenceGrammar(self.compiled, self._param)

    def follow(self, output_ids: Sequence[int]) -> None:
        """Take what came since the last call; `output_ids` is all of it."""
        new = output_ids[self._followed :]
        self._followed = len(output_ids)
        if self.refusal is None and new:
            self.matcher.consume_tokens(list(new))
            self._notice()

    def restrict(
        self, row_W: "np.ndarray[Any, np.dtype[np.uint32]]", withheld: frozenset[int]
    ) -> None:
        """Finish a row of the mask that the matcher has filled.

        Without `withheld`, unless nothing else is left: no wish of the caller goes on where the grammar
        has come to its end.
        """
        self._notice()
        if self.refusal is None and not row_W.any():
            self._refuse("this model's vocabulary has no token that could follow")
        if self.refusal is not None:
            row_W[:] = 0
            for token in self.end_ids:
                row_W[token >> 5] |= np.uint32(1 << (token & 31))
        elif withheld:
            kept_W = row_W.copy()
            for token in withheld:
                kept_W[token >> 5] &= ~np.uint32(1 << (token & 31))
            if kept_W.any():
                row_W[:] = kept_W

    def _notice(self) -> None:
        if self.refusal is None and self.matcher.is_error():
            self._refuse(self.matcher.get_error())
        elif self.refusal is None and self.compiled.is_too_large:
            self._refuse(TOO_LARGE)

    def _refuse(self, reason: str) -> None:
        self.compiled.is_exhausted = True
        self.refusal = cannot_follow(self._param, reason)


def allowed_tokens(
    steps: Sequence[tuple[SequenceGrammar, frozenset[int]]], vocab_size: int, *, pinned: bool
) -> Tensor:
    """The tokens that grammars allow next, a bit for each; computed without the GIL.

    Args:
        steps: grammars that have followed all outputs of their sequences, and what `restrict` withholds.
        vocab_size: tokens in a row of logits.
        pinned: the result is in page-locked memory, to be copied to a device.

    Returns:
        int32 [R, W], of a memory that is this call's own; bit i of word w is token 32 w + i.
    """
    words = cdiv(vocab_size, 32)
    allowed_RW = torch.zeros((len(steps), words), dtype=torch.int32, pin_memory=pinned)
    followed = [(grammar, row) for row, (grammar, _) in enumerate(steps) if grammar.refusal is None]
    for together in _measured_apart(followed):
        before = allocated_bytes()
        _executor().unsafe_compute_mask_ptr(
            [(grammar.matcher, row) for grammar, row in together],
            allowed_RW.data_ptr(),
            words * allowed_RW.itemsize,
            len(steps),
        )
        if grown := allocated_bytes() - before:
            shared = [grammar.compiled for grammar, _ in together]
            shared[0].memory.charge(shared, grown)
    rows = allowed_RW.numpy().view(np.uint32)
    for row_W, (grammar, withheld) in zip(rows, steps, strict=True):
        grammar.restrict(row_W, withheld)
    return allowed_RW


def _measured_apart(
    followed: Sequence[tuple[SequenceGrammar, int]],
) -> Iterable[Sequence[tuple[SequenceGrammar, int]]]:
    """Whose masks are computed at once: all, or those of each grammar where they are near a limit."""
    if not followed:
        return []
    compiled = [grammar.compiled for grammar, _ in followed]
    if not compiled[0].memory.is_tight(compiled):
        return [followed]
    apart: dict[int, list[tuple[SequenceGrammar, int]]] = {}
    for grammar, row in followed:
        apart.setdefault(id(grammar.compiled), []).append((grammar, row))
    return apart.values()


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def cannot_follow(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be followed: {shortened(reason)}", param)


def shortened(reason: str) -> str:
    """A message of llguidance, which may be long and have a drawing of the place under it."""
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
