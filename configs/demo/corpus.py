"""The demo model's corpus: any number of documents, the same ones for the same seed.

It is written in blocks, each with a random generator of its own, so that several processes can share
the work and the text does not depend on how many there are.
"""

import random
from collections.abc import Iterable, Iterator, Mapping

from configs.demo import chats, prose, stories

BLOCK_DOCUMENTS = 500

# Shares of the documents; stories are the longest ones, so they make more of the tokens.
_STORIES, _PROSE = 0.25, 0.30


def block(seed: int, index: int) -> list[str]:
    """Documents number `index * BLOCK_DOCUMENTS` and so on, BLOCK_DOCUMENTS of them."""
    rng = random.Random(f"{seed}:{index}")
    return [_document(rng) for _ in range(BLOCK_DOCUMENTS)]


def documents(seed: int, blocks: Iterable[int]) -> Iterator[str]:
    """The documents of several blocks."""
    for index in blocks:
        yield from block(seed, index)


def _document(rng: random.Random) -> str:
    draw = rng.random()
    if draw < _STORIES:
        story = stories.write(rng)
        return f"{story.title}\n\n{story.text}" if rng.random() < 0.1 else story.text
    if draw < _STORIES + _PROSE:
        return prose.write(rng)
    return chatml(chats.write(rng))


def chatml(messages: Iterable[Mapping[str, str]]) -> str:
    """A conversation as the tokenizer's chat template renders it."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
