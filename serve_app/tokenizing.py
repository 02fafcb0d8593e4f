"""Routes that tokenise: vLLM's /tokenize, /detokenize and /tokenizer_info. They wake no model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.errors import ContextLengthExceeded
from serve_app.bodies import MAX_MESSAGE_BYTES, Bodies, check_travels, query_form
from serve_app.schemas import ModelQuery, parse_detokenize, parse_tokenize
from serve_app.served import ServedModels

_MAX_TEXT_BYTES = 2**20  # its tokens are made and written in this process, in a fifth of a second


class Tokenizing:
    """What lm-eval and others ask instead of loading a tokenizer of their own."""

    def __init__(self, models: ServedModels, bodies: Bodies) -> None:
        """Take what all routes share."""
        self._models = models
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        asked = await self._bodies.read(request, parse_tokenize)
        info = self._models.one(asked.model).info
        check_travels(asked.prompt, _MAX_TEXT_BYTES)
        token_ids = await info.tokenizer.encode(asked.prompt, asked.add_special_tokens)
        texts = await info.tokenizer.texts(token_ids) if asked.return_token_strs else None
        return _answer(
            {
                "count": len(token_ids),
                "max_model_len": info.max_model_len,
                "tokens": list(token_ids),
                "token_strs": texts if texts is None else list(texts),
            }
        )

    async def detokenize(self, request: Request) -> Response:
        form = await self._bodies.read(request, parse_detokenize)
        tokenizer = self._models.one(form.model).info.tokenizer
        return _answer({"prompt": await tokenizer.decode(form.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        info = self._models.one(query_form(request, ModelQuery).model).info
        return JSONResponse(dict(await info.tokenizer.describe()))


def _answer(answer: dict[str, Any]) -> Response:
    """JSON that fits a message to Serve's proxy; it joins pieces that come close together.

    Raises:
        ContextLengthExceeded: it would be too long.
    """
    whole = JSONResponse(answer)
    if len(whole.body) > MAX_MESSAGE_BYTES:
        raise ContextLengthExceeded(
            f"the answer would take {len(whole.body)} bytes; the limit is {MAX_MESSAGE_BYTES}: ask for parts"
        )
    return whole
