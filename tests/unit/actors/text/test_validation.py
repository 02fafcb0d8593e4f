"""What must not enter an engine."""

import pytest

from actors.errors import ContextLengthExceeded
from actors.protocol import SamplingParams
from actors.text.validation import check_request


@pytest.mark.parametrize(
    ("max_tokens", "told"),
    [
        (None, "the prompt has 8 tokens and the answer needs one at least"),
        (3, "the prompt has 8 tokens and max_tokens is 3"),
    ],
)
def test_limit_is_told_only_where_one_was_given(max_tokens: int | None, told: str) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        check_request(SamplingParams(max_tokens=max_tokens), [1] * 8, 10, 8)
    assert str(caught.value) == f"{told}; together the limit is 8 (engine.max_model_len)"
    assert caught.value.param == "prompt"
    check_request(SamplingParams(max_tokens=max_tokens), [1] * 8, 10, 11)
