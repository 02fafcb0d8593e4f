"""Where an object of JSON ends, and whether it can still become one, however it is cut into pieces."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.openai.growing_object import GrowingObject

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def end(pieces: Sequence[str]) -> int | None:
    """The index behind the object, in all pieces without their first character, its `{`."""
    growing, begin = GrowingObject(), 0
    for piece in pieces:
        if (found := growing.feed(piece)) is not None:
            return begin + found
        begin += len(piece)
    return None


@given(
    value=st.dictionaries(st.text(), VALUES),
    indent=st.sampled_from([None, 1]),
    escaped=st.booleans(),
    behind=st.text(max_size=3),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_end_is_that_of_the_object(
    value: dict[str, object], indent: int | None, escaped: bool, behind: str, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)[1:]
    assert end([text + behind]) == end([*text, behind]) == len(text)
    for at in (cut for cut in cuts if cut < len(text)):
        assert end([text[:at]]) is None
        assert end([text[:at], text[at:] + behind]) == len(text)


@given(st.lists(st.sampled_from('{}[]:,"\\ \n0a-'), max_size=12).map("".join))
def test_what_json_reads_is_an_object_that_ends_there(text: str) -> None:
    try:
        _, index = json.JSONDecoder().raw_decode("{" + text)
    except ValueError:
        return
    assert end([text]) == end([*text]) == index - 1


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[", ",", ":", "a", "1", "<", "]", '"a"}', '"a",', '"a" "', '"a":}', '"a":,'),
        *('"a":<', '"a":1 2', '"a":1<', '"a":1]', '"a":[}', '"a":[,', '"a":[1,]', '"a":1,}'),
        *('"a":1,1', '"a":[1:', '"a\n', '"\\x', '"\\\n', '"a":"\x00', '"a":[{}<', '"a":""<'),
    ],
)
def test_what_can_become_no_object(text: str) -> None:
    assert end([text[:-1]]) is None
    with pytest.raises(ValueError, match="no JSON"):
        end([text])
    with pytest.raises(ValueError, match="no JSON"):
        end([*text])
