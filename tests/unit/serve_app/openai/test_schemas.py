"""Request bodies: what is taken, what it becomes, what is refused and how that is said."""

import json

import pytest

from actors.errors import InvalidRequest, UnsupportedParameter
from actors.protocol import ChatPrompt, SamplingParams, SleepMode
from serve_app.openai.fields import parse_form, parse_json
from serve_app.openai.requests import (
    SleepForm,
    WakeForm,
    parse_chat,
    parse_completion,
    parse_seed,
    parse_tokenize,
)

HI = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_chat({"messages": HI, **fields})


def completion(**fields):
    return parse_completion({"prompt": "hi", **fields}, max_continuations=64)


def seed(**fields):
    return parse_seed(fields)


def tokenize(**fields):
    return parse_tokenize({"messages": HI, **fields})


# --- what is taken ---


def test_chat_leaves_to_the_model_what_it_does_not_name():
    ask = chat()
    assert ask.sampling == SamplingParams()
    left = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    assert {getattr(ask.sampling, name) for name in left} == {None}
    assert (ask.n, ask.stream, ask.include_usage, ask.model) == (1, False, False, None)


def test_completion_takes_16_tokens_unless_told():
    assert completion().sampling == SamplingParams(max_tokens=16)
    assert completion(max_tokens=None).sampling.max_tokens == 16


def test_seed_form_is_greedy_and_streams():
    ask = parse_seed({})
    assert ask.prompts == ("The future of artificial intelligence is",)
    assert (ask.stream, ask.n) == (True, 1)
    assert ask.sampling == SamplingParams(max_tokens=50, temperature=0.0)
    assert parse_seed({"temperature": 0.7, "stream": False}).sampling.temperature == 0.7


def test_every_sampling_field_arrives():
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -(2**63),
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"17": -100, "18": 1.5},
    }
    expected = SamplingParams(
        max_tokens=9,
        min_tokens=3,
        ignore_eos=True,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={17: -100.0, 18: 1.5},
        seed=-(2**63),
        stop=("a", "b"),
        stop_token_ids=(1, 2),
    )
    assert chat(**fields).sampling == expected
    assert completion(**fields).sampling == expected
    assert parse_seed(fields).sampling == expected


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_all(top_k):
    assert chat(top_k=top_k).sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompt_forms(prompt, expected):
    ask = completion(prompt=prompt, n=2, echo=True, stream=True)
    assert ask.prompts == expected
    requests = ask.requests("cmpl-1")
    assert [request.prompt for request in requests] == list(expected)
    assert [request.request_id for request in requests] == [
        f"cmpl-1-{index}" for index in range(len(expected))
    ]
    assert all(request.n == 2 and request.echo and request.stream for request in requests)


def test_stop_may_be_one_string():
    assert chat(stop="END").sampling.stop == ("END",)


def test_max_completion_tokens_goes_before_max_tokens():
    assert chat(max_tokens=5, max_completion_tokens=7).sampling.max_tokens == 7
    assert chat(max_tokens=5).sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_logprobs(fields, logprobs):
    assert chat(**fields).sampling.logprobs == logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_completion_logprobs(logprobs):
    assert completion(logprobs=logprobs).sampling.logprobs == logprobs


def test_include_usage_needs_a_stream():
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=options).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert not chat(stream_options=options).include_usage


def test_messages_become_what_templates_read():
    tools = [{"type": "function", "function": {"name": "f"}}]
    arguments = {"a": [None, "ä"], "b": None}
    calls, parsed = (
        [{"id": "1", "type": "function", "function": {"name": "f", "arguments": form}}]
        for form in (json.dumps(arguments), arguments)
    )
    ask = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        tools=tools,
        tool_choice="auto",
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert ask.prompts == (
        ChatPrompt(
            messages=(
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "", "tool_calls": parsed},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
            ),
            tools=tuple(tools),
            template_kwargs={"enable_thinking": False, "continue_final_message": True},
            add_generation_prompt=False,
        ),
    )


def test_no_tool_calls_are_none():
    ask = chat(messages=[{"role": "assistant", "content": "hi", "tool_calls": []}])
    assert ask.prompts[0].messages == ({"role": "assistant", "content": "hi"},)


def test_echo_with_logprobs_is_taken():
    ask = completion(echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    assert (ask.echo, ask.sampling.logprobs) == (True, 1)


@pytest.mark.parametrize(
    ("choice", "must_call"),
    [
        ("required", ("f", "g")),
        ({"type": "function", "function": {"name": "g"}}, ("g",)),
        ("auto", ()),
        ("none", ()),
    ],
)
def test_tool_choice_says_what_must_be_called(choice, must_call):
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    assert chat(tools=tools, tool_choice=choice).prompts[0].must_call == must_call


def test_forced_call_leaves_no_room_for_another_form():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(InvalidRequest, match="tool_choice and response_format exclude each other"):
        chat(tools=tools, tool_choice="required", response_format={"type": "json_object"})


def test_tool_choice_none_keeps_the_tools_from_the_model():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert chat(tools=tools).tools == tuple(tools)
    ask = chat(tools=tools, tool_choice="none")
    assert (ask.tools, ask.prompts[0].tools) == ((), None)
    assert completion().tools == ()


@pytest.mark.parametrize("value", [None, True, False])
def test_special_tokens_are_the_tokenizer_s_business_unless_told(value):
    (request,) = completion(add_special_tokens=value).requests("id")
    assert request.add_special_tokens is value


@pytest.mark.parametrize(("effort", "wanted"), [("none", False), ("low", True)])
def test_whether_to_reason_reaches_the_template_unless_it_is_told_itself(effort, wanted):
    (prompt,) = chat(reasoning_effort=effort).prompts
    assert prompt.template_kwargs == {"enable_thinking": wanted, "thinking": wanted}
    told = {"thinking": not wanted, "enable_thinking": not wanted, "a": 1}
    (prompt,) = chat(reasoning_effort=effort, chat_template_kwargs=told).prompts
    assert prompt.template_kwargs == told
    (prompt,) = chat().prompts
    assert prompt.template_kwargs == {}


def test_continuous_usage_needs_include_usage():
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).continuous_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


IGNORED = {
    "user": "me",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
    "priority": 0,
    "best_of": 1,
    "stream_options": {"continuous_usage_stats": True},
    "some_field_of_next_year": [1, {"a": None}],
}
OPTIONAL = [
    "model",
    "n",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "echo",
    "best_of",
    "suffix",
    "user",
    "store",
    "metadata",
    "functions",
    "audio",
    "modalities",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "chat_template",
    "documents",
]


@pytest.mark.parametrize("ask", [chat, completion])
def test_harmless_fields_and_nulls_change_nothing(ask):
    assert ask(**IGNORED) == ask()
    assert ask(**dict.fromkeys(OPTIONAL)) == ask()


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": ""},
        {"use_beam_search": False},
        {"functions": []},
        {"modalities": ["text"]},
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"skip_special_tokens": True, "include_stop_str_in_output": False},
        {"allowed_token_ids": [], "bad_words": [], "logits_processors": []},
        {"return_token_ids": False, "return_tokens_as_token_ids": False},
        {"thinking_token_budget": -1, "watermarking": False},
        {"chat_template": "", "documents": [], "echo": False, "include_reasoning": True},
    ],
)
def test_unsupported_fields_that_ask_for_nothing(fields):
    assert chat(**fields) == chat()


# --- what is refused ---

SHARED_WRONG = [
    ({"temperature": "hot"}, "temperature", 'temperature must be a number, found "hot"'),
    ({"temperature": True}, "temperature", "temperature must be a number, found true"),
    ({"temperature": 2.1}, "temperature", "temperature must be at most 2, found 2.1"),
    ({"temperature": -1}, "temperature", "temperature must be at least 0, found -1"),
    ({"temperature": float("inf")}, "temperature", "temperature must be a finite number"),
    ({"top_p": 0}, "top_p", "top_p must be greater than 0, found 0"),
    ({"top_p": 1.5}, "top_p", "top_p must be at most 1, found 1.5"),
    ({"top_k": -2}, "top_k", "top_k must be at least -1, found -2"),
    ({"top_k": 1.5}, "top_k", "top_k must be an integer, found 1.5"),
    ({"min_p": 1.1}, "min_p", "min_p must be at most 1, found 1.1"),
    ({"seed": 2**63}, "seed", f"seed must be at most {2**63 - 1}, found {2**63}"),
    ({"seed": "1"}, "seed", 'seed must be an integer, found "1"'),
    ({"stop": 5}, "stop", "stop must be a string or an array of strings, found 5"),
    ({"stop": ["a", 1]}, "stop", 'stop must be a string or an array of strings, found ["a", 1]'),
    ({"stop": ""}, "stop", "stop must be at most 32 strings of 1 to 1024 characters"),
    ({"stop": ["a"] * 33}, "stop", "stop must be at most 32 strings"),
    ({"stop": "x" * 1025}, "stop", "stop must be at most 32 strings"),
    ({"stop": ["x" * 1024] * 9}, "stop", "stop must have at most 8192 characters in all strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids must be an array of token ids"),
    ({"stop_token_ids": 3}, "stop_token_ids", "stop_token_ids must be an array of token ids"),
    ({"ignore_eos": "yes"}, "ignore_eos", 'ignore_eos must be true or false, found "yes"'),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, found 0"),
    ({"max_tokens": "5"}, "max_tokens", 'max_tokens must be an integer, found "5"'),
    ({"max_tokens": 10**30}, "max_tokens", f"max_tokens must be at most {2**31 - 1}"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens must be at most max_tokens (2)"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, found -1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be greater than 0, found 0"),
    ({"repetition_penalty": 1e39}, "repetition_penalty", "must be at most 3.4028234e+38"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be at most 2, found 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty", "must be at least -2, found -3"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias must be an object of token ids and numbers"),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'must have token ids as keys, found "x"'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "must have token ids as keys"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "must have token ids as keys"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "values from -100 to 100, found 101 at 1"),
    ({"logit_bias": {"1": True}}, "logit_bias", "values from -100 to 100, found true at 1"),
    ({"logit_bias": {"1": float("inf")}}, "logit_bias", "values from -100 to 100"),
    ({"n": 0}, "n", "n must be at least 1, found 0"),
    ({"n": 129}, "n", "n must be at most 128, found 129"),
    ({"n": "2"}, "n", 'n must be an integer, found "2"'),
    ({"stream": 1}, "stream", "stream must be true or false, found 1"),
    ({"stream": "true"}, "stream", 'stream must be true or false, found "true"'),
    ({"stream_options": []}, "stream_options", "stream_options must be an object, found []"),
    (
        {"stream_options": {"include_usage": "y"}},
        "stream_options.include_usage",
        'stream_options.include_usage must be true or false, found "y"',
    ),
    ({"model": 7}, "model", "model must be a string, found 7"),
]
CHAT_WRONG = [
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": []}, "messages", "messages must not be empty"),
    ({"messages": "hi"}, "messages", 'messages must be an array, found "hi"'),
    ({"messages": ["hi"]}, "messages[0]", 'messages[0] must be an object, found "hi"'),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is required"),
    (
        {"messages": [{"role": "boss", "content": "x"}]},
        "messages[0].role",
        "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool', found \"boss\"",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0]", "needs content, because its role is user"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "needs content"),
    (
        {"messages": [*HI, {"role": "user", "content": 5}]},
        "messages[1].content",
        "messages[1].content must be a string, found 5",
    ),
    (
        {"messages": [{"role": "user", "content": ["x"]}]},
        "messages[0].content",
        "must be a string or an array of text parts",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content",
        'must have a string as "text" in every part',
    ),
    ({"top_logprobs": 3}, "top_logprobs", "top_logprobs needs logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be at most 20, found 21"),
    ({"logprobs": 3}, "logprobs", "logprobs must be true or false, found 3"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1, found 0"),
    ({"tools": "f"}, "tools", "tools must be an array"),
    (
        {"tools": [{}]},
        "tools",
        'must have {"type": "function", "function": {"name": ...}} as items',
    ),
    ({"tools": ["f"]}, "tools", "must have"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "must have"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]},
        "tools",
        "tools must have objects as parameters of functions",
    ),
    *(
        (
            {"messages": [{"role": "assistant", "tool_calls": calls}]},
            "messages[0].tool_calls",
            message,
        )
        for calls, message in [
            ("f", "must be an array of tool calls"),
            (
                [{"function": {}}],
                'must have {"type": "function", "function": {"name", "arguments"}}',
            ),
            ([{"function": {"name": "f", "arguments": "{"}}], "must have a JSON object, as text"),
            ([{"function": {"name": "f", "arguments": "[1]"}}], "must have a JSON object, as text"),
            (
                [{"function": {"name": "f", "arguments": "[" * 100_000}}],
                "must have a JSON object, as text",
            ),
        ]
    ),
    ({"tool_choice": "maybe"}, "tool_choice", 'must be "auto", "none", "required" or {'),
    ({"tool_choice": {"type": "function"}}, "tool_choice", '"name": ...}}, found {"type"'),
    ({"tool_choice": "required"}, "tool_choice", "wants a call, but there is no tool"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        'there is no tool with the name "f"',
    ),
    ({"response_format": "json"}, "response_format", "response_format must be an object"),
    ({"response_format": {}}, "response_format.type", "response_format.type is required"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object, found 1"),
]
COMPLETION_WRONG = [
    ({"prompt": None}, "prompt", "prompt is required"),
    ({"prompt": []}, "prompt", "prompt must be a string, an array of strings"),
    ({"prompt": [[]]}, "prompt", "prompt must be a string, an array of strings"),
    ({"prompt": [1, "a"]}, "prompt", "prompt must be a string"),
    ({"prompt": [1.5]}, "prompt", "prompt must be a string"),
    ({"prompt": [True]}, "prompt", "prompt must be a string"),
    ({"prompt": [-1]}, "prompt", "prompt must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "prompt must be a string"),
    ({"prompt": ["a"] * 65}, "prompt", "prompts times n is 65; the limit is 64"),
    ({"prompt": ["a"] * 33, "n": 2}, "prompt", "prompts times n is 66; the limit is 64"),
    ({"logprobs": 6}, "logprobs", "logprobs must be at most 5, found 6"),
    ({"logprobs": True}, "logprobs", "logprobs must be an integer, found true"),
    ({"echo": 1}, "echo", "echo must be true or false, found 1"),
    ({"best_of": 0}, "best_of", "best_of must be at least 1, found 0"),
]


@pytest.mark.parametrize(
    ("ask", "fields", "param", "message"),
    [
        *((chat, *case) for case in SHARED_WRONG + CHAT_WRONG),
        *((completion, *case) for case in SHARED_WRONG + COMPLETION_WRONG),
    ],
)
def test_wrong_value_is_named_with_what_was_found(ask, fields, param, message):
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    assert type(caught.value) is InvalidRequest
    assert caught.value.param == param
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        (completion, {"suffix": "x"}, "suffix"),
        (completion, {"best_of": 2}, "best_of"),
        (completion, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (completion, {"use_beam_search": True}, "use_beam_search"),
        (chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (chat, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        (chat, {"functions": [{"name": "f"}]}, "functions"),
        (chat, {"modalities": ["text", "audio"]}, "modalities"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content",
        ),
    ],
)
def test_known_but_unsupported(ask, fields, param):
    with pytest.raises(UnsupportedParameter) as caught:
        ask(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith((param, "echo"))


UNSUPPORTED = {
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [1],
    "bad_words": ["hi"],
    "logits_processors": ["f"],
    "logprob_token_ids": [1],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "repetition_detection": {"max_pattern_size": 4},
    "thinking_token_budget": 5,
    "watermarking": True,
}
UNSUPPORTED_BY_TEMPLATES = {"chat_template": "{{ messages }}", "documents": [{"text": "a"}]}
UNSUPPORTED_IN_CHATS = {"echo": True, "include_reasoning": False, "web_search_options": {}}


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (chat, UNSUPPORTED | UNSUPPORTED_BY_TEMPLATES | UNSUPPORTED_IN_CHATS),
        (completion, UNSUPPORTED),
        (seed, UNSUPPORTED),
        (tokenize, UNSUPPORTED_BY_TEMPLATES),
    ],
)
def test_fields_of_vllm_that_would_change_the_answer_are_unsupported(ask, fields):
    for name, value in fields.items():
        with pytest.raises(UnsupportedParameter) as caught:
            ask(**{name: value})
        assert caught.value.param == name


def test_fields_of_chats_are_harmless_elsewhere():
    fields = UNSUPPORTED_BY_TEMPLATES | {"include_reasoning": False, "web_search_options": {}}
    assert completion(**fields) == completion()
    assert tokenize(**UNSUPPORTED) == tokenize()


@pytest.mark.parametrize("fields", [{"prompt": ["a"]}, {"prompt": 3}, {"n": 2}, {"max_tokens": 0}])
def test_seed_form_is_checked_as_well(fields):
    with pytest.raises(InvalidRequest):
        parse_seed(fields)


# --- JSON ---


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"{} x",
        b"[]",
        b'[{"a": 1}]',
        b"7",
        b"null",
        b'"text"',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        b"level=1",
    ],
    ids=repr,
)
def test_body_that_is_no_json_object(body):
    with pytest.raises(InvalidRequest, match=r"^the body must be ") as caught:
        parse_json(body)
    assert len(str(caught.value)) < 200


def test_body_with_everything_json_has():
    value = {"a": [1, 2.5, "é\u2028\U0001f600", None, True, {"b": {}}]}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


# --- control forms ---


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SleepForm()),
        ({"level": "2", "mode": "abort", "hold": "true", "model": "m"}, "m"),
        ({"level": 2, "mode": "abort", "hold": True, "model": "m"}, "m"),
    ],
)
def test_sleep_form_from_query_or_body(fields, expected):
    if expected == "m":
        expected = SleepForm(model="m", level=2, mode=SleepMode.ABORT, hold=True)
    assert parse_form(SleepForm, fields) == expected
    assert SleepForm().mode is SleepMode.WAIT


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        (SleepForm, {"level": "3"}, 'level must be at most 2, found "3"'),
        (SleepForm, {"level": 0}, "level must be at least 1, found 0"),
        (SleepForm, {"level": "deep"}, 'level must be an integer, found "deep"'),
        (SleepForm, {"level": ["1", "2"]}, 'level must be an integer, found ["1", "2"]'),
        (SleepForm, {"mode": "now"}, "mode must be 'wait', 'abort' or 'keep', found \"now\""),
        (SleepForm, {"hold": "perhaps"}, 'hold must be true or false, found "perhaps"'),
        (WakeForm, {"tags": "everything"}, "must be 'weights' or 'kv_cache', found \"everything\""),
        (WakeForm, {"tags": ["weights", 3]}, "tags[1] must be 'weights' or 'kv_cache', found 3"),
        (WakeForm, {"tags": 3}, "tags must be an array, found 3"),
    ],
)
def test_control_form_that_is_wrong(form, fields, message):
    with pytest.raises(InvalidRequest) as caught:
        parse_form(form, fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["weights"], "weights", []])
def test_wake_tags(tags):
    expected = (tags,) if isinstance(tags, str) else tuple(tags)
    assert parse_form(WakeForm, {"tags": tags}).tags == expected
