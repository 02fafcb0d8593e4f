"""Steps replayed from CUDA graphs, of decoding sequences alone and with prompts among them."""

# N tokens of a step, R sequences in it (rows), V vocabulary

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.inputs import StepInputs, StepSize
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.runner import Runner
from actors.engine.batching.scheduling import Row, Step
from actors.engine.batching.sequence import LoopSequence
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.model.first_layers import FirstLayers
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.memory import whole_device, workspaces
from actors.memory.driver import AllocatorPool
from actors.text.sampling_defaults import ResolvedSampling

logger = logging.getLogger(__name__)

# Tokens from which on a step without a graph runs compiled. Below, the guards of a compiled layer take
# the host longer than the launches that it saves.
_MANY = 1024

# Bytes for cuBLAS, which takes 32 MiB on Hopper and less before (torch's CUDABlas).
_WORKSPACE = 2**26
# Hidden states that a compiled layer holds on to beyond what it holds otherwise, where attention breaks its graph.
_HELD_STATES = 4


class GraphRunner(Runner):
    """A runner on CUDA that replays what it can.

    A graph holds the model alone, for a number of tokens and with or without prompts among them: which tokens are
    whose is in the inputs. Sampling follows eagerly: the host enqueues it while the device is still busy with the
    graph, so the device need not wait; a step pays for what its sequences ask for and no more, and may ask for
    what needs tensors from the host (penalties, log-probabilities).

    Graphs read and write fixed addresses of weights and KV cache, so `launch` and `capture` need both mapped.
    A step without a graph runs eagerly, with the same result.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        inputs: StepInputs,
        sampler: BatchSampler,
        max_rows: int,
        *,
        in_pages: bool,
        costs: StepCosts | None,
        sizes: Sequence[int],
        by_need: bool,
        layers: CompiledLayers | None,
        pool: AllocatorPool | None,
        held: Callable[[], AbstractContextManager[None]] | None,
    ) -> None:
        """Make a runner.

        Args:
            sizes: tokens that steps with prompts are padded to, ascending; none has no graphs at all.
            by_need: capture few sizes at first, and another once a step has it, on the way. A capture takes the host
                some 60 ms of a 7B model, so a start is more than a second shorter.
            layers: of the model, to be compiled later on.
            pool: what the graphs compute in; torch's own when None. To be mapped whenever one of them
                runs, and while they are captured.
            held: what is captured meanwhile has its weights waited for whenever it is replayed. None: no weights are
                on their way during a replay.
        """
        super().__init__(
            model, cache, inputs, sampler, max_rows, in_pages=in_pages, costs=costs, sizes=sizes
        )
        self._by_need = by_need
        self._layers = layers
        self._pool = pool
        self._held = held
        self._graph_pool: tuple[int, int] | None = None  # of the last `capture`
        # One for nothing else: cuBLAS's workspace of a thread on it comes out of the graphs' pool, with
        # the first of them, and not from where it would be given back.
        self._capture_stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._compiled = False  # the layers, for the graphs that there are
        self._graphs: dict[StepSize, torch.cuda.CUDAGraph] = {}
        self._uncaptured: set[StepSize] = set()  # until a step has that size
        self._may_capture = False  # no hooks hold the model's modules
        self._has_captured = False  # in the step that is being launched
        self._has_new_graphs = False
        self._is_gated = False  # the next step
        # What all graphs write: the output of the largest, which is captured first.
        self._logits_RV: Tensor | None = None

    def expect_gates(self) -> None:
        """Run the next step so that it can begin before its weights are there.

        That is a graph that waits for them by itself, or module by module: hooks hold these.
        """
        self._is_gated = True
        self._may_capture = False

    def end_gates(self) -> None:
        """The hooks are out. Any thread may call."""
        self._may_capture = True

    def has_new_graphs(self) -> bool:
        """Whether steps had some captured since this was asked before."""
        has_new, self._has_new_graphs = self._has_new_graphs, False
        return has_new

    def launch(self, step: Step) -> None:
        self._has_captured = False
        super().launch(step)
        if self._is_gated or self._has_captured:
            # How long weights or a capture took is no cost of a step.
            self._launched[-1].begun = None
        self._is_gated = False

    # --- steps ---

    def _upload(self, slot: int, *, by_kernel: bool = False) -> None:
        # The weights' copies are under way.
        super()._upload(slot, by_kernel=by_kernel or self._is_gated)

    def _logits(self, step: Step, size: StepSize) -> Tensor:
        if size in self._uncaptured and self._may_capture and not self._is_gated:
            self._capture_on_the_way(size)
        graph = self._graphs.get(size)
        if graph is not None and (self._waits(size) or not self._is_gated):
            graph.replay()
            assert self._logits_RV is not None
            return self._logits_RV
        self._choose_layers(size)
        return super()._logits(step, size)

    def _waits(self, size: StepSize) -> bool:
        """Whether a graph of that size waits for its weights. Steps of decoding sequences alone rarely come first."""
        return self._held is not None and size.has_prompts

    def _choose_layers(self, size: StepSize) -> None:
        if self._layers is not None:
            is_padded = size in self.padded_sizes
            self._layers.active = self._compiled and (is_padded or size.tokens >= _MANY)

    # --- capture ---

    def capture(self) -> None:
        """Capture graphs of every size, or of some, see `by_need`, and load what all steps need.

        Those of an earlier capture go. Weights, KV cache and pool must be mapped; their contents do
        not matter. The cache must be empty, and no step may be in flight.
        """
        started_s = time.perf_counter()
        self._graphs.clear()
        self._logits_RV = None
        self._is_gated = False
        self._uncaptured = set(self.padded_sizes) - self._first_sizes()
        # Torch's own goes with the last graph in it, so each capture has another.
        self._graph_pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool.id
        with workspaces.in_use(), torch.no_grad():
            self._run_longest_prompt()
            layers = None if self._compiled else self._layers
            # Layers are alike, but compiled ones may be guarded each by itself.
            first = None if self._compiled else FirstLayers(self.model)
            with nullcontext() if layers is None else layers.recording():
                # First without a graph: nothing may compile or load while one is captured.
                with nullcontext() if first is None else first.alone():
                    taken = [self._run_padding(size) for size in self.padded_sizes]
                self._reserve(max(taken, default=0))
                for size in self.padded_sizes:
                    if size not in self._uncaptured:
                        with whole_device.left_alone():
                            self._capture_size(size)
            whole_device.synchronize()
        seconds = time.perf_counter() - started_s
        logger.info("captured %d graphs in %.1f s", len(self._graphs), seconds)

    @property
    def compiles(self) -> bool:
        """Whether there is anything for `compile` to do."""
        return self._layers is not None and not self._compiled

    def compile(self) -> None:
        """See CompiledLayers.compile; after a `capture`."""
        assert self._layers is not None, "nothing to compile"
        # Who tries kernels out waits for the device.
        with workspaces.in_use(), whole_device.awaited(), _short_of_memory():
            self._layers.compile()

    def use_compiled(self) -> None:
        """Run the layers compiled from now on; under the conditions of `capture`."""
        assert self._layers is not None, "nothing was compiled"
        if not self._compiled:  # it may be a second try to capture
            self._layers.install()
        self._compiled = True
        self.capture()

    def _first_sizes(self) -> set[StepSize]:
        """What `capture` captures: the largest, whose output all others write to, and what the first answer takes.

        Compiled layers are captured when nobody is served, so then it may take its time.
        """
        sizes = self.padded_sizes
        if not self._by_need or self._compiled or not sizes:
            return set(sizes)
        return {sizes[0], self._decode_size(1), self._prompt_size(self._sizes[0])}

    def _capture_on_the_way(self, size: StepSize) -> None:
        """Waits for the device. With a later step of that size, if others wait for it now; never, if memory is short."""
        with whole_device.left_alone(blocking=False) as is_alone:
            if is_alone:
                self._capture_alone(size)

    def _capture_alone(self, size: StepSize) -> None:
        self._uncaptured.remove(size)
        self._has_captured = self._has_new_graphs = True
        started_s = time.perf_counter()
        try:
            self._capture_size(size)
        except torch.OutOfMemoryError as exc:
            logger.warning("no graph of %s: %s", size, exc)
            return
        seconds = time.perf_counter() - started_s
        logger.info("captured a graph of %s in %.3f s", size, seconds)

    def _run_longest_prompt(self) -> None:
        """A prompt as long as a step, and a token behind it: nothing is loaded later on."""
        count = min(self.cache.longest_sequence, self.inputs.max_tokens)
        sampling = SequenceSampling(ResolvedSampling(temperature=0.0), (0,) * count, 0)
        sequence = LoopSequence("", sampling, count + 1)
        if not self.cache.admit(sequence, spare=0):
            return  # what is mapped now has no room for it
        step = Step((Row(sequence, 0, count, True, -1, 0),), int(count == 1))
        try:
            for is_first in (True, False):
                self.launch(step)
                if is_first:
                    self._launched[-1].begun = None  # what is loaded now is no cost of a step
                self.read()
        finally:
            whole_device.synchronize()
            self.cache.release(sequence)
            self.cache.reset()

    def _reserve(self, size: int) -> None:
        """Have the pool hold so many bytes in one piece, beside what cuBLAS takes."""
        if self._pool is not None and size:
            with torch.cuda.stream(self._capture_stream):
                self._pool.reserve(size + _WORKSPACE)

    def _run_padding(self, size: StepSize) -> int:
        """Run a step of padding without a graph; what its graph may take, sampling included, however layers are run."""
        self.inputs.fill(Step((), 0), 0, size)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with self._on_stream():
            self.inputs.upload(0, by_kernel=False)
            logits_RV = self._padding(size)
            self._sampler.prepare([], self.inputs.params_of(0))
            self._sampled(logits_RV[: size.rows], size)
            del logits_RV
        whole_device.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        if self._layers is None or self._compiled:
            return taken
        config = self.model.config.get_text_config()
        states = size.tokens * int(config.hidden_size) * self.model.dtype.itemsize
        return taken + _HELD_STATES * states

    def _padding(self, size: StepSize) -> Tensor:
        self._choose_layers(size)
        self.inputs.settle(size, self._newest_R)
        return self._forward(self._pages(size), size)

    def _capture_size(self, size: StepSize) -> None:
        # A thread that captures cannot make one, and this may be its first work.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        try:
            # A capture that fails as it begins or ends leaves its stream current: torch puts back the one before only
            # when all went well.
            with (
                _short_of_memory(),
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(
                    graph,
                    pool=self._graph_pool,  # type: ignore[arg-type]  # annotated int, is a handle
                    stream=self._capture_stream,
                    capture_error_mode="thread_local",  # other threads may use the device meanwhile
                ),
                self._held() if self._held is not None and self._waits(size) else nullcontext(),
            ):
                logits_RV = self._padding(size)
                if self._logits_RV is None:
                    self._logits_RV = logits_RV
                else:
                    self._logits_RV[: len(logits_RV)].copy_(logits_RV)
        except RuntimeError as exc:
            if "captur" not in str(exc):  # the driver's words, and torch's
                raise
            raise RuntimeError(
                f"no CUDA graph can hold a forward of {type(self.model).__name__}, which has the host wait "
                "for the device; set engine.use_cuda_graphs: false"
            ) from exc
        self._graphs[size] = graph


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Torch has an error of its own for what its allocator lacks, and one for all errors of the driver; these are one here.

    Graphs and kernels take the driver's memory: some 4 MiB for a graph.

    Raises:
        torch.OutOfMemoryError: either lacks memory.
    """
    try:
        yield
    except torch.AcceleratorError as exc:
        if "out of memory" not in str(exc):  # the driver's words
            raise
        raise torch.OutOfMemoryError(str(exc)) from exc
