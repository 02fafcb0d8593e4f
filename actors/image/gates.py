"""What holds a module of the model until its segment's bytes are there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from actors.image.layout import Layout

_CPU = torch.device("cpu")


class SegmentGates:
    """Makes the first forward after a wake run right behind the copies.

    A decoder layer waits as a whole; in front of and behind the layers, each module that has tensors
    of its own waits. Hooks are Python: they hold a forward that is neither replayed nor compiled, and go behind it.
    A captured forward waits for events by itself, whenever it is replayed.

    Attributes:
        segments: each module that waits, and for which segment.
        arrivals: on CUDA, an event for each segment, to be recorded behind its bytes; elsewhere none.
    """

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device = _CPU) -> None:
        """Nothing waits yet.

        Args:
            device: which the model is on.
        """
        self.segments: dict[nn.Module, int] = {}
        for slot in layout.stored():
            path = layout.segments[slot.segment].layer or slot.name.rpartition(".")[0]
            self.segments[model.get_submodule(path)] = slot.segment
        self.arrivals: list[torch.cuda.Event] = []
        if device.type == "cuda":
            for _ in layout.segments:
                event = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))  # there is none before
                self.arrivals.append(event)
        self._handles: list[RemovableHandle] = []

    def install(self, gate: Callable[[int], None]) -> None:
        """Call `gate` with a module's segment before each of its forwards."""
        assert not self._handles, "installed already"
        for module, segment in self.segments.items():

            def hold(module: nn.Module, args: object, segment: int = segment) -> None:
                gate(segment)

            # In front of other hooks: who watches a module sees it begin when its bytes are there.
            self._handles.append(module.register_forward_pre_hook(hold, prepend=True))

    def remove(self) -> None:
        """A forward that runs meanwhile on another thread may still call the gate."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Have a forward that is captured meanwhile wait for `arrivals`: for what was last recorded before a replay."""
        self.install(lambda segment: torch.cuda.current_stream().wait_event(self.arrivals[segment]))
        try:
            yield
        finally:
            self.remove()
