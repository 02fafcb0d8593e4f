"""A model in this process, to be evaluated: what a replica has, without HTTP, Serve and lifecycle."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from actors.checkpoints.download import ensure_checkpoint
from actors.errors import ReplicaFailed, WeightsCorrupted
from actors.protocol import GenerateRequest, SamplingParams
from serve_app.bench.eval.evaluate import Passage
from serve_app.bench.eval.perplexity import (
    cut_into_windows,
    greedy_choices,
    log_likelihood,
    perplexity_of,
)
from serve_app.bench.eval.verdict import (
    About,
    Answer,
    FirstToken,
    Perplexity,
    Slept,
    Tokens,
    Woke,
)
from serve_app.bench.figures import Progress
from serve_app.config.model import ModelConfig
from serve_app.replica.in_process import Loaded, load_model

if TYPE_CHECKING:
    import torch

_GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0)


@asynccontextmanager
async def in_process(
    config: ModelConfig, on_progress: Progress
) -> AsyncIterator["InProcessTarget"]:
    """A configured model, awake. Its image is loaded from disk, without a holder.

    Raises:
        Exception: whatever is wrong with checkpoint or configuration, as in a replica.
    """
    checkpoint = await asyncio.to_thread(ensure_checkpoint, config.source)
    loaded = await load_model(config, checkpoint, lambda what: on_progress(what, 0, 0))
    try:
        on_progress("waking for the first time", 0, 0)
        await loaded.halves.runtime.wake()
        await loaded.halves.runtime.settled()
        yield InProcessTarget(config, loaded)
    finally:
        await loaded.halves.close()


class InProcessTarget:
    """Target over a ModelRuntime that is awake."""

    def __init__(self, config: ModelConfig, loaded: Loaded) -> None:
        self.runtime = loaded.halves.runtime
        self.worker = worker = loaded.halves.worker
        seen = worker.memory.residue.last_reading
        self._asleep_bytes = 0  # used at the end of the last sleep
        self.about = About(
            model=config.model_id,
            where="in process",
            device=_name_of_device(worker.memory.device),
            memory_of="process" if worker.memory.device.type == "cpu" else "card",
            weights_bytes=worker.memory.weights_bytes,
            kv_bytes=worker.memory.kv_bytes,
            keep_layers=config.sleep.keep_layers,
            used_bytes=seen.used,
            total_bytes=seen.total,
            image_s=loaded.image_s,
            engine_s=loaded.engine_s,
        )

    async def ask(self, prompt: str, count: int) -> Answer:
        return (await self._ask(prompt, count, asleep=False)).answer

    async def steady(self) -> None:
        """Layers that are compiled in the background take over at some moment."""
        await self.runtime.compiled()
        self.runtime.check_health()

    async def sleep(self, level: Literal[1, 2]) -> Slept:
        started_s = time.perf_counter()
        change = await self.runtime.sleep(level)
        seconds = time.perf_counter() - started_s
        seen = self.worker.memory.residue.last_reading
        assert change.released_bytes is not None
        self._asleep_bytes = seen.used
        return Slept(
            seconds=seconds,
            used_before_bytes=seen.used + change.released_bytes,
            used_bytes=seen.used,
            total_bytes=seen.total,
            released_bytes=change.released_bytes,
            left=change.left,
        )

    async def wake_with(self, prompt: str, count: int) -> FirstToken:
        return await self._ask(prompt, count, asleep=True)

    async def settled(self) -> Woke:
        memory = self.worker.memory
        failure = None
        try:
            await self.runtime.settled()
        except WeightsCorrupted as exc:
            failure = str(exc)
        report = memory.last_wake
        if report is None:
            raise ReplicaFailed("the wake was not settled")
        return Woke(
            used_bytes=memory.residue.last_reading.used,
            reloaded_bytes=memory.residue.last_reading.used - self._asleep_bytes,
            copied_bytes=report.copied_bytes,
            link_s=report.link_s,
            link_gb_per_s=report.link_gb_per_s,
            checked_segments=report.checked_segments,
            checked_bytes=report.checked_bytes,
            check_s=report.check_s,
            intact=report.intact,
            failure=failure,
        )

    async def perplexity(self, passage: Passage, on_progress: Progress) -> Perplexity:
        """Raises ValueError if the passage is too short, or the model finds it impossible."""
        token_ids = self.runtime.codec.encode_prompt(passage.text)
        windows = cut_into_windows(token_ids, self.runtime.worker.facts.max_model_len)
        if not windows:
            raise ValueError(f"{passage.name} has {len(token_ids)} tokens; two are needed at least")
        started_s = time.perf_counter()
        total = 0.0
        for done, window in enumerate(windows):
            on_progress(f"perplexity of {passage.name}", done, len(windows))
            total += await self.worker.with_model(partial(log_likelihood, window=window))
        predicted = sum(len(window) - 1 for window in windows)
        perplexity = perplexity_of(total, predicted)
        if not math.isfinite(perplexity):
            raise ValueError(f"{self.about.model} finds {passage.name} impossible: {perplexity}")
        return Perplexity(
            passage=passage.name,
            window_tokens=len(windows[0]),
            predicted_tokens=predicted,
            log_likelihood=total,
            perplexity=perplexity,
            seconds=time.perf_counter() - started_s,
        )

    async def choices(self, prompt: str, answer: Tokens) -> Tokens:
        assert answer.ids is not None
        prompt_ids = self.runtime.codec.encode_prompt(prompt)
        choose = partial(greedy_choices, prompt=prompt_ids, answer=answer.ids)
        return self._tokens(await self.worker.with_model(choose))

    async def _ask(self, prompt: str, count: int, *, asleep: bool) -> FirstToken:
        # Whatever the checkpoint's defaults: what is compared is what the logits say.
        params = replace(_GREEDY, max_tokens=count, ignore_eos=True)
        runtime, now = self.runtime, time.perf_counter
        text, token_ids = "", list[int]()
        started_s = now()
        prepared = runtime.prepare(GenerateRequest("eval", prompt, params))
        tokenised_s = now()
        if asleep:
            await runtime.wake()
        woke_s = now()
        first_s = 0.0
        async for event in runtime.generate(prepared):
            if not token_ids:
                first_s = now()
            text += event.text
            token_ids += event.token_ids
        answer = Answer(
            text=text,
            tokens=self._tokens(token_ids),
            prompt_tokens=len(prepared.prompt_ids),
            first_s=first_s - started_s,
            seconds=now() - started_s,
        )
        return FirstToken(
            ttft_s=first_s - started_s,
            tokenise_s=tokenised_s - started_s,
            wake_call_s=woke_s - tokenised_s,
            first_token_s=first_s - woke_s,
            answer=answer,
        )

    def _tokens(self, token_ids: Sequence[int]) -> Tokens:
        codec = self.runtime.codec
        return Tokens(texts=tuple(map(codec.token_text, token_ids)), ids=tuple(token_ids))


def _name_of_device(device: "torch.device") -> str:
    import torch

    return "cpu" if device.type == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}"
