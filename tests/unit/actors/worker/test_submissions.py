"""Sequences on their way to the engine, with grammars that are slow or cannot be compiled."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.engine.sampling.sampler import SequenceSampling
from actors.errors import EngineDied
from actors.protocol import Grammar, GrammarKind
from actors.text.sampling_defaults import ResolvedSampling
from actors.worker.messages import NewRequest, Outputs
from actors.worker.submissions import Submissions


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "guided_regex")


class SlowCompiler:
    """One that knows a single grammar; it never comes to the end of another before `close`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._closed = threading.Event()

    def find(self, grammar: Grammar) -> object | None:
        return "compiled" if grammar == regex("known") else None

    def compile(self, grammar: Grammar) -> object:
        self.asked.append(grammar.text)
        self._closed.wait()
        return "compiled"

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def compiler() -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    yield compiler
    compiler.close()


def test_grammar_that_is_known_waits_for_none_that_is_slow(compiler: SlowCompiler) -> None:
    grammars: Any = compiler

    async def scenario() -> None:
        submissions = Submissions(Mock(), grammars, Mock())
        slow = [asyncio.create_task(submissions.check_grammar(regex(str(i)))) for i in range(20)]
        while len(compiler.asked) < 8:
            await asyncio.sleep(0)
        await submissions.check_grammar(regex("known"))
        assert not any(task.done() for task in slow)
        compiler.close()
        await asyncio.gather(*slow)
        submissions.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_sequence_whose_grammar_cannot_be_compiled_for_any_reason_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load() -> Any:
        raise OSError(5, "Input/output error", "tokenizer.json")

    sent: queue.Queue[Any] = queue.Queue()
    engine = Mock()
    submissions = Submissions(engine, GrammarCompiler(load), sent.put)
    params = ResolvedSampling(grammar=regex("a"))
    submissions.submit([NewRequest({"r-0": 1, "r-1": 2}, (1,), params, frozenset())])
    told = sent.get(timeout=10)
    submissions.close()
    assert isinstance(told, Outputs)
    assert [output.sequence_id for output in told.outputs] == ["r-0", "r-1"]
    for output in told.outputs:
        assert isinstance(output.error, EngineDied)
        assert "OSError" in str(output.error)
    assert "Input/output error: 'tokenizer.json'" in caplog.text
    engine.submit.assert_not_called()


@pytest.mark.parametrize("known", [True, False])
def test_continuations_share_their_prompt_and_have_a_seed_and_a_grammar_each(known: bool) -> None:
    begun: queue.Queue[tuple[str, SequenceSampling]] = queue.Queue()
    engine = Mock(submit=lambda *sequence: begun.put(sequence))
    grammar = Mock(fork=Mock)
    grammars = Mock(
        find=lambda _: grammar if known else None,
        compile=lambda _: grammar,
    )
    submissions = Submissions(engine, grammars, Mock())
    params = ResolvedSampling(grammar=regex("a"))
    new = NewRequest({"r-0": 5, "r-1": 6, "r-2": 7}, (1, 2, 3), params, frozenset())
    submissions.submit([new])
    found = [begun.get(timeout=10) for _ in new.seeds]
    submissions.close()
    assert {sequence_id: sampling.seed for sequence_id, sampling in found} == new.seeds
    assert all(sampling.prompt_ids is new.prompt_ids for _, sampling in found)
    assert len({id(sampling.grammar) for _, sampling in found}) == 3
