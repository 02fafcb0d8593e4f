"""Forward pre-hooks that hold a module until its segment's bytes are there."""

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle

from actors.image.layout import Layout


class SegmentGates:
    """Makes the first forward after a wake run right behind the copies.

    A decoder layer waits as a whole; in front of and behind the layers, each module that has tensors
    of its own waits. Hooks are Python: put them in before a forward that is neither captured nor
    compiled, and take them out afterwards.

    Attributes:
        segments: each module that waits, and for which segment.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.segments: dict[nn.Module, int] = {}
        for slot in layout.stored():
            path = layout.segments[slot.segment].layer or slot.name.rpartition(".")[0]
            self.segments[model.get_submodule(path)] = slot.segment
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
