"""The cycles that are watched, of a model that is warm."""

from dataclasses import dataclass
from typing import Any

from actors.worker.model_memory import select_driver
from docs.results.report.findings import FINDINGS
from docs.results.timeline.watch import watch_memory, watch_wake
from serve_app.bench.cycle import OurCycles, Way
from serve_app.bench.figures import Progress, Table, facts
from serve_app.bench.local import (
    HolderActor,
    LocalBench,
    Subject,
    build_model,
    compressed_image,
    context_bytes,
    load_of,
)


@dataclass(frozen=True, slots=True)
class Plan:
    prompt_tokens: int = 7
    pause_s: float = 0.5
    compressed: bool = False


class TimelineBench(LocalBench[Plan]):
    """One run. A Ray with room for the image must be up."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        super().__init__(subject, plan)
        self._found: dict[str, Any] = {"timeline": None, "memory": None}

    async def run(self, progress: Progress) -> None:
        plan, found = self._plan, self._found
        meter = select_driver(self._subject.engine.device)
        context_bytes()  # the context first, so that it is part of what was used before
        progress("image", 0, 0)
        model = await build_model(self._subject, load_of(self._subject, HolderActor()))
        try:
            progress("warm-up", 0, 0)
            found["weights_bytes"] = model.worker.memory.weights_bytes
            found["kv_bytes"] = model.worker.memory.kv_bytes
            await model.runtime.wake()
            await model.warm()
            prompt = model.prompt(0, plan.prompt_tokens)
            await OurCycles(model, plan.pause_s).cycle(Way("pipelined"), prompt)
            progress("a wake", 0, 2)
            found["timeline"] = await watch_wake(model, prompt, plan.pause_s)
            if plan.compressed:
                progress("compressing", 0, 0)
                image = await compressed_image(model)
                try:
                    found["compressed"] = await watch_wake(model, prompt, plan.pause_s, image)
                finally:
                    image.link.close()
            progress("memory", 1, 2)
            found["memory"] = await watch_memory(model, meter, prompt, plan.pause_s)
            self.complete = True
        finally:
            await model.close()

    def found(self) -> dict[str, Any]:
        return self._found


def tables(result: dict[str, Any]) -> list[Table]:
    """What is seen on the pictures, in words."""
    told = [(title, finding(result)) for title, finding in FINDINGS["timeline"].values()]
    rows = [(title, text) for title, text in told if text is not None]
    return [facts(rows or [("broken off", "nothing was watched")])]
