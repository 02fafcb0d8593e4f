"""Sequences on their way to the engine; those that follow a grammar wait until it is compiled."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from actors.engine.engine import TransformersEngine
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.grammar import SequenceGrammar
from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.engine.sampling.sampler import SequenceSampling
from actors.errors import EngineDied, ReplicaFailed, ServingError
from actors.protocol import Grammar
from actors.worker.messages import NewRequest, Outputs, Send

logger = logging.getLogger(__name__)

_GRAMMAR_THREADS = 8  # that wait for one; they are compiled one by one


class Submissions:
    """What a replica submits and cancels. Any thread may call."""

    def __init__(self, engine: TransformersEngine, grammars: GrammarCompiler, send: Send) -> None:
        """Start empty.

        Args:
            grammars: becomes this object's own.
            send: told of sequences that cannot begin.
        """
        self._engine = engine
        self._grammars = grammars
        self._send = send
        self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "wait-for-grammar")
        self._awaiting_grammar: set[str] = set()  # sequences
        self._lock = Lock()

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Have the engine generate; what becomes of each is sent. Grammars are compiled beside it."""
        for new in requests:
            wanted = new.params.grammar
            grammar = None if wanted is None else self._grammars.find(wanted)
            if (wanted is None) == (grammar is None):
                self._begin(new, grammar)
            else:  # forgotten since it was checked
                with self._lock:
                    self._awaiting_grammar.update(new.seeds)
                self._threads.submit(self._compile_and_begin, new)

    def cancel(self, sequence_ids: Sequence[str]) -> None:
        """Forget sequences, whether or not they have ended. No output follows, but for what is under way."""
        for sequence_id in sequence_ids:
            with self._lock:
                awaits = sequence_id in self._awaiting_grammar
                self._awaiting_grammar.discard(sequence_id)
            if not awaits:
                self._engine.cancel(sequence_id)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, so that sequences find it compiled. One that is known waits for no other.

        Raises:
            InvalidRequest: it is no valid one, or too much work; naming the field.
            Unavailable: too many are being compiled.
        """
        if self._grammars.find(grammar) is not None:
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._grammars.compile, grammar)

    def close(self) -> None:
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, new: NewRequest, grammar: SequenceGrammar | None) -> None:
        try:
            for sequence_id, seed in new.seeds.items():
                own = None if grammar is None else grammar.fork()
                self._engine.submit(
                    sequence_id,
                    SequenceSampling(new.params, new.prompt_ids, seed, new.stop_ids, grammar=own),
                )
        except ReplicaFailed as exc:
            self._refuse(new, exc)

    def _compile_and_begin(self, new: NewRequest) -> None:
        assert new.params.grammar is not None
        try:
            grammar = self._grammars.compile(new.params.grammar)
            self._begin(new, grammar)
        except ServingError as exc:
            self._refuse(new, exc)
        except Exception as exc:
            logger.exception("%s cannot begin", ", ".join(new.seeds))
            self._refuse(new, EngineDied(f"the request cannot begin: {type(exc).__name__}"))
        with self._lock:
            cancelled = new.seeds.keys() - self._awaiting_grammar
            self._awaiting_grammar.difference_update(new.seeds)
        for sequence_id in cancelled:
            self._engine.cancel(sequence_id)

    def _refuse(self, new: NewRequest, error: ServingError) -> None:
        """Of those that have begun nobody waits for more: their stream has failed with the others."""
        self._send(Outputs([EngineOutput(each, (), None, error=error) for each in new.seeds]))
