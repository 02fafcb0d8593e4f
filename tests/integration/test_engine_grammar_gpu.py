"""Grammars on CUDA: graphs, batches prepared ahead, sleep in between."""

import json
import string
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.engine.sampling.sampler import SequenceSampling
from actors.protocol import Grammar, GrammarKind
from actors.text.codec import TextCodec
from actors.text.sampling_defaults import ResolvedSampling
from tests.integration.gpu_engine import (
    LIMITS,
    MODELS,
    VOCAB,
    Harness,
    counted_replays,
    prompts,
    running,
)

pytestmark = pytest.mark.gpu

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    """A token for each printable ASCII character; fewer tokens than the models have."""
    characters = [*(string.ascii_letters + string.digits + string.punctuation), "Ġ"]
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *characters])}
    assert len(vocab) < VOCAB
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), VOCAB, [EOS])


def submit(
    h: Harness, codec: TextCodec, prompt: tuple[int, ...], seed: int = 0, **sampling: object
) -> str:
    """A sequence that must follow the schema."""
    compiler = GrammarCompiler(lambda: codec)
    grammar = compiler.compile(
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
    )
    compiler.close()
    wishes: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300, **sampling}
    params = ResolvedSampling(**wishes)
    name = f"s{len(h.prompts)}"
    h.prompts[name], h.tokens[name], h.logprobs[name] = prompt, [], []
    h.running.add(name)
    h.engine.submit(name, SequenceSampling(params, prompt, seed, frozenset({EOS}), [], grammar))
    return name


def check(h: Harness, codec: TextCodec, *names: str) -> None:
    finished = 0
    for name in names:
        *tokens, last = h.tokens[name]
        if last == EOS:
            jsonschema.validate(json.loads(codec.decode(tokens)), SCHEMA)
            finished += 1
    assert finished > len(names) / 2, "most answers come to their end within max_tokens"


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
def test_answers_follow_their_schema_and_neighbours_are_greedy(
    codec: TextCodec, use_graphs: bool, use_async: bool
) -> None:
    limits = LIMITS.model_copy(
        update={"use_async_batching": use_async, "use_cuda_graphs": use_graphs}
    )
    with running(MODELS["qwen2, 64"](), limits) as h, counted_replays() as replays:
        first, second, third, fourth, fifth = prompts(2, (9, 30, 5, 60, 12))
        greedy = [h.submit(first, 60), h.submit(second, 100)]
        followed = [submit(h, codec, third)]
        for _ in range(20):
            h.step()
        followed += [
            submit(h, codec, fourth, 1, temperature=1.0, top_p=0.9, frequency_penalty=0.5),
            submit(h, codec, fifth, 2, temperature=1.5, logprobs=3),
            submit(h, codec, fifth, 3, temperature=1.0, min_tokens=20),
        ]
        greedy.append(h.submit(fifth, 30))
        h.finish()
        assert (replays[0] > 0) == use_graphs
        check(h, codec, *followed)
        h.check_greedy(*greedy)
        listed = followed[2]
        assert [entry.token_id for entry in h.logprobs[listed]] == h.tokens[listed]
        assert all(1 <= len(entry.top) <= 3 for entry in h.logprobs[listed])
        alone = h.submit(second, 30)
        h.finish()
        assert not h.engine._sampler.needs_results  # batches are prepared ahead again
        h.check_greedy(alone)


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_grammar_goes_on_where_it_was_after_losing_everything(
    codec: TextCodec, use_async: bool
) -> None:
    limits = LIMITS.model_copy(update={"use_async_batching": use_async})
    with running(MODELS["llama, 7 x 128"](), limits) as h:
        names = [submit(h, codec, p, i, temperature=1.0) for i, p in enumerate(prompts(0))]
        neighbour = h.submit(prompts(1)[3], 80)
        for _ in range(4):
            for _ in range(11):
                if h.running:
                    h.step()
            h.lose_and_restore()
        h.finish()
        check(h, codec, *names)
        h.check_greedy(neighbour)
