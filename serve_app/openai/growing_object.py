"""A JSON object that arrives in pieces: where it ends, and whether it can still become one."""

import re
from enum import Enum, auto


class _Next(Enum):
    """What may come next."""

    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_OR_END = auto()
    COMMA_OR_END = auto()
    WORD = auto()  # more of it
    STRING = auto()
    ESCAPED = auto()


class GrowingObject:
    """An object of JSON behind its `{`. Looks at each character once, however many pieces there are.

    It is a little lenient: which words, numbers and codes of characters there are is up to who reads the whole.
    But outside of strings there is nothing that JSON does not have there, such as a mark.
    """

    def __init__(self) -> None:
        self._ends = ["}"]  # of all that is open
        self._next = _Next.KEY_OR_END
        self._key = False  # the string is one

    def feed(self, text: str) -> int | None:
        """The index behind the object; None while more has to come.

        Raises:
            ValueError: whatever comes, this is no object.
        """
        at = 0
        while at < len(text):
            skipped = _SKIPPED.get(self._next, _SPACE).match(text, at)
            assert skipped is not None, "it matches nothing, too"
            at = skipped.end()
            if at == len(text):
                break
            if self._next is _Next.WORD:  # that was its end, and white space may follow
                self._next = _Next.COMMA_OR_END
                continue
            self._take(text[at])
            at += 1
            if not self._ends:
                return at
        return None

    def _take(self, character: str) -> None:
        """One character that is neither white space nor in the middle of a string or a word."""
        match self._next, character:
            case _Next.STRING, '"':
                self._next = _Next.COLON if self._key else _Next.COMMA_OR_END
            case _Next.STRING, "\\":
                self._next = _Next.ESCAPED
            case _Next.ESCAPED, _ if character in _ESCAPES:
                self._next = _Next.STRING
            case ((_Next.KEY | _Next.KEY_OR_END), '"'):
                self._next, self._key = _Next.STRING, True
            case _Next.COLON, ":":
                self._next = _Next.VALUE
            case ((_Next.VALUE | _Next.VALUE_OR_END), _) if character in _VALUES:
                self._next, self._key = _VALUES[character], False
                if character in _ENDS:
                    self._ends.append(_ENDS[character])
            case ((_Next.VALUE | _Next.VALUE_OR_END), _) if _WORD.fullmatch(character):
                self._next = _Next.WORD
            case _Next.COMMA_OR_END, ",":
                self._next = _Next.KEY if self._ends[-1] == "}" else _Next.VALUE
            case ((_Next.KEY_OR_END | _Next.VALUE_OR_END | _Next.COMMA_OR_END), _) if (
                character == self._ends[-1]
            ):
                self._ends.pop()
                self._next = _Next.COMMA_OR_END
            case _:
                raise ValueError(f"no JSON: {character!r}")


_ENDS = {"{": "}", "[": "]"}
_VALUES = {'"': _Next.STRING, "{": _Next.KEY_OR_END, "[": _Next.VALUE_OR_END}
_ESCAPES = '"\\/bfnrtu'
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_SKIPPED = {
    _Next.STRING: re.compile(r'[^"\\\x00-\x1f]*'),
    _Next.ESCAPED: re.compile(""),
    _Next.WORD: _WORD,
}
