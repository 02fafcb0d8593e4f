"""Which form a model's messages have, and where an answer begins."""

import pytest

from actors.errors import InvalidRequest
from actors.protocol import ChatPrompt, MessageForm
from actors.text.codec import TextCodec
from actors.text.message_form import ChatConfig, form_of
from tests.unit.actors.text.test_text import byte_level

# As the models' own templates do it, cut down to what matters here.
DEEPSEEK_R1 = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and 'tool_calls' in m %}{% for t in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + t['type'] + '<｜tool▁sep｜>' + t['function']['name'] + '\n```json\n'"
    " + t['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' and 'tool_calls' not in m %}"
    "<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# Calls are told by content that is none, and the rest is never looked at.
DEEPSEEK_NONE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}{% for t in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + t['type'] + '<｜tool▁sep｜>' + t['function']['name'] + '\n```json\n'"
    " + t['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}"
    "<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
LLAMA3 = "{{ '<|start_header_id|>' }}{{ '{\"name\": \"' }}{{ '\"parameters\": ' }}"
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        (DEEPSEEK_R1, "think", "deepseek"),
        (QWEN3, "think", "qwen"),
        (LLAMA3, None, "llama"),
        (PLAIN, None, None),
        ("", None, None),
    ],
)
def test_form_is_found_in_the_template(template, reasoning, tools):
    assert form_of(ChatConfig(), template) == MessageForm(reasoning, tools)
    told = ChatConfig(reasoning_parser="none", tool_parser="none")
    assert form_of(told, template) == MessageForm()
    told = ChatConfig(reasoning_parser="think", tool_parser="llama")
    assert form_of(told, template) == MessageForm("think", "llama")


def codec_with(template: str | dict[str, str]) -> TextCodec:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return TextCodec(tokenizer, 512, [0])


def prompt_of(*messages: tuple[str, str], **options: object) -> ChatPrompt:
    generation = options.pop("add_generation_prompt", True)
    return ChatPrompt(
        tuple({"role": role, "content": content} for role, content in messages),
        template_kwargs=options,
        add_generation_prompt=bool(generation),
    )


@pytest.mark.parametrize(
    ("template", "prompt", "opened"),
    [
        (DEEPSEEK_R1, prompt_of(("user", "hi")), True),
        (DEEPSEEK_R1, prompt_of(("user", "hi"), add_generation_prompt=False), False),
        (QWEN3, prompt_of(("user", "hi")), False),
        (QWEN3, prompt_of(("user", "what is <think>")), False),
        (QWEN3, prompt_of(("user", "hi"), enable_thinking=False), False),
        *(
            (
                QWEN3,
                prompt_of(
                    ("user", "hi"),
                    ("assistant", begun),
                    add_generation_prompt=False,
                    continue_final_message=True,
                ),
                opened,
            )
            for begun, opened in [
                ("<think>\nI", True),
                ("<think>\nI</think>\n4", False),
                ("So", False),
            ]
        ),
    ],
)
def test_where_the_answer_begins(template, prompt, opened):
    codec = codec_with(template)
    form = codec.message_form(prompt, codec.encode_prompt(prompt))
    assert form.reasoning == "think"
    assert form.in_reasoning is opened


def test_one_of_several_templates_is_enough():
    codec = codec_with({"default": PLAIN, "tool_use": QWEN3})
    prompt = prompt_of(("user", "hi"))
    assert codec.message_form(prompt, codec.encode_prompt(prompt)).tools == "qwen"


CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "ä"}}}
CALLING = ChatPrompt(
    (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    )
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (DEEPSEEK_R1, 'function<｜tool▁sep｜>f\n```json\n{"a": "ä"}\n```'),
        (DEEPSEEK_NONE, 'hi<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "ä"}\n```'),
        (QWEN3, '<tool_call>{"a": "ä"}</tool_call>'),
        (PLAIN, "user: hi\nassistant: "),  # knows no calls
    ],
)
def test_earlier_calls_reach_the_template_in_its_own_form(template, shown):
    codec = codec_with(template)
    assert shown in codec.decode(codec.encode_prompt(CALLING))


@pytest.mark.parametrize("add", [None, True, False])
def test_special_tokens_are_added_as_told(add):
    codec = codec_with(PLAIN)
    encode = codec._tokenizer.encode
    for prompt, default in (("hi", True), (prompt_of(("user", "hi")), False)):
        text = prompt if isinstance(prompt, str) else "user: hi\n"
        expected = tuple(encode(text, add_special_tokens=default if add is None else add))
        assert codec.encode_prompt(prompt, add_special_tokens=add) == expected


def test_template_that_asks_for_none_continues_a_message_like_others():
    codec = codec_with(DEEPSEEK_NONE)
    on = {"continue_final_message": True}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"})
    prompt = ChatPrompt(messages, template_kwargs=on, add_generation_prompt=False)
    assert codec.decode(codec.encode_prompt(prompt)).endswith("<｜Assistant｜>yo")
    with pytest.raises(InvalidRequest, match="exclude each other"):
        codec.encode_prompt(ChatPrompt(messages, template_kwargs=on))
