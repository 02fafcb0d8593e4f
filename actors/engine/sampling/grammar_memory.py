"""Host memory of compiled grammars: which are kept, and how much each takes, as the allocator tells."""

import ctypes
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from actors.errors import Unavailable
from actors.protocol import GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

_COMPILED = 32  # grammars kept
# What grammars are made of on their way, and share, is in llguidance's lexer, whose size it does not tell. A state took
# 0.6 KiB in `(a|b)*a(a|b){30}` and 19 KiB in `(a|b)*a(a|b){10000}` after 3,000 tokens, more with every token. So their
# bytes are bounded beside their states.
_MAX_BYTES = 2**28  # of one grammar
_MAX_BYTES_IN_ALL = 2**30  # of those kept, and those that sequences still use
# Compiled anew when it is asked for again. What other threads allocate during a mask is counted as well,
# so that a grammar of everybody's may seem to grow. From here on it matters who has grown.
_RENEWED_BYTES = 2**26
# Tables double when they are full: masks add as much as their grammars have, or this much to small ones (26 MiB to
# 75, 9 to 6 was seen). What is above that is another thread's, as gigabytes of an image are.
_GROWN_AT_ONCE_BYTES = 2**24


class CompiledGrammar:
    """A grammar at its beginning; what its sequences find out on their way is found out for all."""

    def __init__(
        self, matcher: "LLMatcher", end_ids: frozenset[int], size: int, memory: "GrammarMemory"
    ) -> None:
        self.matcher = matcher
        self.end_ids = end_ids
        self.bytes = size
        self.memory = memory
        self.is_exhausted = False  # a sequence met a limit, which others may share
        self.is_too_large = size > _MAX_BYTES  # its sequences end


class GrammarMemory:
    """The compiled grammars there are: those kept, the latest of them, and those only sequences have.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()
        self._alive: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()
        self._lock = threading.Lock()

    def find(self, key: tuple[GrammarKind, str]) -> CompiledGrammar | None:
        """One that is kept and can be used; now the latest."""
        with self._lock:
            compiled = self._kept.pop(key, None)
            if compiled is None or compiled.is_exhausted or compiled.bytes > _RENEWED_BYTES:
                return None
            self._kept[key] = compiled
            return compiled

    def keep(self, key: tuple[GrammarKind, str], compiled: CompiledGrammar) -> None:
        """As the latest; others go when they are too many, or too large."""
        with self._lock:
            self._alive.add(compiled)
            self._kept[key] = compiled
            while len(self._kept) > _COMPILED:
                self._kept.popitem(last=False)
            self._make_room(at_least=1)

    def check_room(self) -> None:
        """Raises Unavailable if what sequences use leaves no room for another grammar."""
        with self._lock:
            self._make_room(at_least=0)
            if self._bytes() > _MAX_BYTES_IN_ALL:
                raise Unavailable(
                    "the grammars of other requests take all memory there is for them"
                )

    def is_tight(self, compiled: Sequence[CompiledGrammar]) -> bool:
        """Whether it matters which of these grows; what many take together is anybody's."""
        with self._lock:
            largest = max(each.bytes for each in compiled)
            return largest > _RENEWED_BYTES or self._bytes() > _MAX_BYTES_IN_ALL // 2

    def charge(self, compiled: Sequence[CompiledGrammar], grown_bytes: int) -> None:
        """What their masks took, which cannot be told apart. The largest goes where there is no room."""
        possible = max(_GROWN_AT_ONCE_BYTES, sum(each.bytes for each in set(compiled)))
        share = min(grown_bytes, possible) // len(compiled)
        for each in compiled:
            each.bytes = max(0, each.bytes + share)
            each.is_too_large |= each.bytes > _MAX_BYTES
        with self._lock:
            self._make_room(at_least=0)
            if self._bytes() > _MAX_BYTES_IN_ALL:
                max(self._alive, key=lambda each: each.bytes).is_too_large = True

    def _make_room(self, at_least: int) -> None:
        while len(self._kept) > at_least and self._bytes() > _MAX_BYTES_IN_ALL:
            self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(each.bytes for each in self._alive)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def allocated_bytes() -> int:
    """What malloc has given to this process; takes 5 us. 0 where the C library cannot tell (glibc 2.33 can)."""
    read = _mallinfo()
    if read is None:
        return 0
    info = read()
    return int(info.uordblks + info.hblkhd)


@cache
def _mallinfo() -> Any:
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        logger.warning("grammars' memory is bounded by their number only: no mallinfo2 here")
        return None
    read.restype = _Mallinfo
    return read
