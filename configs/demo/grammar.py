"""Sentences from templates: `[one|another]` is a choice, `{slot}` a word that is filled in.

A slot that the document fixes ("{hero}") has the same word everywhere in it; one that only the word
lists know ("{colour}") has another word each time. `{Hero}` is `{hero}` with a capital letter.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

Slots = Mapping[str, str]


class Slot(NamedTuple):
    key: str
    capital: bool


class Choice(NamedTuple):
    options: "tuple[tuple[Part, ...], ...]"


Part = str | Slot | Choice

_TOKENS = re.compile(r"[\[\]|]|\{[^}]*\}|[^\[\]|{}]+")
# "a" before a vowel that is heard: not "one", "useful", "European", but "hour".
_ARTICLE = re.compile(
    r"\b([Aa]) (?=[aeiouAEIOU]|hour|honest)(?!one\b|once\b|us[eu]|uni[a-ln-z]|[Ee]u)"
)


class Writer:
    """Fills templates in, for one document.

    Args:
        rng: makes every choice.
        lists: words to choose from, by slot.
        slots: words that stay the same.
    """

    def __init__(
        self, rng: random.Random, lists: Mapping[str, Sequence[str]], slots: Slots | None = None
    ) -> None:
        self.rng = rng
        self.slots = dict(slots or {})
        self._lists = lists

    def __call__(self, template: str) -> str:
        """The template, filled in; articles agree with what follows them.

        Raises:
            KeyError: nobody knows a slot.
            ValueError: brackets do not match.
        """
        return _ARTICLE.sub(r"\1n ", self._raw(template))

    def choose(self, templates: Sequence[str]) -> str:
        """One of the templates, filled in."""
        return self(self.rng.choice(templates))

    def some(self, templates: Sequence[str], least: int, most: int) -> list[str]:
        """Several different ones, filled in, in an order of their own."""
        number = min(self.rng.randint(least, most), len(templates))
        return [self(template) for template in self.rng.sample(templates, number)]

    def fix(self, **templates: str) -> None:
        """Fill these in once, and keep the words for the rest of the document."""
        for key, template in templates.items():
            self.slots[key] = self._raw(template)

    def _raw(self, template: str) -> str:
        out: list[str] = []
        self._write(parse(template), out)
        return "".join(out)

    def _write(self, parts: tuple[Part, ...], out: list[str]) -> None:
        for part in parts:
            if isinstance(part, str):
                out.append(part)
            elif isinstance(part, Choice):
                options = part.options
                self._write(options[int(self.rng.random() * len(options))], out)
            else:
                word = self._word(part.key)
                out.append(capitalised(word) if part.capital else word)

    def _word(self, key: str) -> str:
        word = self.slots.get(key)
        if word is None:
            word = self.rng.choice(self._lists[key])
            if "[" in word or "{" in word:
                word = self._raw(word)
        return word


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def listed(words: Sequence[str], last: str = "and") -> str:
    """`one`, `one and two`, `one, two and three`."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


@cache
def parse(template: str) -> tuple[Part, ...]:
    """A template's parts.

    Raises:
        ValueError: brackets do not match.
    """
    tokens = _TOKENS.findall(template)
    if "".join(tokens) != template:
        raise ValueError(f"a brace does not match: {template!r}")
    options, rest = _options(tokens, 0)
    if rest != len(tokens) or len(options) != 1:
        raise ValueError(f"brackets do not match: {template!r}")
    return options[0]


def _options(tokens: list[str], at: int) -> tuple[list[tuple[Part, ...]], int]:
    """Options up to the bracket that closes them, and where that stands."""
    options: list[list[Part]] = [[]]
    while at < len(tokens) and tokens[at] != "]":
        token = tokens[at]
        if token == "[":
            inner, at = _options(tokens, at + 1)
            if at == len(tokens):
                raise ValueError(f"a bracket that is not closed: {''.join(tokens)!r}")
            options[-1].append(Choice(tuple(inner)))
        elif token == "|":
            options.append([])
        elif token[0] == "{":
            key = token[1:-1]
            options[-1].append(Slot(key[0].lower() + key[1:], key[0].isupper()))
        else:
            options[-1].append(token)
        at += 1
    return [tuple(option) for option in options], at
