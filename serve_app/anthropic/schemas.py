"""The JSON schemas of what we answer to Anthropic's clients."""

from serve_app.anthropic.errors import TYPES
from serve_app.openai.schemas import COUNT, TEXT, Schema, an_object, array, const, or_null

ANSWERS: Schema = {
    "AnthropicError": an_object(
        type=const("error"),
        error=an_object(type={"enum": TYPES}, message=TEXT),
    ),
    "AnthropicMessage": an_object(
        id=TEXT,
        type=const("message"),
        role=const("assistant"),
        model=TEXT,
        content=array(
            {
                "anyOf": [
                    an_object(type=const("text"), text=TEXT),
                    an_object(type=const("thinking"), thinking=TEXT, signature=TEXT),
                    an_object(type=const("tool_use"), id=TEXT, name=TEXT, input={"type": "object"}),
                ]
            }
        ),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=or_null(TEXT),
        usage=an_object(
            input_tokens=COUNT,
            cache_creation_input_tokens=COUNT,
            cache_read_input_tokens=COUNT,
            output_tokens=COUNT,
        ),
    ),
    "TokenCount": an_object(input_tokens=COUNT),
}
