"""A new replica's process, from nothing to its first token, stage by stage.

    python -m serve_app.bench.instance REQUEST

Prints one JSON object. Imports stand inside `main`, because they are one of the stages.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from actors.holder.holder import WeightHolder
    from serve_app.bench.local import HolderActor, Subject

_NAMESPACE = "bench"  # of Ray's actors
_HOLDER = "holder"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """What an instance is to be."""

    checkpoint: str
    source: dict[str, Any]
    dtype: str
    engine: dict[str, Any]
    ray_address: str | None  # None: no holder, so that it loads from disk by itself
    node_address: str
    started_s: float  # when its process was asked for, by the machine's monotonic clock

    def subject(self) -> "Subject":
        from actors.checkpoints.source import ModelSource
        from actors.engine.config import EngineConfig
        from serve_app.bench.local import Subject

        engine = EngineConfig.model_validate(self.engine)
        return Subject(Path(self.checkpoint), ModelSource(**self.source), self.dtype, engine)


def start_holder(kind: "type[WeightHolder]") -> Any:
    """The actor that `holder_of` finds; it lives as long as somebody refers to it."""
    import ray

    return ray.remote(kind).options(name=_HOLDER, namespace=_NAMESPACE).remote()


def holder_of(request: InstanceRequest) -> "HolderActor | None":
    """Joins the Ray that the request names."""
    import ray

    from serve_app.bench.local import HolderActor

    if request.ray_address is None:
        return None
    ray.init(
        address=request.ray_address,
        namespace=_NAMESPACE,
        _node_ip_address=request.node_address,
        log_to_driver=False,
    )
    return HolderActor(ray.get_actor(_HOLDER))


class Stages:
    """Seconds from one mark to the next."""

    def __init__(self, started_s: float) -> None:
        self._last_s = started_s
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now_s = time.monotonic()
        self.seconds[name] = now_s - self._last_s
        self._last_s = now_s


class Timed(Generic[T]):
    """A function, and the seconds that its calls took."""

    def __init__(self, function: Callable[..., T]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any) -> T:
        started_s = time.monotonic()
        try:
            return self._function(*args)
        finally:
            self.seconds += time.monotonic() - started_s


def main() -> None:
    request = InstanceRequest(**json.loads(sys.argv[1]))
    stages = Stages(request.started_s)
    stages.mark("process start")
    result = asyncio.run(_start(request, stages))
    print(json.dumps(result), flush=True)  # noqa: T201  # what the parent reads
    os._exit(0)  # layers may still be compiled in the background, for nobody now


async def _start(request: InstanceRequest, stages: Stages) -> dict[str, Any]:
    from serve_app.process.heap import uncollected

    with uncollected():  # as a replica does
        import ray  # noqa: F401

        from actors.replica.in_process import build_in_process
        from actors.worker.host_image import HostImage
        from actors.worker.model_worker import build_module
        from serve_app.bench.local import LocalModel, load_of

    stages.mark("imports")
    subject = request.subject()
    holder = holder_of(request)
    stages.mark("join Ray")
    module = build_module(subject.checkpoint, subject.dtype, subject.engine.device)
    stages.mark("module")
    load = load_of(subject, holder)
    read_before = read_from_disk()
    image = await load.obtain()
    read_bytes = read_from_disk() - read_before
    stages.mark("bytes")
    # Somewhere in the warm-up; who serves has no use for how long it takes.
    pin = Timed(HostImage.open_link)
    HostImage.open_link = lambda image: pin(image)  # type: ignore[assignment, method-assign]
    model = LocalModel(await build_in_process(module, image, load, subject.engine))
    stages.mark("warm-up")
    await model.runtime.wake()
    answer = await model.ask(model.prompt(), 1)
    stages.mark("first token")
    await model.settled()
    transfer = model.worker.memory.last_transfer
    assert transfer is not None
    return {
        "stages": stages.seconds,
        "token": answer.token_ids[0],
        "image_from": image.origin,
        "weights_bytes": model.worker.memory.weights_bytes,
        "pin_s": pin.seconds,
        "link_s": transfer.seconds,
        "read_bytes": read_bytes,
    }


def read_from_disk() -> int:
    """What this process has made storage deliver so far, in bytes (proc(5), io)."""
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes"))


def request_for(subject: "Subject", with_holder: bool = True) -> InstanceRequest:
    """Asked for now, in the Ray that runs."""
    import ray

    return InstanceRequest(
        checkpoint=str(subject.checkpoint),
        source=subject.source.model_dump(mode="json"),
        dtype=subject.dtype,
        engine=subject.engine.model_dump(mode="json", exclude_unset=True),
        ray_address=ray.get_runtime_context().gcs_address if with_holder else None,
        node_address=ray.util.get_node_ip_address(),
        started_s=time.monotonic(),
    )


def command_of(request: InstanceRequest) -> list[str]:
    return [sys.executable, "-m", __name__, json.dumps(asdict(request))]


class InstanceFailed(Exception):
    """A process did not get to its end; the text is the end of what it said."""


async def finished(command: Sequence[str]) -> dict[str, Any]:
    """What a process prints as its last line, once it has ended. Cancelled, it takes the process with it.

    Raises:
        InstanceFailed: it ended with another exit code than 0.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C is ours to answer
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            log.seek(0)
            text = log.read().decode(errors="replace")[-2000:]
            raise InstanceFailed(f"an instance ended with {process.returncode}: ...{text}")
    found: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
