"""What the KV cache remembers of prompts and answers, by what their tokens are."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b


class Prefixes:
    """Full blocks, each by a digest of all tokens up to its end.

    One that its sequences have left stays here, and counts as free: whoever needs room gets the one that was
    left longest ago. Host only.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._left: dict[int, None] = {}  # in the order in which they were

    @property
    def unused(self) -> int:
        """Blocks that no sequence has."""
        return len(self._left)

    def unused_beside(self, blocks: Iterable[int]) -> int:
        """Blocks that no sequence has, without these."""
        return len(self._left) - sum(block in self._left for block in blocks)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of these digests, as far as they are known."""
        found: list[int] = []
        for digest in digests:
            if (block := self._block_of.get(digest)) is None:
                break
            found.append(block)
        return found

    def digests(self, known: list[bytes], tokens: Sequence[int], pages: int) -> list[bytes]:
        """Of all tokens up to the end of each of the first `pages`.

        Args:
            known: of some of these pages, from the first on; gets the others.
        """
        for number in range(len(known), pages):
            page = tokens[number * self._page_size : (number + 1) * self._page_size]
            before = known[-1] if known else b""
            known.append(blake2b(before + array("i", page).tobytes(), digest_size=16).digest())
        return known[:pages]

    def add(self, block: int, digest: bytes) -> None:
        """Remember a block, unless one with the same tokens is known; its sequence keeps it either way."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def use(self, block: int) -> None:
        """A sequence has it again."""
        self._left.pop(block, None)

    def leave(self, block: int) -> bool:
        """No sequence has it any more; whether it is kept here."""
        if block not in self._digest_of:
            return False
        self._left[block] = None
        return True

    def give_up(self) -> int:
        """Forget the block that was left longest ago, and return it."""
        block = next(iter(self._left))
        self._forget(block)
        return block

    def give_up_where(self, is_meant: Callable[[int], bool]) -> list[int]:
        """Forget those blocks that no sequence has, and return them."""
        found = [block for block in self._left if is_meant(block)]
        for block in found:
            self._forget(block)
        return found

    def reset(self) -> None:
        """Forget all of them."""
        self._block_of.clear()
        self._digest_of.clear()
        self._left.clear()

    def _forget(self, block: int) -> None:
        del self._left[block]
        del self._block_of[self._digest_of.pop(block)]
