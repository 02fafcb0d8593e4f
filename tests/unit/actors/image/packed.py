"""Small images that no checkpoint was made into."""

import random
from dataclasses import dataclass

from actors.image.image import digest, private_buffers
from actors.image.layout import Checksum, ImageKey, Layout, Manifest, Segment, TensorSlot

SIZES = (3 * 4096 + 256, 256, 8192, 2 * 4096 - 256)


@dataclass(frozen=True, slots=True)
class Packed:
    manifest: Manifest
    payloads: list[memoryview]

    @property
    def contents(self) -> list[bytes]:
        return [bytes(payload) for payload in self.payloads]


def packed(name: str = "model", sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Packed:
    payloads = blank(sizes)
    for number, payload in enumerate(payloads):
        payload[:] = random.Random(seed + number).randbytes(payload.nbytes)
    slot = TensorSlot("w", "parameter", "bfloat16", (2, 64), 0, 0, 256, alias_of=None)
    layout = Layout(tuple(Segment(f"s{i}", size) for i, size in enumerate(sizes)), (slot,))
    return Packed(
        Manifest(
            ImageKey(f"/models/{name}", "1", "bfloat16"),
            layout,
            tuple(digest(payload) for payload in payloads),
            (Checksum(1, -2),) * len(sizes),
        ),
        payloads,
    )


def blank(sizes: tuple[int, ...] = SIZES) -> list[memoryview]:
    """At pages."""
    return private_buffers(sizes)
