"""The JSON schemas of what we answer at /v1/responses."""

from serve_app.openai.schemas import COUNT, FLAG, TEXT, Schema, an_object, array, const, or_null

_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_NUMBER: Schema = {"type": "number"}
_ANY: Schema = {"type": "object"}

ANSWERS: Schema = {
    "Response": an_object(
        id=TEXT,
        object=const("response"),
        created_at=COUNT,
        model=TEXT,
        status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
        error=or_null(an_object(code=TEXT, message=TEXT)),
        incomplete_details=or_null(an_object(reason=const("max_output_tokens"))),
        output=array(
            {
                "anyOf": [
                    an_object(
                        id=TEXT,
                        type=const("message"),
                        role=const("assistant"),
                        status=_STATUS,
                        content=array(
                            an_object(type=const("output_text"), text=TEXT, annotations=array(_ANY))
                        ),
                    ),
                    an_object(
                        id=TEXT,
                        type=const("reasoning"),
                        status=_STATUS,
                        summary=array(_ANY),
                        content=array(an_object(type=const("reasoning_text"), text=TEXT)),
                    ),
                    an_object(
                        id=TEXT,
                        type=const("function_call"),
                        status=_STATUS,
                        call_id=TEXT,
                        name=TEXT,
                        arguments=TEXT,
                    ),
                ]
            }
        ),
        usage=or_null(
            an_object(
                input_tokens=COUNT,
                input_tokens_details=an_object(cached_tokens=COUNT, cache_write_tokens=COUNT),
                output_tokens=COUNT,
                output_tokens_details=an_object(reasoning_tokens=COUNT),
                total_tokens=COUNT,
            )
        ),
        instructions=or_null(TEXT),
        max_output_tokens=or_null(COUNT),
        metadata=_ANY,
        parallel_tool_calls=FLAG,
        reasoning=_ANY,
        temperature=or_null(_NUMBER),
        text=_ANY,
        tool_choice={"type": ["string", "object"]},
        tools=array(_ANY),
        top_p=or_null(_NUMBER),
        background={"const": False},
        previous_response_id={"type": "null"},
        truncation=const("disabled"),
    ),
}
