"""A model's tokenizer in the front's own process.

Asking a replica would take one: with none running, tokenising would have to start it, and a call that
waits in a replica's queue waits for a wake. The files are on this machine, or it could not serve; without
them there is an error. What reads them brings torch in, which takes seconds and some memory: not before
somebody asks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

from actors.checkpoints.source import ModelSource
from actors.errors import Unavailable
from actors.protocol import Prompt
from actors.text.message_form import ChatConfig

if TYPE_CHECKING:
    from actors.text.codec import TextCodec

T = TypeVar("T")

# For all models together: while a text is tokenised, it takes some 250 times its bytes.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenizers")


class Tokenizer(Protocol):
    """Text to token ids and back, without a replica."""

    async def encode(self, prompt: Prompt, add_special_tokens: bool | None) -> Sequence[int]:
        """As `TextCodec.tokenize`.

        Raises:
            InvalidRequest: the prompt is not for this model.
            Unavailable: there is no checkpoint here.
        """

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens included. Raises as `encode`."""

    async def texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        """The text of each token, U+FFFD where it is no whole character. Raises as `encode`."""

    async def describe(self) -> Mapping[str, str | None]:
        """Special tokens and the chat template. Raises as `encode`."""


class LocalTokenizer:
    """Tokenizer over the checkpoint on this machine; works on threads."""

    def __init__(self, source: ModelSource, chat: ChatConfig | None = None) -> None:
        self._source = source
        self._chat = chat
        self._codec: TextCodec | None = None
        self._loading = asyncio.Lock()

    async def encode(self, prompt: Prompt, add_special_tokens: bool | None) -> Sequence[int]:
        codec = await self._loaded()
        return await _on_thread(
            lambda: codec.tokenize(prompt, add_special_tokens=add_special_tokens)
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        codec = await self._loaded()
        return await _on_thread(lambda: codec.detokenize(token_ids))

    async def texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        codec = await self._loaded()
        return await _on_thread(lambda: [codec.token_text(i) for i in token_ids])

    async def describe(self) -> Mapping[str, str | None]:
        return (await self._loaded()).describe()

    async def _loaded(self) -> "TextCodec":
        async with self._loading:
            if self._codec is None:
                self._codec = await asyncio.to_thread(_load, self._source, self._chat)
        return self._codec


async def _on_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def _load(source: ModelSource, chat: ChatConfig | None) -> "TextCodec":
    from actors.checkpoints.download import CheckpointMissing, find_checkpoint
    from actors.text.codec import TextCodec

    try:
        return TextCodec.load(find_checkpoint(source), chat)
    except CheckpointMissing as exc:
        raise Unavailable("this server has no tokenizer at hand for the model") from exc
