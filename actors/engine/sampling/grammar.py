"""Outputs of a prescribed form: which tokens a JSON schema, a pattern or a grammar allows next.

llguidance walks the tokens on the CPU (https://github.com/guidance-ai/llguidance). It is imported when
the first grammar comes, so that a replica without any pays nothing.
"""

# R rows of a batch whose sequences have a grammar, W words of 32 tokens each

import ctypes
import json
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.errors import InvalidRequest, Unavailable, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind
from actors.rounding import cdiv
from actors.text.codec import TextCodec

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COMPILED = 32  # grammars kept
# What grammars are made of on their way, and share, is in llguidance's lexer, whose size it does not tell.
# A state took 0.6 KiB in `(a|b)*a(a|b){30}` and 19 KiB in `(a|b)*a(a|b){10000}` after 3,000 tokens, more
# with every token. So their bytes are bounded, too, as the allocator tells them.
_MAX_LEXER_STATES = 50_000
_MAX_BYTES = 2**28  # of one grammar
_MAX_BYTES_IN_ALL = 2**30  # of those kept, and those that sequences still use
# Compiled anew when it is asked for again. What other threads allocate during a mask is counted as well,
# so that a grammar of everybody's may seem to grow. From here on it matters who has grown.
_RENEWED_BYTES = 2**26
# Tables double when they are full: masks add as much as their grammars have, or this much to small ones (26 MiB to
# 75, 9 to 6 was seen). What is above that is another thread's, as gigabytes of an image are.
_GROWN_AT_ONCE_BYTES = 2**24
_COMPILE_TIMEOUT_S = 10.0  # of one grammar's turn, and of the wait for it
_LOAD_TIMEOUT_S = 120.0  # of the wait for the tokenizer; seconds on a slow host
# llguidance recurses along chains of rules and $refs: 3,000 of them overflow 8 MiB and end the process.
# This is enough for as many as `actors.text.validation.MAX_GRAMMAR_CHARS` can hold.
_COMPILE_STACK_BYTES = 2**28
_STACK_SIZE = threading.Lock()  # the process has one for all threads to come
# Between the tokens of JSON. Without a bound, a model that has nothing to say goes on with white space.
_WHITE_SPACE = r"[ \t\r\n]{1,64}"
_MAX_REASON_CHARS = 300
_TOO_LARGE = "it takes too much memory"
_MAX_THREADS = 8


class _Compiled:
    """A grammar at its beginning; what its sequences find out on their way is found out for all."""

    def __init__(
        self, matcher: "LLMatcher", end_ids: frozenset[int], size: int, memory: "_Memory"
    ) -> None:
        self.matcher = matcher
        self.end_ids = end_ids
        self.bytes = size
        self.memory = memory
        self.is_exhausted = False  # a sequence met a limit, which others may share
        self.is_too_large = False  # its sequences end


class _Memory:
    """The compiled grammars there are: those kept, the latest of them, and those only sequences have.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[GrammarKind, str], _Compiled] = OrderedDict()
        self._alive: weakref.WeakSet[_Compiled] = weakref.WeakSet()
        self._lock = threading.Lock()

    def find(self, key: tuple[GrammarKind, str]) -> _Compiled | None:
        """One that is kept and can be used; now the latest."""
        with self._lock:
            compiled = self._kept.pop(key, None)
            if compiled is None or compiled.is_exhausted or compiled.bytes > _RENEWED_BYTES:
                return None
            self._kept[key] = compiled
            return compiled

    def keep(self, key: tuple[GrammarKind, str], compiled: _Compiled) -> None:
        """As the latest; others go when they are too many, or too large."""
        with self._lock:
            self._alive.add(compiled)
            self._kept[key] = compiled
            while len(self._kept) > _COMPILED:
                self._kept.popitem(last=False)
            self._make_room(at_least=1)

    def check_room(self) -> None:
        """Raises Unavailable if what sequences use leaves no room for another grammar."""
        with self._lock:
            self._make_room(at_least=0)
            if self._bytes() > _MAX_BYTES_IN_ALL:
                raise Unavailable(
                    "the grammars of other requests take all memory there is for them"
                )

    def is_tight(self, compiled: Sequence[_Compiled]) -> bool:
        """Whether it matters which of these grows; what many take together is anybody's."""
        with self._lock:
            largest = max(each.bytes for each in compiled)
            return largest > _RENEWED_BYTES or self._bytes() > _MAX_BYTES_IN_ALL // 2

    def charge(self, compiled: Sequence[_Compiled], grown_bytes: int) -> None:
        """What their masks took, which cannot be told apart. The largest goes where there is no room."""
        possible = max(_GROWN_AT_ONCE_BYTES, sum(each.bytes for each in set(compiled)))
        share = min(grown_bytes, possible) // len(compiled)
        for each in compiled:
            each.bytes = max(0, each.bytes + share)
            each.is_too_large |= each.bytes > _MAX_BYTES
        with self._lock:
            self._make_room(at_least=0)
            if self._bytes() > _MAX_BYTES_IN_ALL:
                max(self._alive, key=lambda each: each.bytes).is_too_large = True

    def _make_room(self, at_least: int) -> None:
        while len(self._kept) > at_least and self._bytes() > _MAX_BYTES_IN_ALL:
            self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(each.bytes for each in self._alive)


class SequenceGrammar:
    """How far one sequence has come in its grammar. Belongs to the engine's thread.

    It follows the sequence's outputs, which only grow: a sequence that starts over from its tokens so
    far, after a requeue or a sleep, finds it where it was.

    Attributes:
        compiled: what it shares with the others of the same grammar.
        refusal: why it cannot be followed any further; the sequence then ends at its next token.
    """

    def __init__(self, compiled: _Compiled, param: str) -> None:
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
            self._refuse(_TOO_LARGE)

    def _refuse(self, reason: str) -> None:
        self.compiled.is_exhausted = True
        self.refusal = _refusal(self._param, reason)


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
        before = _allocated_bytes()
        _executor().unsafe_compute_mask_ptr(
            [(grammar.matcher, row) for grammar, row in together],
            allowed_RW.data_ptr(),
            words * allowed_RW.itemsize,
            len(steps),
        )
        if grown := _allocated_bytes() - before:
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


class GrammarCompiler:
    """The grammars of one tokenizer, the latest of them kept. Any thread may ask.

    One grammar is compiled at a time, so that the other cores stay with those who are served.
    """

    def __init__(self, load_codec: Callable[[], TextCodec]) -> None:
        """Make one; the tokenizer is loaded for the first grammar, on this compiler's thread."""
        self._load_codec = load_codec
        self._memory = _Memory()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._loading: Future[object] | None = None
        self._loading_lock = threading.Lock()

    def find(self, grammar: Grammar) -> SequenceGrammar | None:
        """A grammar at its beginning, if it is compiled already. Does not block."""
        compiled = self._memory.find((grammar.kind, grammar.text))
        return None if compiled is None else SequenceGrammar(compiled, grammar.param)

    def compile(self, grammar: Grammar) -> SequenceGrammar:
        """A grammar at its beginning. Blocks, for milliseconds as a rule.

        Raises:
            InvalidRequest: it is no valid grammar, or too much work; names its field.
            UnsupportedParameter: this model's tokenizer knows no grammars.
            Unavailable: the tokenizer or other grammars took too long, or these take too much memory.
        """
        found = self.find(grammar)
        if found is not None:
            return found
        self._memory.check_room()
        return SequenceGrammar(self._on_worker(grammar), grammar.param)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _on_worker(self, grammar: Grammar) -> _Compiled:
        self._await_tokenizer()
        future, began_s = self._submit(grammar)
        wait([future], _COMPILE_TIMEOUT_S)
        if not future.done() and future.cancel():
            raise Unavailable("other requests' grammars are being compiled")
        # Others may have been compiled for most of this time.
        wait([future], began_s.result() + _COMPILE_TIMEOUT_S - time.monotonic())
        if future.done():
            return future.result()
        raise InvalidRequest(
            f"{grammar.param} takes more than {_COMPILE_TIMEOUT_S:g} s to compile", grammar.param
        )

    def _await_tokenizer(self) -> None:
        """The first request waits for it, and its grammar is not to blame for that."""
        with self._loading_lock:
            loading = self._loading = self._loading or self._start(lambda: self._tokenizer)
        wait([loading], _LOAD_TIMEOUT_S)
        if not loading.done():
            raise Unavailable("the tokenizer for grammars is still being loaded")
        if loading.exception() is not None:
            with self._loading_lock:
                if self._loading is loading:
                    self._loading = None  # the next request tries again
        loading.result()

    def _submit(self, grammar: Grammar) -> tuple[Future[_Compiled], Future[float]]:
        """What it becomes, and when its turn began."""
        began_s: Future[float] = Future()

        def work() -> _Compiled:
            began_s.set_result(time.monotonic())
            return self._find_or_compile(grammar)

        return self._start(work), began_s

    def _start(self, work: Callable[[], T]) -> Future[T]:
        # For the thread that the first call starts; one of anybody else's may get it as well, which
        # costs addresses only.
        with _STACK_SIZE:
            before = threading.stack_size(_COMPILE_STACK_BYTES)
            try:
                return self._worker.submit(work)
            finally:
                threading.stack_size(before)

    def _find_or_compile(self, grammar: Grammar) -> _Compiled:
        """It may have been compiled for another request while this one waited."""
        key = grammar.kind, grammar.text
        compiled = self._memory.find(key)
        if compiled is None:
            compiled = self._compile(grammar)
            self._memory.keep(key, compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> _Compiled:
        tokenizer = self._tokenizer
        if isinstance(tokenizer, str):
            raise UnsupportedParameter(
                f"{grammar.param} is not possible: {tokenizer}", grammar.param
            )
        try:
            source = _source(grammar)
        except ValueError as exc:
            raise _invalid(grammar, str(exc)) from exc
        compiled = self._measured(grammar, source, tokenizer)
        # Another thread may have allocated most of it, but hardly twice.
        if compiled.bytes > _MAX_BYTES:
            del compiled
            compiled = self._measured(grammar, source, tokenizer)
        if compiled.bytes > _MAX_BYTES:
            raise _refusal(grammar.param, _TOO_LARGE)
        return compiled

    def _measured(self, grammar: Grammar, source: str, tokenizer: "LLTokenizer") -> _Compiled:
        from llguidance import LLMatcher

        before = _allocated_bytes()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            # The first mask is the dearest, and every sequence begins with it.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        size = max(_allocated_bytes() - before, len(source))
        return _Compiled(matcher, self._codec.eos_ids, size, self._memory)

    @cached_property
    def _codec(self) -> TextCodec:
        """On the worker only."""
        return self._load_codec()

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


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def _allocated_bytes() -> int:
    """What malloc has given to this process; takes 5 us. 0 where the C library cannot tell (glibc 2.33 can)."""
    read = _mallinfo()
    if read is None:
        return 0
    info = read()
    return int(info.uordblks + info.hblkhd)


@cache
def _mallinfo() -> Any:
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        logger.warning("grammars' memory is bounded by their number only: no mallinfo2 here")
        return None
    read.restype = _Mallinfo
    return read


def _invalid(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{grammar.param} is no valid {grammar.kind}: {_shortened(reason)}", grammar.param
    )


def _refusal(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be followed: {_shortened(reason)}", param)


def _shortened(reason: str) -> str:
    """A message of llguidance, which may be long and have a drawing of the place under it."""
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}..."
