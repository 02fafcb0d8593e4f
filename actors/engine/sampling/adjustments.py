"""Penalties and biased tokens of the sequences that are running, in tables on the device.

A sequence gets a place in a table when it is first scheduled, and its row is written once. From then on
each step counts the token that it was computed from, on the device. The row is written anew when what
was counted is not what comes before the step's token: after a requeue, after a sleep, after a step that
failed.
"""

# S places, V vocabulary, W entries of a place, N tokens

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.rounding import next_power_of_2

_FEWEST = 16  # places, and entries of one: a table grows in powers of two


class Adjusted(Protocol):
    """What the tables take from a sequence."""

    counted_prompt: Tensor | None  # int64, tokens that a penalty finds in the prompt
    biased: Tensor | None  # int32 [3, W], a row as `actors.engine.sampling.logits.adjust` has it
    output_ids: list[int]


@dataclass(slots=True)
class Place:
    """A row of a table; belongs to a sequence as long as that lives, or until others need it more."""

    number: int
    owner: "weakref.ref[Adjusted]"
    step: int  # that needed it last
    position: int | None = None  # tokens of the output that it counts; None before it is written


class Places:
    """Who has which row of a table. Host only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: list[Place] = []
        self._of: dict[int, Place] = {}  # by id of the owner
        self._step = 0

    @property
    def rows(self) -> int:
        """Of a table with room for all places, and some that may follow."""
        return max(len(self._places), min(self._limit, _power_of_two(len(self._places))))

    def begin_step(self) -> None:
        self._step += 1

    def of(self, sequence: Adjusted) -> Place:
        """The sequence's place, a new one if it has none; nobody else's in this step."""
        place = self._of.get(id(sequence))
        if place is None or place.owner() is not sequence:
            place = self._new(sequence)
        place.step = self._step
        return place

    def forget(self) -> None:
        """All rows have to be written anew."""
        for place in self._places:
            place.position = None

    def _new(self, sequence: Adjusted) -> Place:
        place = min(self._places, key=_worth, default=None)
        is_needed = place is not None and place.owner() is not None
        if place is None or (
            is_needed and (place.step == self._step or len(self._places) < self._limit)
        ):
            place = Place(len(self._places), weakref.ref(sequence), self._step)
            self._places.append(place)
        else:
            self._of = {key: other for key, other in self._of.items() if other is not place}
            place.owner, place.position = weakref.ref(sequence), None
        self._of[id(sequence)] = place
        return place


def _worth(place: Place) -> tuple[bool, int]:
    return place.owner() is not None, place.step


class CountTable:
    """How often each token came, of the sequences with penalties."""

    def __init__(self, limit: int) -> None:
        self.places = Places(limit)
        self.counts_SV: Tensor | None = None

    def free(self) -> None:
        """Give the memory back; what is needed again is written anew."""
        self.places.forget()
        self.counts_SV = None

    def prepare(
        self, rows: Sequence[tuple[Place, Adjusted, int]], vocab_size: int, device: torch.device
    ) -> Tensor:
        """The table, with all of each row's output but the newest token; `adjust` adds that.

        Args:
            rows: with how many tokens each has generated.
        """
        rows_needed = self.places.rows
        if self.counts_SV is None or len(self.counts_SV) < rows_needed:
            self.free()
            self.counts_SV = torch.empty(
                (rows_needed, vocab_size), dtype=torch.int32, device=device
            )
        counts_SV = self.counts_SV
        stale = [row for row in rows if row[0].position is None or row[0].position != row[2] - 1]
        if stale:
            for place, _, _ in stale:
                place.position = None  # it may fail halfway
            _write_counts(counts_SV, stale)
        for place, _, generated in rows:
            place.position = generated
        return counts_SV


class BiasTable:
    """Tokens that are favoured, disfavoured or forbidden, of the sequences that have any."""

    def __init__(self, limit: int) -> None:
        self.places = Places(limit)
        self.bias_S3W: Tensor | None = None

    def free(self) -> None:
        """Give the memory back; what is needed again is written anew."""
        self.places.forget()
        self.bias_S3W = None

    def prepare(self, rows: Sequence[tuple[Place, Adjusted]], device: torch.device) -> Tensor:
        """The table, with these rows written."""
        new = [row for row in rows if row[0].position is None]
        if not new and self.bias_S3W is not None:
            return self.bias_S3W
        rows_needed = self.places.rows
        entries = max(_entries(sequence).size(1) for _, sequence in rows)
        width = _power_of_two(entries)
        table = self.bias_S3W
        if table is None or len(table) < rows_needed or table.size(2) < width:
            self.free()
            width = max(width, 0 if table is None else table.size(2))
            table = torch.empty((rows_needed, 3, width), dtype=torch.int32, device=device)
            self.bias_S3W = table
            new = list(rows)
        rows_N3W = torch.stack([_filled(_entries(sequence), table.size(2)) for _, sequence in new])
        numbers_N = torch.tensor([place.number for place, _ in new])
        table[_to(numbers_N, device)] = _to(rows_N3W, device)
        for place, _ in new:
            place.position = 0
        return table


def _write_counts(counts_SV: Tensor, rows: Sequence[tuple[Place, Adjusted, int]]) -> None:
    """Count prompts and outputs of some rows, all but the newest token."""
    device, V = counts_SV.device, counts_SV.size(1)
    prompts, outputs = [], []
    for place, sequence, generated in rows:
        known = max(generated - 1, 0)
        assert known <= len(sequence.output_ids), "the host lacks the newest token at most"
        if sequence.counted_prompt is not None:
            prompts.append(sequence.counted_prompt + place.number * V)
        output_ids = torch.tensor(sequence.output_ids[:known], dtype=torch.int64)
        outputs.append(output_ids + place.number * V)
    numbers_N = torch.tensor([place.number for place, _, _ in rows])
    counts_SV.index_fill_(0, _to(numbers_N, device), 0)
    if prompts:
        counts_SV.view(-1).scatter_(0, _to(torch.cat(prompts), device), 1)
    output_N = _to(torch.cat(outputs), device)
    twice_N = torch.full_like(output_N, 2, dtype=torch.int32)
    counts_SV.view(-1).scatter_add_(0, output_N, twice_N)


def _entries(sequence: Adjusted) -> Tensor:
    assert sequence.biased is not None, "has no place among the biased"
    return sequence.biased


def _filled(entries_3W: Tensor, width: int) -> Tensor:
    """Filled up with its first entry."""
    padding = entries_3W[:, :1].expand(3, width - entries_3W.size(1))
    return torch.cat((entries_3W, padding), 1)


def _power_of_two(number: int) -> int:
    return max(_FEWEST, next_power_of_2(number))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """The same on a device, without waiting: only page-locked memory is copied behind one's back."""
    if device.type == "cuda" and tensor.numel() > 0:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
