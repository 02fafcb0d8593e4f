"""Grammars on a tokenizer of bytes, with logits that want something else."""

import gc
import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from actors.engine.outputs import RawLogprob
from actors.engine.sampling import grammar_compiler, grammar_memory
from actors.engine.sampling.grammar import SequenceGrammar, allowed_tokens
from actors.engine.sampling.grammar_compiler import GrammarCompiler
from actors.engine.sampling.logits import forbid
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.errors import InvalidRequest, Unavailable, UnsupportedParameter
from actors.protocol import Grammar, GrammarKind, SamplingParams
from actors.text.codec import TextCodec
from actors.text.sampling_defaults import ResolvedSampling
from actors.text.validation import MAX_GRAMMAR_CHARS, validate
from tests.unit.actors.engine.sampling.test_sampling import run_step

V = 300  # the model's: more than the tokenizer has
PROMPT = (1, 2, 3)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "bc", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def make_codec(*ends: str) -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("{", '"'), ("Ġ", "Ġ")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<end of turn>", "<other>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return TextCodec(tokenizer, V, [tokenizer.convert_tokens_to_ids(end) for end in ends])


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return make_codec("<eos>", "<end of turn>")


@pytest.fixture
def compiler(codec: TextCodec) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: codec)
    yield compiler
    compiler.close()


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "guided_regex")


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), "response_format")


def sequence(
    codec: TextCodec, grammar: SequenceGrammar | None, seed: int = 0, **params: Any
) -> SequenceSampling:
    stops = codec.eos_ids | set(params.get("stop_token_ids", ()))
    settings = ResolvedSampling(**({"temperature": 0.0} | params))
    return SequenceSampling(settings, PROMPT, seed, stops, [], grammar)


def noise(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 5


def generate(seq: SequenceSampling, seed: int = 0, limit: int = 400) -> list[int]:
    """Tokens of random logits, as the engine would take them, the last one included."""
    sampler = BatchSampler()
    for step in range(limit):
        token = int(run_step(sampler, [seq], noise(seed * limit + step)).argmax())
        seq.output_ids.append(token)
        if token in seq.stop_ids:
            break
    return seq.output_ids


def allowed(grammar: SequenceGrammar, withheld: frozenset[int] = frozenset()) -> set[int]:
    mask_1W = allowed_tokens([(grammar, withheld)], V, pinned=False)
    return set(
        (forbid(torch.zeros(1, V), torch.tensor([0]), mask_1W)[0] == 0).nonzero()[:, 0].tolist()
    )


def ids(codec: TextCodec, text: str) -> list[int]:
    return list(codec.encode_prompt(text))


# What comes out


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_output_follows_its_schema_whatever_the_logits_are(
    codec: TextCodec, compiler: GrammarCompiler, seed: int, temperature: float
) -> None:
    seq = sequence(
        codec, compiler.compile(schema(SCHEMA)), seed, temperature=temperature, top_p=0.9
    )
    *tokens, last = generate(seq, seed)
    assert last in codec.eos_ids
    jsonschema.validate(json.loads(codec.decode(tokens)), SCHEMA)


@pytest.mark.parametrize("seed", range(5))
def test_any_object_is_an_object(codec: TextCodec, compiler: GrammarCompiler, seed: int) -> None:
    seq = sequence(codec, compiler.compile(schema({"type": "object"})), seed)
    *tokens, last = generate(seq, seed, limit=3000)
    assert last in codec.eos_ids
    assert isinstance(json.loads(codec.decode(tokens)), dict)


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-c]+x", r"^(yes|no)$", "é{2}😀?", "a b"])
def test_output_matches_the_whole_pattern(
    codec: TextCodec, compiler: GrammarCompiler, pattern: str
) -> None:
    *tokens, last = generate(sequence(codec, compiler.compile(regex(pattern))))
    assert last in codec.eos_ids
    assert re.fullmatch(pattern, codec.decode(tokens))


def test_output_is_one_of_the_choices(codec: TextCodec, compiler: GrammarCompiler) -> None:
    choices = ["a", "ab", 'say "x"\n\\', "日本", "/#|", *(f"{i * 7919}" for i in range(3000))]
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(choices), "guided_choice")
    found = set()
    for seed in range(30):
        *tokens, last = generate(sequence(codec, compiler.compile(grammar)), seed)
        assert last in codec.eos_ids
        found.add(codec.decode(tokens))
    assert found <= set(choices)
    assert len(found) > 3


@pytest.mark.parametrize("text", ['root ::= "<" [0-9]+ ">"', 'start: "<" /[0-9]+/ ">"'])
def test_grammar_may_be_ebnf_or_lark(
    codec: TextCodec, compiler: GrammarCompiler, text: str
) -> None:
    grammar = compiler.compile(Grammar(GrammarKind.CFG, text, "guided_grammar"))
    *tokens, _ = generate(sequence(codec, grammar))
    assert re.fullmatch("<[0-9]+>", codec.decode(tokens))


def test_properties_come_in_the_order_of_the_schema(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    names = ["z", "a", "m"]
    value = {"properties": {name: {"const": 1} for name in names}, "required": names}
    grammar = compiler.compile(schema({"type": "object", "additionalProperties": False, **value}))
    *tokens, _ = generate(sequence(codec, grammar))
    assert list(json.loads(codec.decode(tokens))) == names


# Masks


def test_mask_allows_what_the_grammar_allows_and_nothing_else(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(regex("(ab|é)c?"))
    a, ab, b, c = (ids(codec, text)[0] for text in ("a", "ab", "b", "c"))
    e_first, e_second = ids(codec, "é")
    assert allowed(grammar) == {a, ab, e_first}
    grammar.follow([a])
    assert allowed(grammar) == {b}
    assert allowed(compiler.compile(regex("(ab|é)c?"))) == {a, ab, e_first}  # its own way
    grammar.follow([a, b])
    assert allowed(grammar) == {c, *codec.eos_ids}
    assert allowed(grammar, codec.eos_ids) == {c}
    grammar.follow([a, b, c])
    assert allowed(grammar) == allowed(grammar, codec.eos_ids) == set(codec.eos_ids)
    other = grammar.fork()
    other.follow([e_first])
    assert allowed(other) == {e_second}


def test_neighbours_keep_their_logits_and_their_rows(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    digit, letter = compiler.compile(regex("[0-9]")), compiler.compile(regex("[xyz]"))
    logits = noise(0, 5)
    batch = [
        sequence(codec, None),
        sequence(codec, letter),
        sequence(codec, None, 3, temperature=1.0, top_k=7),
        sequence(codec, digit, temperature=1.0),
        sequence(codec, None, logit_bias={5: 30.0}),
    ]
    scores = run_step(BatchSampler(), batch, logits, padding=0)
    for row in (0, 2, 4):
        alone = run_step(BatchSampler(), [batch[row]], logits[row : row + 1])
        assert torch.equal(scores[row], alone[0])
    chosen = [codec.token_text(int(token)) for token in scores[[1, 3]].argmax(-1)]
    assert chosen[0] in "xyz"
    assert chosen[1] in "0123456789"


def test_batch_without_grammars_does_none_of_this(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = BatchSampler()
    run_step(sampler, [sequence(codec, compiler.compile(regex("a")))], noise(0))
    assert sampler.needs_results
    monkeypatch.setattr("actors.engine.sampling.sampler.allowed_tokens", None)
    logits = noise(1, 2)
    assert run_step(sampler, [sequence(codec, None)] * 2, logits) is logits
    assert not sampler.needs_results


def test_bias_and_penalties_cannot_allow_what_is_forbidden(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    x, y = ids(codec, "x") + ids(codec, "y")
    seq = sequence(
        codec,
        compiler.compile(regex("[xy]{50}")),
        logit_bias={7: 100.0, x: 5.0},
        frequency_penalty=2.0,
        repetition_penalty=1.3,
    )
    *tokens, last = generate(seq)
    assert last in codec.eos_ids
    assert set(tokens) == {x, y}


def test_logprobs_are_among_the_allowed_tokens(codec: TextCodec, compiler: GrammarCompiler) -> None:
    seq = sequence(codec, compiler.compile(regex("[xyz]a")), logprobs=20)
    plain = sequence(codec, None, logprobs=20)
    logits = noise(0, 2)
    logits[0, ids(codec, "q")[0]] = 50.0
    tokens = run_step(BatchSampler(), [seq, plain], logits).argmax(-1).tolist()
    for each, token in zip((seq, plain), tokens, strict=True):
        each.output_ids.append(token)
    (found,) = seq.take_logprobs(1) or ()
    xyz = [ids(codec, letter)[0] for letter in "xyz"]
    expected = dict(zip(xyz, logits[0, xyz].log_softmax(-1).tolist(), strict=True))
    assert isinstance(found, RawLogprob)
    assert dict(found.top) == pytest.approx(expected)
    assert found.logprob == pytest.approx(max(expected.values()))
    (beside,) = plain.take_logprobs(1) or ()
    assert beside.logprob == pytest.approx(float(logits[1].log_softmax(-1).max()))
    assert len(beside.top) == 20


# Ends


def test_ends_are_withheld_until_nothing_else_is_left(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(regex("x{0,20}"))
    x = ids(codec, "x")[0]
    *tokens, last = generate(sequence(codec, grammar.fork(), ignore_eos=True))
    assert tokens == [x] * 20
    assert last in codec.eos_ids
    tokens = generate(sequence(codec, grammar.fork(), min_tokens=7, logit_bias={256 + 3: 100.0}))
    assert len(tokens) >= 8
    # A stop token that the grammar wants counts as an end, too.
    seq = sequence(codec, compiler.compile(regex("ax?")), min_tokens=5, stop_token_ids=(x,))
    assert codec.decode(generate(seq)[:-1]) in ("a", "ax")


def test_sequence_that_starts_over_goes_on_where_it_was(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    whole = sequence(codec, compiler.compile(schema(SCHEMA)), 3, temperature=1.0)
    generate(whole, seed=9)
    again = sequence(codec, compiler.compile(schema(SCHEMA)), 3, temperature=1.0)
    for step in range(len(whole.output_ids)):
        logits = noise(9 * 400 + step)
        for _ in range(2):  # the first one's result is lost, as with a batch that found no memory
            token = int(run_step(BatchSampler(), [again], logits).argmax())
        again.output_ids.append(token)
    assert again.output_ids == whole.output_ids


def test_grammar_that_is_too_much_work_ends_its_sequence_alone(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    wide = Grammar(GrammarKind.CFG, "start: " + " ".join(['"a"?'] * 3000), "guided_grammar")
    seq = sequence(codec, compiler.compile(wide), min_tokens=9)
    beside = sequence(codec, compiler.compile(regex("z{5}")))
    a, z = ids(codec, "a") + ids(codec, "z")
    sampler = BatchSampler()
    first = run_step(sampler, [seq, beside], noise(0, 2)).argmax(-1).tolist()
    assert first == [a, z]
    seq.output_ids.append(a)
    beside.output_ids.append(z)
    second = run_step(sampler, [seq, beside], noise(1, 2)).argmax(-1).tolist()
    assert second[0] in codec.eos_ids
    assert second[1] == z
    assert seq.grammar is not None
    assert beside.grammar is not None
    refusal = seq.grammar.refusal
    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "guided_grammar"
    assert "cannot be followed" in str(refusal)
    assert beside.grammar.refusal is None
    # What the others share with it is not used again.
    assert compiler.compile(wide).fork().compiled is not seq.grammar.compiled


def test_dead_end_is_an_error_not_a_wrong_token() -> None:
    words = {"a": 0, "<eos>": 1}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    codec = TextCodec(tokenizer, V, [1])
    compiler = GrammarCompiler(lambda: codec)
    seq = sequence(codec, compiler.compile(regex("ab")))
    assert generate(seq) == [0, 1]
    assert seq.grammar is not None
    assert seq.grammar.refusal is not None
    compiler.close()


# What is refused


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "[", "no valid regular expression: .*unclosed character class"),
        (GrammarKind.REGEX, "(?=a)b", "look-ahead"),
        (GrammarKind.REGEX, r"(a)\1", "backreferences"),
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "no valid JSON schema: Invalid type: strin"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://example.org/a"}', "retriev"),
        (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "["}', "unclosed"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no valid JSON schema: no text matches it"),
        (GrammarKind.JSON_SCHEMA, '{"type": "NoExtension"}', "Invalid type: NoExtension"),
        (GrammarKind.JSON_SCHEMA, "{", "EOF"),
        (GrammarKind.JSON_SCHEMA, "[]", "object"),
        (GrammarKind.JSON_SCHEMA, '{"items": ' * 500 + "{}" + "}" * 500, "recursion limit"),
        (GrammarKind.CFG, "root ::= (", "no valid grammar"),
        (GrammarKind.CFG, "start: nowhere", "nowhere"),
        (GrammarKind.CFG, "start: start", "no text matches it"),
        (GrammarKind.CFG, "root ::= " + "(" * 9000, "recursion"),
    ],
)
def test_bad_grammar_is_refused_by_name(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        compiler.compile(Grammar(kind, text, "the_field"))
    assert caught.value.param == "the_field"
    assert str(caught.value).startswith("the_field ")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_long_chain_of_rules_does_not_overflow_the_stack(compiler: GrammarCompiler) -> None:
    """With the stack that threads have by themselves, the process would die here."""
    rules = [f"r{i:x}:r{i + 1:x}" for i in range(6000)]
    text = "start: r0\n" + "\n".join(rules) + f'\nr{6000:x}:"x"'
    assert len(text) > 0.9 * MAX_GRAMMAR_CHARS
    grammar = compiler.compile(Grammar(GrammarKind.CFG, text, "guided_grammar"))
    assert len(allowed(grammar)) == 1


def test_length_is_limited() -> None:
    fits = SamplingParams(grammar=regex("a" * MAX_GRAMMAR_CHARS))
    validate(fits, V)
    too_long = SamplingParams(grammar=regex("a" * (MAX_GRAMMAR_CHARS + 1)))
    with pytest.raises(UnsupportedParameter, match="guided_regex has 65537 characters"):
        validate(too_long, V)


def test_compiling_has_a_time_limit_and_a_turn(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(regex("warm"))
    monkeypatch.setattr(grammar_compiler, "_COMPILE_TIMEOUT_S", 0.05)
    slow = regex("a?" * 9000)
    with pytest.raises(InvalidRequest, match=r"guided_regex takes more than 0.05 s to compile"):
        compiler.compile(slow)
    with pytest.raises(Unavailable, match="other requests"):
        compiler.compile(regex("quick"))
    compiler.compile(regex("warm"))  # known, so it waits for nobody
    monkeypatch.undo()
    assert compiler.compile(regex("quick")).refusal is None


def test_loading_the_tokenizer_is_no_grammar_s_time(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a slow host, where the first request after a start was refused for it."""
    monkeypatch.setattr(grammar_compiler, "_COMPILE_TIMEOUT_S", 0.05)
    may_load = threading.Event()

    def load_late() -> TextCodec:
        assert may_load.wait(20)
        return codec

    def ask(text: str) -> SequenceGrammar:
        return compiler.compile(regex(text))

    compiler = GrammarCompiler(load_late)
    with ThreadPoolExecutor(2) as threads:
        asks = [threads.submit(ask, text) for text in "ab"]
        wait(asks, timeout=0.2)  # longer than a grammar may take
        monkeypatch.undo()  # their own turns come only now
        may_load.set()
        assert [each.result().refusal for each in asks] == [None, None]
    compiler.close()


def test_tokenizer_that_is_not_there_in_time_is_nobody_s_mistake(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "_LOAD_TIMEOUT_S", 0.05)
    may_load = threading.Event()

    def load_late() -> TextCodec:
        assert may_load.wait(20)
        return codec

    compiler = GrammarCompiler(load_late)
    with pytest.raises(Unavailable, match="tokenizer"):
        compiler.compile(regex("a"))
    may_load.set()
    monkeypatch.undo()
    assert compiler.compile(regex("a")).refusal is None
    compiler.close()


def test_tokenizer_that_could_not_be_loaded_is_loaded_for_the_next(codec: TextCodec) -> None:
    found = iter([OSError("no such file"), codec])

    def load() -> TextCodec:
        each = next(found)
        if isinstance(each, OSError):
            raise each
        return each

    compiler = GrammarCompiler(load)
    with pytest.raises(OSError, match="no such file"):
        compiler.compile(regex("a"))
    assert compiler.compile(regex("a")).refusal is None
    compiler.close()


def test_wait_for_others_is_no_grammar_s_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is begun at the last moment has its whole time yet."""
    compiler.compile(regex("warm"))
    limit_s = 2.0
    monkeypatch.setattr(grammar_compiler, "_COMPILE_TIMEOUT_S", limit_s)
    compile_one = compiler._compile
    may_end = {"a": threading.Event(), "b": threading.Event()}

    def compile_late(grammar: Grammar) -> Any:
        assert may_end[grammar.text].wait(20)
        return compile_one(grammar)

    monkeypatch.setattr(compiler, "_compile", compile_late)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compiler.compile, regex("a"))
        second = threads.submit(compiler.compile, regex("b"))
        wait([second], timeout=0.5 * limit_s)
        may_end["a"].set()
        wait([second], timeout=0.7 * limit_s)  # more than is left of what it has waited already
        may_end["b"].set()
        assert [each.result().refusal for each in (first, second)] == [None, None]


def test_grammar_that_many_ask_for_at_once_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    submitted = threading.Semaphore(0)
    compile_one, submit = compiler._compile, compiler._submit

    def compile_late(grammar: Grammar) -> Any:
        if not compiled:
            for _ in range(8):
                submitted.acquire()
        compiled.append(grammar.text)
        return compile_one(grammar)

    def tell(grammar: Grammar) -> Any:
        future = submit(grammar)
        submitted.release()
        return future

    monkeypatch.setattr(compiler, "_compile", compile_late)
    monkeypatch.setattr(compiler, "_submit", tell)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(compiler.compile, [regex("ab")] * 8))
    assert compiled == ["ab"]
    assert len({id(each.compiled) for each in found}) == 1


def test_threads_that_ask_at_once_leave_the_stacks_of_others_as_they_are(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(regex("warm"))
    before = threading.stack_size(0)
    second_came, first_is_done = threading.Event(), threading.Event()
    came: list[str] = []
    submit = compiler._worker.submit

    def in_each_other_s_way(*work: Any) -> Any:
        came.append("")
        if len(came) == 1:
            second_came.wait(0.2)
        else:
            second_came.set()
            first_is_done.wait(0.2)
        return submit(*work)

    def ask(text: str) -> None:
        compiler.compile(regex(text))
        first_is_done.set()

    monkeypatch.setattr(compiler._worker, "submit", in_each_other_s_way)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(ask, "ab"))
        assert threading.stack_size() == 0
    finally:
        threading.stack_size(before)


def test_grammars_are_kept_the_latest_of_them(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_one = compiler._compile

    def count(grammar: Grammar) -> Any:
        compiled.append(grammar.text)
        return compile_one(grammar)

    monkeypatch.setattr(compiler, "_compile", count)
    monkeypatch.setattr(grammar_memory, "_COMPILED", 2)
    for text in "abacabb":
        compiler.compile(regex(text))
    assert "".join(compiled) == "abcb"
    as_choice = Grammar(GrammarKind.CHOICE, '["b"]', "x")
    compiler.compile(as_choice)
    assert compiled[-1] == '["b"]'


def test_model_without_an_end_knows_no_grammars() -> None:
    compiler = GrammarCompiler(make_codec)
    with pytest.raises(UnsupportedParameter, match="no end-of-sequence token"):
        compiler.compile(regex("a"))
    compiler.close()


def test_tokenizer_without_bytes_of_its_tokens_knows_no_grammars() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend), V, [1])
    compiler = GrammarCompiler(lambda: codec)
    with pytest.raises(UnsupportedParameter, match="token by token") as caught:
        compiler.compile(regex("a"))
    assert caught.value.param == "guided_regex"
    compiler.close()


def test_mask_ends_with_the_vocabulary() -> None:
    for size in (1, 31, 32, 33, 64, V):
        words = -(-size // 32)
        logits = torch.zeros(2, size)
        all_RW = torch.full((1, words), -1, dtype=torch.int32)
        assert torch.equal(forbid(logits, torch.tensor([1]), all_RW), logits)
        none = forbid(logits, torch.tensor([1]), torch.zeros_like(all_RW))
        assert torch.equal(none, torch.stack((logits[0], torch.full((size,), -torch.inf))))
        last = torch.zeros_like(all_RW)
        last[0, -1] = torch.tensor(1 << ((size - 1) % 32), dtype=torch.int64).to(torch.int32)
        assert forbid(logits, torch.tensor([1]), last)[1].isfinite().nonzero().tolist() == [
            [size - 1]
        ]


# What they take


GREEDY = "(a|b)*a(a|b){10000}"  # its lexer's states grow with every token


def walk(codec: TextCodec, grammar: SequenceGrammar, steps: int) -> None:
    """Random tokens of those allowed, until it is refused."""
    random_, output_ids = random.Random(0), []
    for _ in range(steps):
        tokens = sorted(allowed(grammar) - codec.eos_ids)
        if grammar.refusal is not None:
            return
        output_ids.append(random_.choice(tokens))
        grammar.follow(output_ids)


def test_bytes_are_counted(codec: TextCodec, compiler: GrammarCompiler) -> None:
    compiler.compile(regex("warm"))
    gc.collect()
    before = grammar_memory.allocated_bytes()
    grammar = compiler.compile(regex(GREEDY))
    walk(codec, grammar, 1000)
    gc.collect()
    taken = grammar_memory.allocated_bytes() - before
    assert taken > 3 * 2**20
    assert grammar.compiled.bytes == pytest.approx(taken, rel=0.3)


def test_grammar_that_takes_too_much_ends_its_sequences_and_is_made_anew(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_memory, "_MAX_BYTES", 2**20)
    grammar, small = compiler.compile(regex(GREEDY)), compiler.compile(regex("[ab]+"))
    beside = grammar.fork()
    walk(codec, grammar, 3000)
    assert "takes too much memory" in str(grammar.refusal)
    assert allowed(beside) == set(codec.eos_ids)
    assert "takes too much memory" in str(beside.refusal)
    walk(codec, small, 50)
    assert small.refusal is None
    again = compiler.compile(regex(GREEDY))
    assert again.compiled is not grammar.compiled
    assert again.compiled.bytes < 2**20


def test_least_recently_used_go_first_and_those_in_use_count(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size(text: str, size: int) -> SequenceGrammar:
        grammar = compiler.compile(regex(text))
        grammar.compiled.bytes = size
        return grammar

    def kept() -> str:
        return "".join(text for _, text in compiler._memory._kept)

    monkeypatch.setattr(grammar_memory, "_MAX_BYTES_IN_ALL", 10 * 2**20)
    for text in "ab":
        size(text, 4 * 2**20)
    size("a", 4 * 2**20)
    in_use = size("c", 9 * 2**20)
    compiler.compile(regex("d"))
    assert kept() == "cd"  # b and a have made room
    in_use.compiled.bytes = 11 * 2**20
    with pytest.raises(Unavailable, match="grammars of other requests"):
        compiler.compile(regex("e"))
    assert kept() == ""
    assert in_use.refusal is None
    del in_use  # its sequences have ended
    assert compiler.compile(regex("e")).refusal is None


def test_step_without_room_ends_the_largest(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = compiler.compile(regex("[ab]+"))
    large = compiler.compile(regex(GREEDY))
    monkeypatch.setattr(grammar_memory, "_MAX_BYTES_IN_ALL", small.compiled.bytes + 2**20)
    walk(codec, large, 3000)
    walk(codec, small, 50)
    assert "takes too much memory" in str(large.refusal)
    assert small.refusal is None


class Allocator:
    """The real one, and another thread's allocations: the next of `others` while a grammar is at work."""

    def __init__(self, *others: int) -> None:
        self._others = list(others)
        self._more = 0
        self._looks = 0
        self._allocated = grammar_memory.allocated_bytes

    def __call__(self) -> int:
        if self._looks % 2 and self._others:  # behind the work; the look before it is an even one
            self._more += self._others.pop(0)
        self._looks += 1
        return self._allocated() + self._more


def test_memory_of_another_thread_ends_no_sequence(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, *together = (compiler.compile(regex(f"[ab]{{9}}{i}")) for i in range(9))
    monkeypatch.setattr(
        "actors.engine.sampling.grammar.allocated_bytes", Allocator(2**32, 0, 2**34)
    )
    walk(codec, alone, 3)
    allowed_tokens([(each, frozenset()) for each in together], V, pinned=False)
    for each in (alone, *together):
        assert allowed(each)
        assert each.refusal is None


def test_memory_of_another_thread_makes_no_grammar_too_large(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile(regex("warm"))
    monkeypatch.setattr(grammar_compiler, "allocated_bytes", Allocator(2**32))
    grammar = compiler.compile(regex("a"))
    assert grammar.compiled.bytes < 2**20
    assert allowed(grammar)
    assert grammar.refusal is None


def test_grammar_that_is_too_large_when_it_is_compiled_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_memory, "_MAX_BYTES", 2**24)
    with pytest.raises(InvalidRequest, match="guided_regex cannot be followed: it takes too much"):
        compiler.compile(regex("a?" * 3000))


def test_grammars_beside_one_that_takes_too_much_are_not_to_blame(
    codec: TextCodec, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_memory, "_RENEWED_BYTES", 2**20)
    monkeypatch.setattr(grammar_memory, "_MAX_BYTES", 2**22)
    large, *small = (compiler.compile(regex(text)) for text in (GREEDY, "[ab]+", "[ab]*", "[ba]+"))
    output_ids: list[int] = []  # of all of them
    letters, choice = ids(codec, "a") + ids(codec, "b"), random.Random(0)
    while large.refusal is None:
        steps = [(each, codec.eos_ids) for each in (large, *small)]
        allowed_tokens(steps, V, pinned=False)
        output_ids.append(choice.choice(letters))
        for each in (large, *small):
            each.follow(output_ids)
    assert "takes too much memory" in str(large.refusal)
    assert [each.refusal for each in small] == [None] * 3
    assert max(each.compiled.bytes for each in small) < 2**21
