"""Routes that tokenise: vLLM's /tokenize, /detokenize and /tokenizer_info. They wake no model."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve_app.bodies import Bodies, check_travels, query_form
from serve_app.schemas import ModelQuery, parse_detokenize, parse_tokenize
from serve_app.served import ServedModels

_PIECE_BYTES = 2**20  # Serve's proxy takes 4 MiB a message from an ingress (2.60)


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
        check_travels(asked.prompt)
        token_ids = await info.tokenizer.encode(asked.prompt, asked.add_special_tokens)
        texts = await info.tokenizer.texts(token_ids) if asked.return_token_strs else None
        return _in_pieces(
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
        return _in_pieces({"prompt": await tokenizer.decode(form.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        info = self._models.one(query_form(request, ModelQuery).model).info
        return JSONResponse(dict(await info.tokenizer.describe()))


def _in_pieces(answer: dict[str, Any]) -> Response:
    """JSON, in several messages where it is long."""
    whole = JSONResponse(answer)
    body = bytes(whole.body)
    if len(body) <= _PIECE_BYTES:
        return whole
    pieces = (body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES))
    return StreamingResponse(pieces, media_type="application/json")
