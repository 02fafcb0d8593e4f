"""Grammars as llguidance has them, compiled once for all sequences that follow them."""

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, cached_property
from typing import TYPE_CHECKING, TypeVar

from actors.engine.sampling.grammar import TOO_LARGE, SequenceGrammar, cannot_follow, shortened
from actors.engine.sampling.grammar_memory import CompiledGrammar, GrammarMemory, allocated_bytes
from actors.errors import InvalidRequest, Unavailable, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind
from actors.text.codec import TextCodec
from actors.text.json_schemas import without_unknown_formats

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_LEXER_STATES = 50_000
_COMPILE_TIMEOUT_S = 10.0  # of one grammar's turn, and of the wait for it
_LOAD_TIMEOUT_S = 120.0  # of the wait for the tokenizer; seconds on a slow host
# llguidance recurses along chains of rules and $refs: 3,000 of them overflow 8 MiB and end the process.
# This is enough for as many as `actors.text.validation.MAX_GRAMMAR_CHARS` can hold.
_COMPILE_STACK_BYTES = 2**28
_STACK_SIZE = threading.Lock()  # the process has one for all threads to come
# Between the tokens of JSON. Without a bound, a model that has nothing to say goes on with white space.
_WHITE_SPACE = r"[ \t\r\n]{1,64}"


class GrammarCompiler:
    """The grammars of one tokenizer, the latest of them kept. Any thread may ask.

    One grammar is compiled at a time, so that the other cores stay with those who are served.
    """

    def __init__(self, load_codec: Callable[[], TextCodec]) -> None:
        """Make one; the tokenizer is loaded for the first grammar, on this compiler's thread."""
        self._load_codec = load_codec
        self._memory = GrammarMemory()
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

    def _on_worker(self, grammar: Grammar) -> CompiledGrammar:
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

    def _submit(self, grammar: Grammar) -> tuple[Future[CompiledGrammar], Future[float]]:
        """What it becomes, and when its turn began."""
        began_s: Future[float] = Future()

        def work() -> CompiledGrammar:
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

    def _find_or_compile(self, grammar: Grammar) -> CompiledGrammar:
        """It may have been compiled for another request while this one waited."""
        key = grammar.kind, grammar.text
        compiled = self._memory.find(key)
        if compiled is None:
            compiled = self._compile(grammar)
            self._memory.keep(key, compiled)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
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
        if compiled.is_too_large:
            del compiled
            compiled = self._measured(grammar, source, tokenizer)
        if compiled.is_too_large:
            raise cannot_follow(grammar.param, TOO_LARGE)
        return compiled

    def _measured(self, grammar: Grammar, source: str, tokenizer: "LLTokenizer") -> CompiledGrammar:
        from llguidance import LLMatcher

        before = allocated_bytes()
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if not matcher.is_error():
            # The first mask is the dearest, and every sequence begins with it.
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = matcher.get_error()
            if reason.startswith("NoExtension"):  # a state of its parser
                reason = "no text matches it"
            raise _invalid(grammar, reason)
        size = max(allocated_bytes() - before, len(source))
        return CompiledGrammar(matcher, self._codec.eos_ids, size, self._memory)

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
            return f"this model's tokenizer is not understood ({shortened(str(exc))})"


def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ValueError: it cannot be read.
    """
    from llguidance import LLMatcher, grammar_from

    text = grammar.text
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = without_unknown_formats(text)
            return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE})
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


def _invalid(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{grammar.param} is no valid {grammar.kind}: {shortened(reason)}", grammar.param
    )
