"""The JSON schemas of what we answer, as clients may rely on them."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def an_object(*optional: str, **properties: Schema) -> Schema:
    """An object with these properties; those named first may be absent."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def const(value: str) -> Schema:
    return {"const": value}


_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_NUMBER: Schema = {"type": "number"}
_USAGE = an_object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=an_object(cached_tokens=COUNT),
)
_STOP_REASON: Schema = {"type": ["string", "integer"]}
_FUNCTION = an_object(name=TEXT, arguments=TEXT)
_TOLD_CALL = an_object(id=TEXT, type=const("function"), function=_FUNCTION)
_LOGPROB: Schema = an_object(
    "top_logprobs",
    token=TEXT,
    logprob=_NUMBER,
    bytes=array(COUNT),
    top_logprobs=array(an_object(token=TEXT, logprob=_NUMBER, bytes=array(COUNT))),
)
_HEAD = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}

ANSWERS: Schema = {
    "Error": an_object(
        error=an_object(message=TEXT, type=TEXT, param=or_null(TEXT), code=TEXT),
    ),
    "Model": an_object(
        id=TEXT,
        object=const("model"),
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        parent=or_null(TEXT),
        max_model_len=or_null(COUNT),
        status=an_object(
            value={"enum": ["loaded", "loading", "sleeping", "unloaded", "failed", "unknown"]}
        ),
    ),
    "ModelList": an_object(object=const("list"), data=array(ref("Model"))),
    "ChatCompletion": an_object(
        **_HEAD,
        object=const("chat.completion"),
        usage=_USAGE,
        choices=array(
            an_object(
                "stop_reason",
                index=COUNT,
                message=an_object(
                    "reasoning_content",
                    "tool_calls",
                    role=const("assistant"),
                    content=or_null(TEXT),
                    refusal={"type": "null"},
                    reasoning_content=TEXT,
                    tool_calls=array(_TOLD_CALL),
                ),
                logprobs=or_null(an_object(content=array(_LOGPROB), refusal={"type": "null"})),
                finish_reason=_FINISH,
                stop_reason=_STOP_REASON,
            )
        ),
    ),
    "Completion": an_object(
        **_HEAD,
        object=const("text_completion"),
        usage=_USAGE,
        choices=array(
            an_object(
                "stop_reason",
                index=COUNT,
                text=TEXT,
                logprobs=or_null(
                    an_object(
                        tokens=array(TEXT),
                        token_logprobs=array(or_null(_NUMBER)),
                        top_logprobs=array(or_null(mapping(_NUMBER))),
                        text_offset=array(COUNT),
                    )
                ),
                finish_reason=_FINISH,
                stop_reason=_STOP_REASON,
            )
        ),
    ),
    "Output": an_object(output=TEXT),
    "Tokens": an_object(
        count=COUNT,
        max_model_len=or_null(COUNT),
        tokens=array(COUNT),
        token_strs=or_null(array(TEXT)),
    ),
    "Detokenized": an_object(prompt=TEXT),
    "TokenizerInfo": mapping(or_null(TEXT)),
    "Controlled": an_object(code=COUNT, models=mapping(array({"type": "object"}))),
    "IsSleeping": an_object(is_sleeping=FLAG, sleeping=FLAG, models=mapping(FLAG)),
    "Scaled": {"type": "object"},
    "Replicas": {"type": "object"},
    "Health": an_object(
        "models",
        status={"enum": ["healthy", "degraded", "starting", "failed"]},
        serving=COUNT,
        starting=COUNT,
        failed=COUNT,
        models=mapping(TEXT),
    ),
}
