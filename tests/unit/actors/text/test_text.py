import json
import random
import shutil
import string
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from actors.errors import ContextLengthExceeded, InvalidRequest
from actors.protocol import ChatPrompt, FinishReason, TokenLogprob
from actors.text.codec import TextCodec
from actors.text.detokenizer import ByteStream, WindowStream
from actors.text.output import OutputAssembler, StopMatcher, StopStrings

SPECIALS = ["<|eos|>", "<|bos|>", "<｜end▁of▁turn｜>"]
TEXTS = [
    "héllo 😀👩‍👩‍👧 日本語 end",
    " leading and  double spaces ",
    "tab\tnewline\n\n",
    "日本",
    "\ufffd",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools[0].name }}{% endif %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2, Llama 3 and Qwen have it, with one token a byte and some merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("ð", "Ł"), ("Ġ", "d")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(["<tool call>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|eos|>", bos_token="<|bos|>", chat_template=TEMPLATE
    )


def byte_fallback(strip: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback as Llama 2 has it; without `strip` as Gemma."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab["<unk>"] = len(vocab)
    for char in "▁" + string.ascii_letters + string.punctuation + "é日":
        vocab.setdefault(char, len(vocab))
    merges = [("▁", "h"), ("▁", "e"), ("▁e", "n"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if strip else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    backend.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")


def metaspace() -> PreTrainedTokenizerFast:
    """A decoder that does not work token by token, so that the window has to do."""
    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace()]
    )
    return tokenizer


def word_piece() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "the", "cat", "##s", "##ting", "sit", "dog", ".", "don", "'", "t"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


KINDS = {
    "byte_level": (byte_level, ByteStream),
    "byte_fallback": (byte_fallback, ByteStream),
    "byte_fallback_without_strip": (lambda: byte_fallback(strip=False), ByteStream),
    "metaspace": (metaspace, WindowStream),
}


def codec_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int = 512) -> TextCodec:
    return TextCodec(tokenizer, vocab_size, [tokenizer.eos_token_id or 0])


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return codec_of(byte_level())


def id_of(codec: TextCodec, token: str) -> int:
    found = codec._tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def streamed(codec: TextCodec, ids: list[int]) -> str:
    decoder = codec.stream()
    return "".join(decoder.push([i]) for i in ids) + decoder.flush()


# Detokenisation


@pytest.mark.parametrize("kind", KINDS)
def test_stream_kind_follows_the_decoder(kind: str) -> None:
    make, expected = KINDS[kind]
    assert isinstance(codec_of(make()).stream(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_decode_at_every_length(kind: str, text: str) -> None:
    codec = codec_of(KINDS[kind][0]())
    ids = list(codec.encode_prompt(text))
    decoder, told = codec.stream(), ""
    for i, token_id in enumerate(ids):
        told += decoder.push([token_id])
        if text != "\ufffd":
            assert "\ufffd" not in told
        assert codec.decode(ids).startswith(told), i
    assert told + decoder.flush() == codec.decode(ids)


def test_stream_of_byte_level_equals_decode_on_random_ids(codec: TextCodec) -> None:
    rng = random.Random(0)
    # Bytes, merges, special and added tokens, and ids that are no token.
    for _ in range(300):
        ids = [rng.randrange(280) for _ in range(60)]
        assert streamed(codec, ids) == codec.decode(ids)


@pytest.mark.parametrize("strip", [True, False])
def test_stream_of_byte_fallback_equals_decode_on_random_text(strip: bool) -> None:
    rng = random.Random(0)
    codec = codec_of(byte_fallback(strip))
    pieces = [["<0xE6>", "<0x97>", "<0xA5>"], ["▁"], ["▁h"], ["日"], ["a"], ["<|eos|>"], ["<0x20>"]]
    for _ in range(300):
        ids = [id_of(codec, token) for _ in range(12) for token in rng.choice(pieces)]
        assert streamed(codec, ids) == codec.decode(ids)


def test_stream_of_byte_fallback_keeps_what_is_whole_beside_broken_bytes() -> None:
    codec = codec_of(byte_fallback())
    ids = [*"日".encode(), 0x80, *"本".encode(), 0xE6]
    assert streamed(codec, ids) == "日\ufffd本\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_stream_that_ends_inside_a_character_flushes_it(kind: str) -> None:
    codec = codec_of(KINDS[kind][0]())
    ids = list(codec.encode_prompt("ok😀"))[:-1]
    decoder = codec.stream()
    assert "".join(decoder.push([i]) for i in ids).strip() == "ok"
    assert decoder.flush().startswith("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_stream_of_broken_bytes_neither_stalls_nor_slows_down(kind: str) -> None:
    codec = codec_of(KINDS[kind][0]())
    continuation = id_of(codec, "Ł" if kind == "byte_level" else "<0x9F>")
    decoder = codec.stream()
    start = time.perf_counter()
    silent = longest = 0
    for _ in range(3000):
        silent = 0 if decoder.push([continuation]) else silent + 1
        longest = max(longest, silent)
    assert longest < 10
    assert time.perf_counter() - start < 3


def test_window_stream_puts_spaces_between_words() -> None:
    codec = codec_of(word_piece())
    ids = list(codec.encode_prompt("the cats sitting . dog"))
    decoder = codec.stream()
    assert isinstance(decoder, WindowStream)
    assert [decoder.push([i]) for i in ids] == ["the", " cat", "s", " sit", "ting", " .", " dog"]


@pytest.mark.parametrize("kind", KINDS)
def test_context_keeps_the_leading_space(kind: str) -> None:
    codec = codec_of(KINDS[kind][0]())
    prompt, whole = codec.encode_prompt("once upon"), codec.encode_prompt("once upon a time")
    assert whole[: len(prompt)] == prompt
    decoder = codec.stream(prompt)
    text = "".join(decoder.push([i]) for i in whole[len(prompt) :]) + decoder.flush()
    assert codec.decode(prompt) + text == "once upon a time"


def test_special_tokens_do_not_break_a_window() -> None:
    codec = codec_of(metaspace())
    ids = list(codec.encode_prompt("go on"))
    many = [*ids[:3], *[codec._tokenizer.eos_token_id] * 40, *ids[3:]]
    assert streamed(codec, many) == codec.decode(ids) == "go on"


# Tokens


def test_token_bytes_are_exact_and_text_is_replaced(codec: TextCodec) -> None:
    ids = codec.encode_prompt("é<|eos|><tool call><｜end▁of▁turn｜> ")
    assert b"".join(map(codec.token_bytes, ids)).decode() == "é<|eos|><tool call><｜end▁of▁turn｜> "
    assert codec.token_text(ids[0]) == "\ufffd"
    assert codec.token_text(ids[2]) == "<|eos|>"
    assert codec.token_text(500) == ""  # the model's vocabulary is larger


def test_token_bytes_of_a_window_tokenizer() -> None:
    codec = codec_of(word_piece())
    assert codec.token_bytes(1) == b"the"
    assert codec.token_text(1) == "the"


def test_token_bytes_keep_the_space_of_a_word() -> None:
    codec = codec_of(byte_fallback())
    assert codec.token_text(codec.encode_prompt("hi")[0]) == " h"


def test_token_logprob_carries_text(codec: TextCodec) -> None:
    a, b = codec.encode_prompt("ab")
    found = codec.token_logprob(a, -0.5, [(a, -0.5), (b, -1.5)])
    top = (TokenLogprob(a, "a", b"a", -0.5), TokenLogprob(b, "b", b"b", -1.5))
    assert found == TokenLogprob(a, "a", b"a", -0.5, top)


def written(codec: TextCodec, prompt: str | tuple[int, ...], adds: bool | None = None) -> str:
    """What tokens say themselves of a prompt's text."""
    ids = codec.encode_prompt(prompt, add_special_tokens=adds)
    without = codec.unwritten(prompt, ids, adds)
    tokens = zip(map(codec.token_bytes, ids), without, strict=True)
    return b"".join(token[count:] for token, count in tokens).decode("utf-8", "replace")


def with_ends(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer, which puts a special token before and behind each text."""
    first, last = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|eos|>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", first), ("<|eos|>", last)]
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_strip"])
@pytest.mark.parametrize("text", ["hi <|eos|>", "  hello", "<|bos|>h é<|eos|> d", "<|bos|>", ""])
def test_tokens_of_a_prompt_know_what_its_text_is_without(kind: str, text: str) -> None:
    codec = codec_of(with_ends(KINDS[kind][0]()))
    ids = codec.tokenize(text)
    assert (ids[0], ids[-1]) == (id_of(codec, "<|bos|>"), id_of(codec, "<|eos|>"))
    for each in (ids, ids[1:-1] or ids, ids[1:] or ids):
        assert written(codec, each) == codec.decode(each)
    if "<|" not in text or kind != "byte_fallback":  # Llama 2's puts a space behind special tokens
        assert written(codec, text) == text
        if text:
            assert written(codec, text, adds=False) == text


def test_special_token_of_an_output_is_in_no_text(codec: TextCodec) -> None:
    end, call = id_of(codec, "<|eos|>"), id_of(codec, "<tool call>")
    assert codec.token_logprob(end, -1.0).unwritten == len("<|eos|>")
    assert codec.token_logprob(call, -1.0).unwritten == 0


# Prompts


def test_token_ids_pass_through(codec: TextCodec) -> None:
    assert codec.encode_prompt((0, 511)) == (0, 511)


@pytest.mark.parametrize("ids", [(512,), (-1,), (True,), (1.0,)])
def test_token_ids_outside_the_vocabulary_are_refused(codec: TextCodec, ids: tuple[int]) -> None:
    with pytest.raises(InvalidRequest, match="0 to 511") as caught:
        codec.encode_prompt(ids)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", ()])
def test_empty_prompt_is_refused(codec: TextCodec, prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        codec.encode_prompt(prompt)


@pytest.mark.parametrize("in_chat", [False, True])
def test_text_beyond_every_context_is_refused_before_it_is_tokenised(
    codec: TextCodec, in_chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, codec._tokenizer.get_vocab()))
    assert (
        len(codec.encode_prompt("a" * (3 * longest), max_tokens=3)) > 3
    )  # for the engine to refuse
    monkeypatch.setattr(codec, "_encode", lambda *args, **options: pytest.fail("tokenised"))
    text = "a" * (3 * longest + 1)
    prompt = ChatPrompt(({"role": "user", "content": text},)) if in_chat else text
    with pytest.raises(
        ContextLengthExceeded, match=f"never holds more than {3 * longest}$"
    ) as caught:
        codec.encode_prompt(prompt, max_tokens=3)
    assert caught.value.param == ("messages" if in_chat else "prompt")


def test_lone_surrogate_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        codec.encode_prompt("a\ud800b")


def chat(*messages: tuple[str, object], **fields: object) -> ChatPrompt:
    return ChatPrompt(tuple({"role": r, "content": c} for r, c in messages), **fields)  # type: ignore[arg-type]


def test_chat_goes_through_the_template(codec: TextCodec) -> None:
    prompt = chat(("user", "hé"), tools=({"name": "T"},), template_kwargs={"shout": True})
    expected = codec.encode_prompt("<|bos|>[user]héT![assistant]")
    assert codec.encode_prompt(prompt) == expected
    without = chat(("user", "hé"), add_generation_prompt=False)
    assert codec.encode_prompt(without) == codec.encode_prompt("<|bos|>[user]hé")


def test_chat_may_continue_the_last_message(codec: TextCodec) -> None:
    prompt = chat(
        ("user", "a"),
        ("assistant", "bc"),
        add_generation_prompt=False,
        template_kwargs={"continue_final_message": True},
    )
    assert codec.decode(codec.encode_prompt(prompt)).endswith("[assistant]bc")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (chat(("wizard", "x")), "unknown role wizard"),
        (chat(("user", "x"), template_kwargs={"chat_template": "{{ 1 }}"}), "chat_template cannot"),
        (chat(("user", "x"), template_kwargs={"tokenize": True}), "tokenize cannot"),
        (ChatPrompt(({"role": None},)), "template refused"),
        (chat(("user", "x"), template_kwargs={"continue_final_message": True}), "template refused"),
    ],
)
def test_chat_the_template_refuses(codec: TextCodec, prompt: ChatPrompt, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        codec.encode_prompt(prompt)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec_of(byte_fallback()).encode_prompt(chat(("user", "x")))


def test_load_joins_every_source_of_eos(tmp_path) -> None:  # type: ignore[no-untyped-def]
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=300, eos_token_id=7, bos_token_id=1).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[7, 9], pad_token_id=0).save_pretrained(tmp_path)
    codec = TextCodec.load(tmp_path)
    assert codec.eos_ids == {7, 9, tokenizer.eos_token_id}
    assert codec.vocab_size == 300
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 400}))
    assert TextCodec.load(tmp_path).eos_ids == {7, tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "values",
    [
        {"num_labels": "10000000000"},  # a number would become as many entries of a table
        {"attribute_map": {"vocab_size": "hidden_size"}},
        {"dtype": "bf16"},
    ],
    ids=str,
)
def test_load_reads_the_configuration_as_who_loads_the_weights(
    tiny_checkpoint: Path, tmp_path: Path, values: dict[str, object]
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    codec, expected = TextCodec.load(checkpoint), TextCodec.load(tiny_checkpoint)
    assert (codec.vocab_size, codec.eos_ids) == (expected.vocab_size, expected.eos_ids)


@pytest.mark.parametrize("found", ["</s>", [2, "</s>"], {"id": 2}, True, 2.0], ids=str)
def test_end_of_sequence_that_is_no_token_id_is_refused_in_a_line(
    tiny_checkpoint: Path, tmp_path: Path, found: object
) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(ValueError, match=r"^eos_token_id in .*/generation_config\.json must be "):
        TextCodec.load(checkpoint)


# Stop strings


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_matcher_equals_the_reference_for_any_split() -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(4000):
        letters = "ab" if rng.random() < 0.5 else "abc"
        stops = [
            "".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))
        ]
        text = "".join(rng.choices(letters, k=rng.randint(0, 30)))
        matcher, out, fed = StopMatcher(StopStrings(stops)), "", 0
        while fed < len(text):
            size = rng.randint(1, 5)
            out += matcher.feed(text[fed : fed + size])
            fed += size
            if matcher.matched is None:
                # Exactly what may still become a stop string is held back.
                seen = text[:fed]
                ends = [n for s in stops for n in range(len(s)) if seen.endswith(s[:n])]
                assert out == seen[: len(seen) - max(ends)]
        out += matcher.flush()
        assert (out, matcher.matched) == reference(text, stops)
        hits += matcher.matched is not None
    assert 1000 < hits < 3900


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abc\n\nUser: x", ["\n\nUser:"], ("abc", "\n\nUser:")),
        ("abc\n\nUse", ["\n\nUser:"], ("abc\n\nUse", None)),
        ("x😀y", ["😀"], ("x", "😀")),
        ("aaab", ["ab", "b"], ("aa", "ab")),  # complete at the same character: the longest
        ("abcd", ["c", "bcd"], ("ab", "c")),  # complete first
        ("abab", [], ("abab", None)),
    ],
)
def test_stop_matcher_examples(text: str, stops: list[str], expected: tuple[str, str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    out = "".join(matcher.feed(char) for char in text) + matcher.flush()
    assert (out, matcher.matched) == expected
    if matcher.matched is not None:
        assert matcher.feed("more") == matcher.flush() == ""


def test_texts_are_searched_side_by_side_with_the_same_stop_strings() -> None:
    stops = StopStrings(["abc", "bd"])
    texts = ["ababd", "xabc", "aba", "abd"]
    matchers = [StopMatcher(stops) for _ in texts]
    out = [""] * len(texts)
    for place in range(max(map(len, texts))):
        for i, (matcher, text) in enumerate(zip(matchers, texts, strict=True)):
            out[i] += matcher.feed(text[place : place + 1])
    assert [a + b.flush() for a, b in zip(out, matchers, strict=True)] == ["aba", "x", "aba", "a"]
    assert [matcher.matched for matcher in matchers] == ["bd", "abc", None, "bd"]


def test_stop_matcher_is_linear_on_the_worst_case() -> None:
    matcher = StopMatcher(StopStrings(["a" * 5000 + "b"]))
    start = time.perf_counter()
    out = "".join(matcher.feed("a") for _ in range(20_000))
    assert len(out) == 15_000
    assert time.perf_counter() - start < 3


# Events


def assemble(codec: TextCodec, text: str, stops: Sequence[str] = (), **kwargs: object):  # type: ignore[no-untyped-def]
    automaton = StopStrings(stops) if stops else None
    assembler = OutputAssembler(
        codec.stream(),
        index=1,
        prompt_tokens=3,
        stops=automaton,
        **kwargs,  # type: ignore[arg-type]
    )
    return assembler, list(codec.encode_prompt(text))


def push(assembler: OutputAssembler, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
    assembler.push(*args, **kwargs)  # type: ignore[arg-type]
    return assembler.take()


def push_each(assembler: OutputAssembler, ids: list[int]):  # type: ignore[no-untyped-def]
    events = (push(assembler, [i]) for i in ids)
    return [event for event in events if event is not None]


def test_event_carries_the_tokens_of_an_unfinished_character(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "a日b")
    events = push_each(assembler, ids)
    assert [event.text for event in events] == ["a", "日", "b"]
    assert [event.token_ids for event in events] == [(ids[0],), tuple(ids[1:4]), (ids[4],)]
    assert {(event.index, event.prompt_tokens) for event in events} == {(1, 3)}
    assert not assembler.is_finished


@pytest.mark.parametrize("stops", [[], ["never in there"]])
def test_time_grows_as_what_nobody_has_taken_does(codec: TextCodec, stops: list[str]) -> None:
    """Quadratic work would take 64 times as long for 8 times the tokens."""

    def taken_s(tokens: int) -> float:
        assembler, ids = assemble(codec, "a", stops=stops)
        logprobs = [codec.token_logprob(ids[0], -1.0)]
        begun_s = time.thread_time()
        for _ in range(tokens):
            assembler.push(ids, logprobs)
        event = assembler.take()
        taken_s = time.thread_time() - begun_s
        assert event is not None
        assert len(event.logprobs or ()) == len(event.text) == tokens
        return taken_s

    short_s, long_s = (min(taken_s(tokens) for _ in range(3)) for tokens in (4000, 32_000))
    assert long_s < 24 * short_s


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [[], ["never in there"]])
def test_what_is_taken_seldom_is_what_is_taken_often(kind: str, stops: list[str]) -> None:
    codec = codec_of(KINDS[kind][0]())
    for text in TEXTS:
        ids = list(codec.encode_prompt(text))
        logprobs = [codec.token_logprob(i, -float(n)) for n, i in enumerate(ids)]
        told = []
        for every in (1, 2, 3, len(ids)):
            automaton = StopStrings(stops) if stops else None
            assembler, events = OutputAssembler(codec.stream(), stops=automaton), []
            for n, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
                finish = FinishReason.LENGTH if n == len(ids) else None
                assembler.push([token_id], [logprob], finish)
                if n % every == 0 or finish is not None:
                    events.append(assembler.take())
            assert assembler.final_event_sent
            assert assembler.take() is None
            kept = [event for event in events if event is not None]
            assert [event.finish_reason for event in kept[:-1]] == [None] * (len(kept) - 1)
            told.append(
                (
                    "".join(event.text for event in kept),
                    [i for event in kept for i in event.token_ids],
                    [each for event in kept for each in event.logprobs or ()],
                    kept[-1].finish_reason,
                )
            )
        assert told[0] == (codec.decode(ids), ids, logprobs, FinishReason.LENGTH)
        assert all(other == told[0] for other in told)


def test_end_waits_to_be_taken(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "ab")
    assembler.push(ids, finish=FinishReason.LENGTH)
    assert (assembler.is_finished, assembler.final_event_sent) == (True, False)
    assembler.push(ids)  # too late
    event = assembler.take()
    assert event is not None
    assert (event.text, event.finish_reason) == ("ab", FinishReason.LENGTH)
    assert (assembler.final_event_sent, assembler.take()) == (True, None)


def test_stop_string_ends_the_text_and_the_continuation(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "one END two", stops=[" END"])
    events = push_each(assembler, ids)
    assert "".join(event.text for event in events) == "one"
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].stop_reason == " END"
    # The tokens of the stop string count; those after it do not.
    assert [i for event in events for i in event.token_ids] == ids[
        : len(codec.encode_prompt("one END"))
    ]
    assert assembler.is_finished
    assert push(assembler, [1], finish=FinishReason.LENGTH) is None


def test_stop_string_inside_one_push_cuts_tokens_and_logprobs(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "abXYcd", stops=["XY"])
    logprobs = [codec.token_logprob(i, -float(n)) for n, i in enumerate(ids)]
    event = push(assembler, ids, logprobs, finish=FinishReason.LENGTH)
    assert event is not None
    assert (event.text, event.token_ids) == ("ab", tuple(ids[:4]))
    assert event.logprobs == tuple(logprobs[:4])
    assert (event.finish_reason, event.stop_reason) == (FinishReason.STOP, "XY")


def test_text_held_for_a_stop_string_comes_at_the_end(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "abX", stops=["XY"])
    assert [event.text for event in push_each(assembler, ids)] == ["a", "b"]
    event = push(assembler, [], finish=FinishReason.ABORT)
    assert event is not None
    assert (event.text, event.token_ids) == ("X", (ids[2],))
    assert (event.finish_reason, event.stop_reason) == (FinishReason.ABORT, None)


def test_unfinished_character_at_the_end_is_replaced(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "a日")
    event = push(assembler, ids[:-1], finish=FinishReason.LENGTH)
    assert event is not None
    assert event.text == "a\ufffd"


def test_the_token_that_ended_the_sequence_counts_without_text(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "ab.")
    event = push(assembler, ids, finish=FinishReason.STOP, stop_reason=ids[-1])
    assert event is not None
    assert (event.text, event.token_ids, event.stop_reason) == ("ab", tuple(ids), ids[-1])


def test_logprobs_wait_with_their_tokens(codec: TextCodec) -> None:
    assembler, ids = assemble(codec, "日b")
    logprobs = [codec.token_logprob(i, -1.0) for i in ids]
    events = [push(assembler, [i], [logprob]) for i, logprob in zip(ids, logprobs, strict=True)]
    assert events[:2] == [None, None]
    assert events[2] is not None
    assert events[3] is not None
    assert events[2].logprobs == tuple(logprobs[:3])
    assert events[3].logprobs == tuple(logprobs[3:])


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (2, "a"), (3, "abXa"), (5, "abXa"), (6, "abXabXa"), (9, "abXabXabX")],
)
def test_stop_strings_wait_for_min_tokens(codec: TextCodec, min_tokens: int, text: str) -> None:
    # "bX" is complete with tokens 3, 6 and 9.
    assembler, ids = assemble(codec, "abXabXabX", stops=["bX"], min_tokens=min_tokens)
    events = push_each(assembler, ids)
    assert "".join(event.text for event in events) == text
    assert assembler.is_finished is (min_tokens < 9)


def test_checkpoint_without_a_tokenizer_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """transformers makes one up that finds no token in any text."""
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^there is no tokenizer in .*tiny; as a rule"):
        TextCodec.load(checkpoint)


def test_unreadable_tokenizer_is_refused_in_a_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    (checkpoint / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"^the tokenizer in .*tiny is unreadable \(\w+: .*\)$"):
        TextCodec.load(checkpoint)
