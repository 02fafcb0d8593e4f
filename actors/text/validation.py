"""Ranges of sampling parameters, checked once before a request enters the engine.

Inside the engine a bad value would end the loop for everybody, or the process: on CUDA an index out
of range is a device-side assertion. No torch, so that an ingress may check as well.
"""

from collections.abc import Iterable, Sequence

from actors.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from actors.protocol import Grammar, SamplingParams

MAX_LOGPROBS = 20  # OpenAI's limit for chat completions
MAX_GRAMMAR_CHARS = 2**16
MAX_LOGIT_BIAS = 1024  # tokens; OpenAI documents 300
MAX_STOP_TOKEN_IDS = 1024
MAX_FLOAT32 = 3.4028234e38
MAX_INT64 = 2**63 - 1  # what messages to a worker can hold


def check_request(
    params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int, max_model_len: int
) -> None:
    """Refuse what must not enter an engine.

    Raises:
        InvalidRequest: naming the field.
    """
    validate(params, vocab_size)
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    check_token_ids(prompt_ids, "prompt", vocab_size)
    if len(prompt_ids) + (params.max_tokens or 1) > max_model_len:
        most = "the answer needs one at least"
        if params.max_tokens is not None and params.max_tokens > 1:
            most = f"max_tokens is {params.max_tokens}"
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt_ids)} tokens and {most}; together the limit is {max_model_len} "
            "(engine.max_model_len)",
            "prompt",
        )


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Check every field that is not None against its range, and ids against the vocabulary.

    Raises:
        InvalidRequest: a value is out of range; `param` names the field.
        UnsupportedParameter: more log-probabilities than this server gives, a longer grammar than
            it compiles.
    """
    p = params
    # Written so that NaN, which compares false with everything, fails.
    if p.temperature is not None:
        _check(0 <= p.temperature <= MAX_FLOAT32, "temperature", p.temperature, "0 or more")
    if p.top_p is not None:
        _check(0 < p.top_p <= 1, "top_p", p.top_p, "above 0 and at most 1")
    if p.top_k is not None:
        expected = f"-1 or 0 (all tokens) or more, at most {MAX_INT64}"
        _check(-1 <= p.top_k <= MAX_INT64, "top_k", p.top_k, expected)
    if p.min_p is not None:
        _check(0 <= p.min_p <= 1, "min_p", p.min_p, "between 0 and 1")
    if (repetition := p.repetition_penalty) is not None:
        _check(0 < repetition <= MAX_FLOAT32, "repetition_penalty", repetition, "above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        _check(-2 <= value <= 2, name, value, "between -2 and 2")
    if p.max_tokens is not None:
        _check(p.max_tokens >= 1, "max_tokens", p.max_tokens, "1 or more")
    expected = f"between 0 and {MAX_INT64}"
    _check(0 <= p.min_tokens <= MAX_INT64, "min_tokens", p.min_tokens, expected)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {p.min_tokens}; it must not exceed max_tokens ({p.max_tokens})",
            "min_tokens",
        )
    if p.seed is not None:
        _check(-(2**63) <= p.seed < 2**63, "seed", p.seed, "a signed 64-bit integer")
    _check(all(p.stop), "stop", "an empty string", "one or more characters each")
    _check(all(map(_is_unicode, p.stop)), "stop", "half a surrogate pair", "Unicode text")
    for name, limit in (("logit_bias", MAX_LOGIT_BIAS), ("stop_token_ids", MAX_STOP_TOKEN_IDS)):
        if (count := len(getattr(p, name))) > limit:
            raise InvalidRequest(f"{name} has {count} tokens; the limit is {limit}", name)
    for bias in p.logit_bias.values():
        _check(-100 <= bias <= 100, "logit_bias", bias, "between -100 and 100")
    check_token_ids(p.logit_bias, "logit_bias", vocab_size)
    check_token_ids(p.stop_token_ids, "stop_token_ids", vocab_size)
    if p.logprobs is not None:
        _check(p.logprobs >= 0, "logprobs", p.logprobs, "0 or more")
        if p.logprobs > MAX_LOGPROBS:
            raise UnsupportedParameter(
                f"logprobs is {p.logprobs}; this server gives at most {MAX_LOGPROBS}", "logprobs"
            )
    if p.grammar is not None:
        check_grammar(p.grammar)


def check_grammar(grammar: Grammar) -> None:
    """Refuse what cannot be compiled, whatever it says.

    Raises:
        InvalidRequest: it is no text.
        UnsupportedParameter: it is longer than what is compiled.
    """
    _check(_is_unicode(grammar.text), grammar.param, "half a surrogate pair", "Unicode text")
    if (chars := len(grammar.text)) > MAX_GRAMMAR_CHARS:
        raise UnsupportedParameter(
            f"{grammar.param} has {chars} characters; the limit is {MAX_GRAMMAR_CHARS}",
            grammar.param,
        )


def check_token_ids(token_ids: Iterable[int], param: str, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, and booleans, which Python counts as integers.

    Raises:
        InvalidRequest: naming the first bad id.
    """
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds {token_id!r}; token ids are integers from 0 to {vocab_size - 1}",
                param,
            )


def _is_unicode(text: str) -> bool:
    """Whether it can be sent; JSON and Python have half of a surrogate pair, too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(ok: bool, param: str, found: object, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} is {found}; it must be {wanted}", param)
