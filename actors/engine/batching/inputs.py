"""What the device is told of a step: one block of integers, copied at once, and views of it that never move."""

# N tokens of a step, R sequences in it (rows), P parameters of sampling, W blocks of a sequence

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.scheduling import MAX_PROMPTS, Step
from actors.engine.model.paged_step import GatheredView, GroupRows, PagesView, queries_per_program
from actors.engine.sampling.logits import Param
from actors.memory.dlpack import bytes_at
from actors.rounding import cdiv

_UPDATES = 1024  # of the table of blocks, that travel with a step; more go before it
_SLOTS = 2  # on the host: one is written while the other is copied


@dataclass(frozen=True, slots=True)
class StepSize:
    """How large a step is on the device, padding included."""

    tokens: int
    rows: int
    has_prompts: bool


class StepInputs:
    """The block on the host, twice, and on the device.

    One thread fills and uploads. On the device everything happens in the order of one stream, so one copy of it
    is enough there.
    """

    def __init__(
        self,
        cache: KvCache,
        max_tokens: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        """Make one.

        Args:
            max_blocks: of a sequence, where attention reads pages; else 0.
        """
        self._cache = cache
        self._device = device
        self.max_tokens = max_tokens
        self._max_rows = max_rows
        groups, N, R = len(cache.windows), max_tokens, max_rows
        self._head_dim = cache.shape.head_dim
        self._max_tiles = cdiv(N, 64) + MAX_PROMPTS
        self._width = max_blocks
        sizes = {
            "ids": N,
            "positions": N,
            **{f"slots{group}": N for group in range(groups)},
            **dict.fromkeys(("carried", "decode_lengths", "lengths", "places", "last"), R),
            "starts": R + 1,
            "tiles": 2 * self._max_tiles,
            **dict.fromkeys(("update_at", "update_to"), _UPDATES if max_blocks else 0),
            "params": len(Param) * R,
        }
        ends = list(accumulate(sizes.values(), initial=0))
        on_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(ends[-1], dtype=torch.int32, pin_memory=on_cuda) for _ in range(_SLOTS)
        ]
        self._block = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        spans = dict(zip(sizes, pairwise(ends), strict=True))
        self._on_host = [
            {name: host[a:b].numpy() for name, (a, b) in spans.items()} for host in self._hosts
        ]
        self._params = [host[slice(*spans["params"])].view(-1, R) for host in self._hosts]
        found = {name: self._block[a:b] for name, (a, b) in spans.items()}
        self.ids, self.positions = found["ids"], found["positions"]
        self.params = found["params"].view(-1, R)
        self._carried, self._last = found["carried"], found["last"]
        self._slots = [found[f"slots{group}"] for group in range(groups)]
        self._long_slots = [torch.zeros(N, dtype=torch.int64, device=device) for _ in self._slots]
        self._of_pages = found
        self._tables = torch.zeros((max_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self._early: list[Tensor] = []  # updates that found no room in the block
        self._by_kernel, self._slot = False, 0  # of the step that was uploaded last
        self._held: list[list[Tensor]] = [[] for _ in range(_SLOTS)]

    # --- on the host ---

    def params_of(self, slot: int) -> Tensor:
        """Where the parameters of sampling of a step go [P, R]."""
        return self._params[slot]

    def fill(self, step: Step, slot: int, size: StepSize) -> None:
        """Write a step, and what became of the table of blocks since the last one."""
        host, rows = self._on_host[slot], step.rows
        ids: list[int] = []
        for row in rows:
            # One that is on its way from the step before is filled in on the device.
            ids += row.sequence.tokens[row.start : row.end] if row.carried < 0 else (0,)
        starts = list(accumulate((row.count for row in rows), initial=0))
        _write(host["ids"], ids, size.tokens)
        positions = [p for row in rows for p in range(row.start, row.end)]
        _write(host["positions"], positions, size.tokens)
        # Padding writes to the first row of a layer, which is nobody's.
        if not self._width or size.has_prompts:
            for group in range(len(self._slots)):
                _write(host[f"slots{group}"], self._slots_of(step, group), size.tokens)
        _write(host["carried"], [row.carried for row in rows], size.rows, -1)
        _write(host["last"], [end - 1 for end in starts[1:]], size.rows)
        if not self._width:
            return
        lengths = [row.end for row in rows]
        _write(host["decode_lengths"], lengths[: step.num_decoding], size.rows)
        _write(host["places"], [row.sequence.place or 0 for row in rows], size.rows)
        if size.has_prompts:
            _write(host["lengths"], lengths, size.rows)
            _write(host["starts"], starts, size.rows + 1)
            self._write_tiles(host["tiles"].reshape(2, -1), step, size)
        self._write_updates(host)

    def _slots_of(self, step: Step, group: int) -> NDArray[np.int64]:
        """Where the rows of a step's tokens go, in a group of layers."""
        window, page = self._cache.windows[group], self._cache.page_size
        per_block = self._cache.rows_per_block[group]
        found = []
        for row in step.rows:
            blocks = row.sequence.blocks[group]
            if row.count == 1:
                at = row.start % window if window else row.start
                found.append(np.array([blocks[at // page] * per_block + at % page]))
                continue
            at_n = np.arange(row.start, row.end)
            kept_n = at_n
            if window:
                kept_n = at_n % window
            slots = np.asarray(blocks)[kept_n // page] * per_block + kept_n % page
            if window:
                # What a later token of the same step would overwrite is not kept.
                slots[at_n < row.end - window] = 0
            found.append(slots)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _write_tiles(self, tiles: NDArray[np.int32], step: Step, size: StepSize) -> None:
        M = queries_per_program(size.tokens, self._head_dim)
        found = [
            (number, first)
            for number, row in enumerate(step.rows[step.num_decoding :], step.num_decoding)
            for first in range(0, row.count, M)
        ]
        tiles[0] = -1
        if found:
            tiles[:, : len(found)] = np.array(found).T

    def _write_updates(self, host: dict[str, NDArray[np.int32]]) -> None:
        updates = self._cache.written
        at, to = host["update_at"], host["update_to"]
        at[:] = self._max_rows * self._width  # the row behind all places
        if not updates:
            return
        found = np.array(updates, dtype=np.int64)
        updates.clear()
        where, blocks = found[:, 0] * self._width + found[:, 1], found[:, 2]
        # A place may have changed hands meanwhile, and a device writes in any order.
        kept = _last_of_each(where)
        where, blocks = where[kept], blocks[kept]
        if len(kept) > _UPDATES:
            self._early.append(torch.from_numpy(np.stack((where, blocks))[:, _UPDATES:].copy()))
        count = min(len(kept), _UPDATES)
        at[:count], to[:count] = where[:count], blocks[:count]

    # --- on the device ---

    def gathered(self, step: Step) -> GatheredView:
        """An uploaded step for attention that reads no pages."""
        counts = [row.count for row in step.rows]
        groups = []
        for group, window in enumerate(self._cache.windows):
            cached = []
            for row in step.rows:
                first = 0 if window is None else max(0, row.start - window + 1)
                cached.append(self._cache.rows_of(group, row.sequence, range(first, row.start)))
            lengths = [new + len(old) for new, old in zip(counts, cached, strict=True)]
            on_device = self._to_device(torch.cat(cached)).split_with_sizes(
                [len(old) for old in cached]
            )
            groups.append(GroupRows(window, on_device, max(lengths), self._ends(lengths)))
        return GatheredView(counts, self._ends(counts), groups)

    def fresh(self, step: Step, size: StepSize) -> GatheredView:
        """The same, where attention reads pages but the step's sequences have nothing there yet."""
        counts = [row.count for row in step.rows]
        ends = self._of_pages["starts"][: size.rows + 1]
        nothing = [self._long_slots[0][:0]] * len(counts)
        return GatheredView(counts, ends, [GroupRows(None, nothing, max(counts), ends)])

    def _ends(self, counts: list[int]) -> Tensor:
        ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        return self._to_device(ends)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """A copy of what is on the host, which the host does not wait for."""
        if self._device.type != "cuda" or not tensor.numel():
            return tensor.to(self._device)
        pinned = tensor.pin_memory()
        if not self._by_kernel:
            return pinned.to(self._device, non_blocking=True)
        self._held[self._slot].append(pinned)  # nobody else knows that a kernel reads it
        return torch.bitwise_or(_seen_by_device(pinned, self._device), 0)

    def upload(self, slot: int, *, by_kernel: bool) -> None:
        """Enqueue the copy of what was filled.

        Args:
            by_kernel: rather than through the engine that copies: behind the weights of a wake, which go through
                it in the order they were given (seen on an H200), the inputs of the first step would arrive last,
                and nothing would be computed before.
        """
        self._by_kernel, self._slot = by_kernel, slot
        self._held[slot].clear()
        for pairs in self._early:
            where, blocks = self._to_device(pairs)
            self._tables.view(-1).scatter_(0, where, blocks.int())
        self._early.clear()
        host = self._hosts[slot]
        if by_kernel:
            read_by_kernel(host, self._block)
        else:
            self._block.copy_(host, non_blocking=True)

    def settle(self, size: StepSize, newest_R: Tensor) -> None:
        """Complete an uploaded step, in a graph or not: tokens of the step before, table, indices.

        Args:
            newest_R: tokens that the step before gave its rows.
        """
        R = size.rows
        carried_R = self._carried[:R]
        found_R = newest_R.index_select(0, carried_R.clamp(min=0))
        self.ids[:R] = torch.where(carried_R < 0, self.ids[:R], found_R)
        if self._width:
            at, to = self._of_pages["update_at"], self._of_pages["update_to"]
            self._tables.view(-1).scatter_(0, at.long(), to)
        for slots, long in zip(self._slots, self._long_slots, strict=True):
            long[: size.tokens].copy_(slots[: size.tokens])

    def slots(self, size: StepSize) -> list[Tensor]:
        """Where the rows of the tokens go, of each group of layers [N], int64."""
        return [slots[: size.tokens] for slots in self._long_slots]

    def last(self, size: StepSize) -> Tensor:
        """The last token of each row [R], int32."""
        return self._last[: size.rows]

    def pages(self, size: StepSize) -> PagesView:
        """The step for attention that reads pages."""
        found, R = self._of_pages, size.rows
        M = queries_per_program(size.tokens, self._head_dim)
        tiles = found["tiles"].view(2, -1)[:, : cdiv(size.tokens, M) + MAX_PROMPTS]
        return PagesView(
            tables=self._tables,
            places=found["places"][:R],
            decode_lengths=found["decode_lengths"][:R],
            lengths=found["lengths"][:R],
            starts=found["starts"][: R + 1],
            tiles=tiles,
            tile=M,
            has_prompts=size.has_prompts,
        )


def read_by_kernel(pinned: Tensor, target: Tensor) -> None:
    """Copy pinned integers to a device; a plain copy, also between two tensors there, takes the copy engine."""
    torch.bitwise_or(_seen_by_device(pinned, target.device), 0, out=target)


def _seen_by_device(pinned: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a device has it, at the same address.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#unified-virtual-address-space
    """
    assert pinned.is_pinned(), "pageable memory is not the device's"
    flat = bytes_at(pinned.data_ptr(), pinned.nbytes, device)
    return flat.view(pinned.dtype).view(pinned.shape)


def _write(
    target: NDArray[np.int32], values: "Sequence[int] | NDArray[np.int64]", size: int, rest: int = 0
) -> None:
    target[: len(values)] = values
    target[len(values) : size] = rest


def _last_of_each(where: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last index of each value."""
    _, first_from_behind = np.unique(where[::-1], return_index=True)
    return len(where) - 1 - first_from_behind
