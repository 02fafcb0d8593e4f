"""Outputs of a prescribed form: which tokens a JSON schema, a pattern or a grammar allows next.

llguidance walks the tokens on the CPU (https://github.com/guidance-ai/llguidance). It is imported when
the first grammar comes, so that a replica without any pays nothing.
"""

# R rows of a batch whose sequences have a grammar, W words of 32 tokens each

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.text import TextCodec
from actors.errors import InvalidRequest, Unavailable, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

_COMPILED = 32  # grammars kept
_MAX_LEXER_STATES = 50_000  # of a grammar, 1 to 2 KiB each; they are made on the way and shared
_COMPILE_TIMEOUT_S = 10.0
# llguidance recurses along chains of rules and $refs: 3,000 of them overflow 8 MiB and end the process.
# This is enough for as many as `actors.engine.validation.MAX_GRAMMAR_CHARS` can hold.
_COMPILE_STACK_BYTES = 2**28
# Between the tokens of JSON. Without a bound, a model that has nothing to say goes on with white space.
_WHITE_SPACE = r"[ \t\r\n]{1,64}"
_MAX_REASON_CHARS = 300
_MAX_THREADS = 8


class _Compiled:
    """A grammar at its beginning; what its sequences find out on their way is found out for all."""

    def __init__(self, matcher: "LLMatcher", end_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.end_ids = end_ids
        self.is_exhausted = False  # a sequence met a limit, which others may share


class SequenceGrammar:
    """How far one sequence has come in its grammar. Belongs to the engine's thread.

    It follows the sequence's outputs, which only grow: a sequence that starts over from its tokens so
    far, after a requeue or a sleep, finds it where it was.

    Attributes:
        refusal: why it cannot be followed any further; the sequence then ends at its next token.
    """

    def __init__(self, compiled: _Compiled, param: str) -> None:
        self.refusal: InvalidRequest | None = None
        self.matcher = compiled.matcher.deep_copy()
        self._compiled = compiled
        self._param = param
        self._followed = 0  # outputs

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a sequence whose grammar has come to its end."""
        return self._compiled.end_ids

    def fork(self) -> "SequenceGrammar":
        """The same grammar from its beginning, for another sequence."""
        return SequenceGrammar(self._compiled, self._param)

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

    def _refuse(self, reason: str) -> None:
        self._compiled.is_exhausted = True
        self.refusal = InvalidRequest(
            f"{self._param} cannot be followed: {_shortened(reason)}", self._param
        )


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
    words = -(-vocab_size // 32)
    allowed_RW = torch.zeros((len(steps), words), dtype=torch.int32, pin_memory=pinned)
    matchers = [
        (grammar.matcher, row) for row, (grammar, _) in enumerate(steps) if grammar.refusal is None
    ]
    if matchers:
        _executor().unsafe_compute_mask_ptr(
            matchers, allowed_RW.data_ptr(), words * allowed_RW.itemsize, len(steps)
        )
    rows = allowed_RW.numpy().view(np.uint32)
    for row_W, (grammar, withheld) in zip(rows, steps, strict=True):
        grammar.restrict(row_W, withheld)
    return allowed_RW


class GrammarCompiler:
    """The grammars of one tokenizer, the latest of them kept. Any thread may ask.

    One grammar is compiled at a time, so that the other cores stay with those who are served.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._compiled: OrderedDict[tuple[GrammarKind, str], _Compiled] = OrderedDict()
        self._lock = threading.Lock()  # of _compiled
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, grammar: Grammar) -> SequenceGrammar:
        """A grammar at its beginning. Blocks, for milliseconds as a rule.

        Raises:
            InvalidRequest: it is no valid grammar, or too much work; names its field.
            UnsupportedParameter: this model's tokenizer knows no grammars.
            Unavailable: other grammars took too long.
        """
        key = grammar.kind, grammar.text
        with self._lock:
            compiled = self._compiled.pop(key, None)
        if compiled is None or compiled.is_exhausted:
            compiled = self._on_worker(grammar)
        with self._lock:
            self._compiled[key] = compiled  # the latest comes last
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        return SequenceGrammar(compiled, grammar.param)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _on_worker(self, grammar: Grammar) -> _Compiled:
        future = self._submit(grammar)
        try:
            return future.result(_COMPILE_TIMEOUT_S)
        except TimeoutError:
            if future.cancel():
                raise Unavailable("other requests' grammars are being compiled") from None
            raise InvalidRequest(
                f"{grammar.param} takes more than {_COMPILE_TIMEOUT_S:g} s to compile",
                grammar.param,
            ) from None

    def _submit(self, grammar: Grammar) -> Future[_Compiled]:
        # For the thread that the first call starts; one of anybody else's may get it as well, which
        # costs addresses only.
        before = threading.stack_size(_COMPILE_STACK_BYTES)
        try:
            return self._worker.submit(self._compile, grammar)
        finally:
            threading.stack_size(before)

    def _compile(self, grammar: Grammar) -> _Compiled:
        from llguidance import LLMatcher

        tokenizer = self._tokenizer
        if isinstance(tokenizer, str):
            raise UnsupportedParameter(
                f"{grammar.param} is not possible: {tokenizer}", grammar.param
            )
        try:
            source = _source(grammar)
        except ValueError as exc:
            raise _invalid(grammar, str(exc)) from exc
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            # The first mask is the dearest, and every sequence begins with it.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        return _Compiled(matcher, self._codec.eos_ids)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer | str":
        """The tokenizer as llguidance has it, or why there is none. On the worker only."""
        fast, ends = self._codec.fast_tokenizer, sorted(self._codec.eos_ids)
        if fast is None:
            return "this model's tokenizer does not work token by token"
        if not ends:
            return "this model has no end-of-sequence token"
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(fast, self._codec.vocab_size, ends)
        except ValueError as exc:
            logger.warning("no grammars: %s", exc)
            return f"this model's tokenizer is not understood ({_shortened(str(exc))})"


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher, grammar_from

    text = grammar.text
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _WHITE_SPACE})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case GrammarKind.CHOICE:
            return _one_of(text)
        case GrammarKind.CFG:
            return grammar_from("grammar", text)


def _one_of(text: str) -> str:
    """A single lexeme: the parser takes 2,000 alternatives at most, the lexer any number."""
    from llguidance import LLMatcher

    quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(quoted)}")


@cache
def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    # llguidance's own bounds on the work of compiling and of a step stay as they are.
    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def _invalid(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{grammar.param} is no valid {grammar.kind}: {_shortened(reason)}", grammar.param
    )


def _shortened(reason: str) -> str:
    """A message of llguidance, which may be long and have a drawing of the place under it."""
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
