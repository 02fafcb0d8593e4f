"""What an image takes to be made from a checkpoint in the page cache, and to be compressed by a worker afterwards.

python -m docs.results.packing CHECKPOINT --json packing.json

Each round has a Ray of its own, so that no round writes into pages that the store had already.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import ray

from actors.holder.obtain import FastLoad
from actors.image.compressing import try_parts
from actors.image.image import WeightImage
from actors.image.layout import CompressedSegment, ImageKey
from actors.image.store import ByteArray, writable
from actors.protocol import HeldImage
from serve_app.bench.figures import Table, environment
from serve_app.bench.local import (
    LESSEE,
    HolderActor,
    LocalModel,
    Subject,
    build_model,
    local_ray,
    subject_of,
)
from serve_app.cli.bench_run import tell

# Of a raw image's size: it and the compressed one are both there for a moment.
_STORE = 2.0
_ENGINE = {"use_torch_compile": False, "num_blocks": 256}  # nothing is asked of it
_LIMIT_S = 300.0


class Replica:
    """A model that compresses its image when told, not when it is quiet."""

    def __init__(self, subject: Subject, holder: Any) -> None:
        self._subject = subject
        worker = ray.get_runtime_context().current_actor
        self._load = FastLoad(
            HolderActor(holder), subject.request(), subject.checkpoint, LESSEE, worker
        )
        self._model: LocalModel | None = None

    async def start(self) -> None:
        """Return when its image is there, and what compresses it has run once, as of a worker that has decided to."""
        self._model = await build_model(self._subject, self._load)
        try_parts(self._image, self._model.worker.memory.device)

    @property
    def _image(self) -> WeightImage:
        assert self._model is not None
        image = self._model.worker.memory.image
        assert image is not None
        return image

    async def compress(self) -> float:
        """How long it took, in seconds.

        Raises:
            RuntimeError: it is not compressed.
        """
        started_s = time.monotonic()
        if not await self._load.compress(self._image.manifest.key):
            raise RuntimeError("the image is not compressed: its holder's log says why")
        return time.monotonic() - started_s

    async def compressed_segment(
        self, key: ImageKey, index: int, view: ByteArray, offset: int, size: int
    ) -> CompressedSegment | None:
        """As of a worker's actor."""
        assert self._model is not None
        out = writable(view, offset, size)
        return await self._model.worker.compressed_segment(key, index, out)


def one_round(subject: Subject) -> dict[str, Any]:
    """Make an image and compress it, in the Ray that runs."""
    holder = HolderActor().actor
    actor: Any = ray.remote(Replica)
    replica = actor.options(num_cpus=1).remote(subject, holder)
    ray.get(replica.start.remote(), timeout=_LIMIT_S)
    (raw,) = _held(holder)
    compress_s: float = ray.get(replica.compress.remote(), timeout=_LIMIT_S)
    (compressed,) = _held(holder)
    return {
        "raw_bytes": raw.bytes,
        "raw_s": raw.load_s,
        "compressed_bytes": compressed.bytes,
        "compress_s": compress_s,
        "made_of_raw": (raw.load_s + compress_s) / raw.load_s,
    }


def _held(holder: Any) -> list[HeldImage]:
    found: list[HeldImage] = ray.get(holder.stats.remote(), timeout=_LIMIT_S)
    return found


def tables(result: dict[str, Any]) -> list[Table]:
    """One row a round."""
    rows = [
        (
            str(number),
            f"{found['raw_bytes'] / 1e9:.2f} GB",
            f"{found['raw_s']:.2f}",
            f"{found['compressed_bytes'] / 1e9:.2f} GB",
            f"{found['compress_s']:.2f}",
            f"{found['made_of_raw']:.2f} x",
        )
        for number, found in enumerate(result["rounds"], 1)
    ]
    names = ("round", "raw", "made in s", "compressed", "in s more", "both, of raw")
    return [Table(names, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    subject = subject_of(asked.checkpoint, {"device": asked.device}, _ENGINE)
    for file in subject.checkpoint.glob("*.safetensors"):
        file.read_bytes()  # whatever disk it lies on
    rounds: list[dict[str, Any]] = []
    result = {"checkpoint": subject.checkpoint.name, **environment(), "rounds": rounds}
    code = 0
    for _ in range(asked.rounds):
        with local_ray(int(_STORE * subject.store_bytes)):
            rounds.append(one_round(subject))
        code = tell(result, tables(result), asked.json)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
