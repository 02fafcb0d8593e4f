"""Log-probabilities of prompts, in pieces between the engine's steps."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from functools import partial

import torch
from transformers import PreTrainedModel

from actors.engine.model.plain import PromptLogprobs, longest_prompt
from actors.engine.outputs import RawLogprob
from actors.errors import DeviceMemoryShort, EngineDied, ReplicaFailed, Unavailable
from actors.memory.driver import gib
from actors.threads import submit_unless_closed

_WHAT = "a prompt's log-probabilities"


class PromptScoring:
    """Scores one prompt at a time; lives on the event loop, `drop` apart.

    Between two pieces the engine has as long as a piece took, if it has anything to do, and whatever else
    the control thread is to do comes in between. A sleep takes the keys and values; the prompt is
    scored from its beginning after the wake.

    Attributes:
        awake: set by a wake, cleared before a sleep begins.
    """

    def __init__(
        self,
        with_model: Callable[[Callable[[PreTrainedModel], float]], Awaitable[float]],
        spare_bytes: Callable[[], int],
        control: Executor,
        watch: AbstractContextManager[None],
        is_busy: Callable[[], bool],
        fail: Callable[[Exception, str], None],
    ) -> None:
        """Make an idle one.

        Args:
            with_model: of the runtime.
            spare_bytes: what the device has free beside the model; called while nothing runs.
            control: of the one thread on which `with_model` works.
            watch: entered for as long as a piece takes, there.
            is_busy: whether the engine has anything to do.
            fail: told what went wrong, and during what, if the device can be trusted no more.
        """
        self.awake = asyncio.Event()
        self._with_model = with_model
        self._spare_bytes = spare_bytes
        self._control = control
        self._watch = watch
        self._is_busy = is_busy
        self._fail = fail
        self._turn = asyncio.Lock()
        self._on_device: set[PromptLogprobs] = set()  # used on the control thread only

    async def score(self, token_ids: Sequence[int], top: int) -> list[RawLogprob | None]:
        """The log-probability of each token given those before, and of the `top` likeliest in its place.

        Cancelled, it ends with the piece that is being computed.

        Raises:
            Unavailable: the model is asleep. A sleep that comes later is waited for.
            DeviceMemoryShort: the device has no room for the prompt's keys and values.
            ReplicaFailed: the device failed; everybody has been told.
        """
        if not self.awake.is_set():
            raise Unavailable("the model is asleep; wake it first")
        async with self._turn:
            prompt = PromptLogprobs(token_ids, top)
            try:
                while not prompt.done:
                    await self.awake.wait()
                    try:
                        taken_s = await self._with_model(partial(self._advance, prompt))
                    except DeviceMemoryShort:
                        raise
                    except Unavailable:
                        continue  # asleep since
                    except ReplicaFailed as exc:
                        self._fail(exc, _WHAT)
                        raise
                    except RuntimeError as exc:  # torch's for any CUDA error
                        self._fail(exc, _WHAT)
                        raise EngineDied(f"{_WHAT} went wrong: {type(exc).__name__}") from exc
                    if not prompt.done and self._is_busy():
                        await asyncio.sleep(taken_s)
                return prompt.found
            finally:
                # Behind the piece that may still be computed.
                submit_unless_closed(self._control, self.drop, "a prompt was scored")

    def drop(self) -> None:
        """Give back what prompts have on the device. On the control thread."""
        for prompt in self._on_device:
            prompt.drop()
        self._on_device.clear()

    def _advance(self, prompt: PromptLogprobs, model: PreTrainedModel) -> float:
        """One piece; returns the seconds that it took."""
        started_s = time.perf_counter()
        with self._watch:
            if prompt not in self._on_device:
                self._check_room(model, prompt)
                self._on_device.add(prompt)
            try:
                prompt.advance(model)
            except torch.OutOfMemoryError as exc:
                prompt.drop()
                raise _short(len(prompt.token_ids), "the device is full") from exc
        return time.perf_counter() - started_s

    def _check_room(self, model: PreTrainedModel, prompt: PromptLogprobs) -> None:
        spare_bytes = max(0, self._spare_bytes())
        longest = longest_prompt(model, spare_bytes)
        if len(prompt.token_ids) > longest:
            raise _short(
                len(prompt.token_ids),
                f"beside weights and KV cache {gib(spare_bytes)} are free, enough for {longest}",
            )


def _short(tokens: int, reason: str) -> DeviceMemoryShort:
    return DeviceMemoryShort(
        f"no memory for the log-probabilities of a prompt of {tokens} tokens (echo): {reason}"
    )
