"""Routes that tokenise: vLLM's /tokenize, /detokenize, /tokenizer_info, and Anthropic's count. They wake no model."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from actors.errors import ContextLengthExceeded
from serve_app.front.bodies import MAX_MESSAGE_BYTES
from serve_app.front.endpoints import catalogue
from serve_app.front.endpoints.endpoint import Handler, Handlers
from serve_app.models.registry import ServedModels
from serve_app.openai.growing import to_json
from serve_app.openai.requests import DetokenizeForm, ModelQuery, TokenizeAsk

# Written in a millisecond.
_AT_A_TIME = 4096  # of the elements of a list
_CHARS_AT_A_TIME = 2**18


class Tokenizing:
    """What lm-eval and others ask instead of loading a tokenizer of their own."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def handlers(self) -> Handlers:
        return [
            Handler(catalogue.TOKENIZE, self.tokenize),
            Handler(catalogue.DETOKENIZE, self.detokenize),
            Handler(catalogue.COUNT_TOKENS, self.count_tokens),
            Handler(catalogue.TOKENIZER_INFO, self.tokenizer_info),
        ]

    async def tokenize(self, request: Request, asked: TokenizeAsk) -> Response:
        info = self._models.one(asked.model).info
        token_ids = await info.tokenizer.encode(asked.prompt, asked.add_special_tokens)
        texts = await info.tokenizer.texts(token_ids) if asked.return_token_strs else None
        answer = {
            "count": len(token_ids),
            "max_model_len": info.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
        return await asyncio.to_thread(_answer, answer)

    async def count_tokens(self, request: Request, asked: TokenizeAsk) -> Response:
        tokenizer = self._models.one(asked.model).info.tokenizer
        token_ids = await tokenizer.encode(asked.prompt, asked.add_special_tokens)
        return JSONResponse({"input_tokens": len(token_ids)})

    async def detokenize(self, request: Request, form: DetokenizeForm) -> Response:
        tokenizer = self._models.one(form.model).info.tokenizer
        text = await tokenizer.decode(form.tokens)
        return await asyncio.to_thread(_answer, {"prompt": text})

    async def tokenizer_info(self, request: Request, query: ModelQuery) -> Response:
        info = self._models.one(query.model).info
        return JSONResponse(dict(await info.tokenizer.describe()))


def _answer(answer: Mapping[str, Any]) -> Response:
    """JSON that fits a message to Serve's proxy; it joins pieces that come close together.

    Any thread may write it, and nobody waits for long for the interpreter's lock meanwhile.

    Raises:
        ContextLengthExceeded: it would be too long.
    """
    pieces: list[bytes] = []
    left = MAX_MESSAGE_BYTES
    for piece in _written(answer):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise ContextLengthExceeded(
                f"the answer would take more bytes than the limit, {MAX_MESSAGE_BYTES}: ask for parts"
            )
    return Response(b"".join(pieces), media_type="application/json")


def _written(answer: Mapping[str, Any]) -> Iterator[bytes]:
    """An object, piece by piece: json keeps the interpreter's lock for as long as it writes."""
    for at, (name, value) in enumerate(answer.items()):
        yield (b"," if at else b"{") + to_json(name) + b":"
        if isinstance(value, list | tuple):
            yield b"["
            for begin in range(0, len(value), _AT_A_TIME):
                yield (b"," if begin else b"") + to_json(value[begin : begin + _AT_A_TIME])[1:-1]
            yield b"]"
        elif isinstance(value, str):
            yield b'"'
            for begin in range(0, len(value), _CHARS_AT_A_TIME):
                yield to_json(value[begin : begin + _CHARS_AT_A_TIME])[1:-1]
            yield b'"'
        else:
            yield to_json(value)
    yield b"}"
