"""One cycle of a model of this process: it sleeps, is left alone, wakes for a request, and answers as before."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from actors.memory.driver import HostLink
from actors.worker.host_image import PreparedImage
from actors.worker.model_memory import ModelMemory
from serve_app.bench.local import ANSWER_TOKENS, LocalModel, Prompt, device_bytes

Cycle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Way:
    """How our model wakes: pipelined, unless something is said here."""

    name: str
    kept: frozenset[int] = frozenset()  # segments that stay on the device
    waits: bool = False  # for all bytes, before the first forward
    compressed: bool = False  # from another copy of the image
    unpinned: bool = False  # through staging buffers, as where the image cannot be pinned


class OurCycles:
    """Cycles of our model; each begins and ends awake."""

    def __init__(self, model: LocalModel, pause_s: float) -> None:
        self.model = model
        self._pause_s = pause_s
        self._expected: dict[Prompt, tuple[int, ...]] = {}
        self.first_sleep_s: float | None = None
        self.unpinned: HostLink | None = None
        self.compressed: PreparedImage | None = None

    async def cycle(self, way: Way, prompt: Prompt) -> tuple[Cycle, bool]:
        """Sleep, pause, wake, one token; then what the wake had still to do, and 50 tokens.

        Returns:
            The times, and whether the tokens are those of the prompt's first cycle.
        """
        runtime, worker = self.model.runtime, self.model.worker
        worker.memory.kept = way.kept
        started_s = time.perf_counter()
        slept = await runtime.sleep(1)
        slept_s = time.perf_counter() - started_s
        self.first_sleep_s = self.first_sleep_s or slept_s
        asleep_bytes = device_bytes()
        assert slept.left is not None
        await asyncio.sleep(self._pause_s)
        with (
            carried_by(worker.memory, self.unpinned if way.unpinned else None),
            looking_at(worker.memory, self.compressed if way.compressed else None),
        ):
            started_s = time.perf_counter()
            woke = await runtime.wake()
            if way.waits:
                await asyncio.to_thread(_finish_copies)
            woke_s = time.perf_counter() - started_s
            first = await self.model.ask(prompt, 1)
            started_s = time.perf_counter()
            await self.model.settled()
        settled_s = time.perf_counter() - started_s
        stats = worker.memory.last_transfer
        assert stats is not None
        assert stats.size == woke.copied_bytes
        cycle = {
            "ttft_asleep_s": woke_s + first.first_s,
            "wake_s": woke_s,
            "sleep_s": slept_s,
            "settle_s": settled_s,
            "link_s": stats.seconds,
            "move_s": stats.seconds,
            "moved_bytes": woke.copied_bytes,
            "released_bytes": slept.released_bytes or 0,
            "left_bytes": slept.left.total,
            "context_bytes": slept.left.context,
            "asleep_bytes": asleep_bytes,
        }
        rest = await self.model.ask(prompt, ANSWER_TOKENS)
        tokens = first.token_ids + rest.token_ids
        return cycle, tokens == self._expected.setdefault(prompt, tokens)


class Crowd:
    """Requests that wait for a wake together; their answers are compared with those of the first time.

    Only waiting requests make the same batches every time, so that tokens can be compared.
    """

    def __init__(self, model: LocalModel, requests: int) -> None:
        self._model = model
        self._prompts = [model.prompt(number) for number in range(requests)]
        self._expected: list[tuple[int, ...]] = []
        self.compared = self.wrong = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    async def wake(self) -> None:
        """Wake a model that is asleep, and compare; the first time counts, too."""
        answers = await self._model.wake_with(self._prompts, ANSWER_TOKENS)
        found = [answer.token_ids for answer in answers]
        self._expected = self._expected or found
        self.compared += len(found)
        self.wrong += sum(a != b for a, b in zip(found, self._expected, strict=True))


@contextmanager
def carried_by(memory: ModelMemory, link: HostLink | None) -> Iterator[None]:
    """Have wakes of the body use another link to the same image; None: the one they have.

    Nothing of ours chooses a link, so that this reaches into the memory; only while it sleeps.
    """
    if link is None:
        yield
        return
    usual, memory.host.link = memory.host.link, link
    try:
        yield
    finally:
        memory.host.link = usual


@contextmanager
def looking_at(memory: ModelMemory, image: PreparedImage | None) -> Iterator[None]:
    """Have wakes of the body use another copy of the image; None: the one they have. Only while it sleeps."""
    if image is None:
        yield
        return
    usual, link = memory.image, memory.exchange(image)
    assert usual is not None
    assert link not in (None, image.link)
    try:
        yield
    finally:
        memory.exchange(PreparedImage(usual, link))


def _finish_copies() -> None:
    """Return when the device has what was sent to it. On a CPU it arrived with the call."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
