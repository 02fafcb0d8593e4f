"""The demo model: its corpus, its training in two steps, and the files in configs/demo/model."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from configs.demo import corpus, facts, stories, words
from configs.demo.grammar import Writer, parse
from configs.demo.topics import TOPICS

MAX_BYTES = 8_000_000
MARKS = re.compile(r"<\|im_(?:start|end)\|>")
# What a template that went wrong leaves behind.
LEAKS = {
    "a brace or a bracket": re.compile(r"[{}\[\]|]"),
    "two blanks": re.compile(r"  "),
    "a blank before a mark": re.compile(r"(?<!=) [,.;:!?]"),
    "two marks": re.compile(r"[,;:]\.|\.\.|,,|\?\.|!\."),
    "a sentence in small letters": re.compile(r"(?<!\d)\. [a-z]"),
    "a before a vowel": re.compile(r"\b[Aa] [aeio](?!ne\b|nce\b|uro)"),
    "an before a consonant": re.compile(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz]"),
    "a word twice": re.compile(r"\b(a|an|the|of|in|was|is|to|and) \1\b"),
    "nobody": re.compile(r"\bNone\b"),
}


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(corpus.documents(0, range(4)))


# --- the corpus ---


def test_same_seed_gives_the_same_documents(documents: list[str]) -> None:
    assert corpus.block(0, 2) == documents[1000:1500]
    assert corpus.block(1, 2) != documents[1000:1500]


@pytest.mark.parametrize("what", LEAKS)
def test_templates_leave_nothing_behind(documents: list[str], what: str) -> None:
    found = [
        text[max(0, match.start() - 40) : match.end() + 40]
        for text in (MARKS.sub("", document) for document in documents)
        for match in LEAKS[what].finditer(text)
    ]
    assert not found[:5]


def test_every_template_of_every_plot_can_be_filled_in() -> None:
    """Also those that chance left out of the documents."""
    for plot in stories.PLOTS:
        for kind in plot.heroes:
            w = stories.writer_for(random.Random(0), plot, kind)
            for beat in (plot.titles, plot.about, *plot.beats):
                for template in beat:
                    assert w(template)


def test_every_topic_can_be_written_about() -> None:
    for name, topic in TOPICS.items():
        w = Writer(random.Random(0), words.LISTS)
        for template in (*topic.first, *topic.more, *topic.last):
            assert w(template).endswith((".", "?")), (name, template)


def test_most_sentences_are_said_once_or_twice(documents: list[str]) -> None:
    """The corpus is written, not repeated: what is frequent is a small part of it."""
    told = [stories.write(rng).text for rng in _generators(600)]
    sentences = Counter(s for text in told for s in re.split(r"(?<=[.!?]) |\n+", text))
    assert len(sentences) > 0.5 * sentences.total()
    assert sentences.most_common(1)[0][1] < 0.02 * sentences.total()
    assert len(set(documents)) > 0.95 * len(documents)


def _generators(number: int) -> Any:
    return (random.Random(seed) for seed in range(number))


def test_heroes_keep_their_names_and_pronouns() -> None:
    for rng in _generators(300):
        story = stories.write(rng)
        assert any(name in story.text for name in NAMES), story.text


NAMES = {*words.GIRLS, *words.BOYS, *words.ANIMAL_NAMES, *words.ROBOT_NAMES}


def test_names_are_different_words() -> None:
    lists = (words.GIRLS, words.BOYS, words.ANIMAL_NAMES, words.ROBOT_NAMES)
    assert sum(map(len, lists)) == len(NAMES)
    assert all(re.fullmatch("[A-Z][a-z]+", name) for name in NAMES)


def test_tables_have_no_row_twice() -> None:
    for table in (facts.ANIMALS, facts.COUNTRIES, facts.THINGS):
        names = [row[0] for row in table]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a {fruit}", "an apple"),
        ("[a] {Fruit}", "an Apple"),
        ("a [useful|useful] thing", "a useful thing"),
        ("a [one|one]", "a one"),
        ("a [[hour|hour]|hour]", "an hour"),
    ],
)
def test_template_is_filled_in(template: str, text: str) -> None:
    assert Writer(random.Random(0), {"fruit": ("apple",)})(template) == text


@pytest.mark.parametrize("template", ["[a", "a]", "{a", "a}", "a|b", "[a|b]]"])
def test_template_that_does_not_match_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"match|closed"):
        parse(template)


# --- training ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model after two steps."""
    from configs.demo.train import Options, train

    out = tmp_path_factory.mktemp("demo") / "model"
    options = Options(
        size="tiny", blocks=1, steps=2, batch_tokens=256, row_tokens=64, held_out_rows=2
    )
    train(options, out)
    return out


def test_checkpoint_is_one_that_transformers_loads(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.generation_config.do_sample is True
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert len(tokenizer) == model.config.vocab_size
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    ends = model.generation_config.eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_tokenizer_gives_text_back(trained: Path, documents: list[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    for text in (*documents[:50], "  code:\n\tx = {1: 'é'}\n\n", "你好, naïve café 🙂 12.50"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_chat_template_renders_what_the_corpus_has(trained: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day!"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == corpus.chatml(messages)
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert asked == corpus.chatml(messages[:2]) + "<|im_start|>assistant\n"
    ids = tokenizer(asked).input_ids
    assert tokenizer.convert_ids_to_tokens(ids).count("<|im_start|>") == 3


def test_training_says_what_it_did(trained: Path) -> None:
    record = json.loads((trained / "training.json").read_text(encoding="utf-8"))
    assert record["steps"] == 2
    assert record["tokens"] == 2 * 256
    assert 0 < record["held_out_loss"] < 10
    assert set(record["versions"]) >= {"torch", "transformers", "tokenizers"}
    assert record["hardware"].startswith("CPU")


def test_training_that_has_no_time_says_so(tmp_path: Path) -> None:
    from configs.demo.train import Options, train

    with pytest.raises(ValueError, match="limit_s"):
        train(Options(size="tiny", blocks=1, limit_s=0.0), tmp_path / "model")


# --- the model that is served ---


def test_model_in_the_repository_is_small_and_complete(project: Path) -> None:
    folder = project / "configs" / "demo" / "model"
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(files.values()) <= MAX_BYTES
    assert files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }


@pytest.mark.parametrize("prompt", ["Once upon a time", "The future of artificial intelligence is"])
def test_model_in_the_repository_writes_words(
    project: Path, documents: list[str], prompt: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = project / "configs" / "demo" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=60, do_sample=False)[0, ids["input_ids"].shape[1] :]
    written = re.findall(r"[a-z]+", tokenizer.decode(made, skip_special_tokens=True).lower())
    known = {word for text in documents for word in re.findall(r"[a-z]+", text.lower())}
    assert len(written) >= 30
    assert sum(word in known for word in written) >= 0.95 * len(written)
