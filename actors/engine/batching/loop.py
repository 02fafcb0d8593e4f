"""The generation loop: a thread that computes all sequences together, as the engine drives it."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from transformers import PreTrainedModel

from actors.engine.batching.costs import StepCosts
from actors.engine.batching.graphs import GraphRunner
from actors.engine.batching.inputs import StepInputs
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.pipeline import Pipeline
from actors.engine.batching.runner import Runner
from actors.engine.batching.scheduling import Scheduler
from actors.engine.batching.sequence import LoopSequence, Sink
from actors.engine.cache_shape import CacheShape
from actors.engine.config import EngineConfig
from actors.engine.model.architectures import experts_need_host
from actors.engine.model.attention import decodes_in_pages
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.outputs import EngineOutput
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.engine.sizing import STEP_SIZES, Limits
from actors.errors import EngineDied
from actors.memory.driver import AllocatorPool
from actors.rounding import cdiv

logger = logging.getLogger(__name__)


class GenerationLoop:
    """Computes the sequences that were submitted, all together, on a thread of its own.

    Attributes:
        cache: its KV cache, to be moved into an arena before `start`.
        runner: what computes its steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        limits: Limits,
        shape: CacheShape,
        sampler: BatchSampler,
        sink: Sink,
        *,
        layers: CompiledLayers | None = None,
        pool: AllocatorPool | None = None,
        held: Callable[[], AbstractContextManager[None]] | None = None,
        watch: AbstractContextManager[None] | None = None,
        died: Callable[[Exception], None] | None = None,
        short: Callable[[], None] | None = None,
        captures_by_need: bool = False,
    ) -> None:
        """Build it; nothing runs before `start`.

        Args:
            shape: of the model's cache.
            layers, pool, held: see `GraphRunner`.
            watch: entered for as long as a step takes, on the loop's thread.
            died: told of the error that ended the loop, there too.
            short: called there with each step for which somebody waits for blocks.
            captures_by_need: see `GraphRunner`.
        """
        on_cuda, in_pages = model.device.type == "cuda", decodes_in_pages(model)
        graphs = in_pages and config.use_cuda_graphs
        if graphs and (reason := experts_need_host(model)):
            logger.info("no CUDA graphs: %s", reason)
            graphs = False
        attention = model.config._attn_implementation
        logger.info("attention %s, in pages %s, CUDA graphs %s", attention, in_pages, graphs)
        tokens, rows = limits.max_batch_tokens, limits.max_requests_per_batch
        remembers = config.min_shared_prefix_tokens if config.prefix_caching else None
        self.cache = KvCache(shape, limits.num_blocks, rows, remembers)
        longest = config.max_model_len or shape.max_positions or self.cache.longest_sequence
        pages = min(self.cache.num_blocks, cdiv(longest, config.page_size)) if in_pages else 0
        inputs = StepInputs(self.cache, tokens, rows, pages, model.device)
        # Elsewhere steps are too slow for a part of a prompt to be much of one.
        sizes = [size for size in STEP_SIZES if size <= tokens] or [tokens]
        costs = StepCosts(config.step_target_ms / 1000, sizes) if in_pages else None
        self.runner: Runner
        of_runner = (model, self.cache, inputs, sampler, rows)
        if on_cuda:
            self.runner = GraphRunner(
                *of_runner,
                in_pages=in_pages,
                costs=costs,
                sizes=sizes if graphs else [],
                by_need=captures_by_need,
                layers=layers if graphs else None,
                pool=pool,
                held=held,
            )
        else:
            self.runner = Runner(*of_runner, in_pages=in_pages, costs=costs)
        self._scheduler = Scheduler(self.cache, tokens, rows, costs)
        self._pipeline = Pipeline(
            self._scheduler,
            self.cache,
            self.runner,
            sink,
            overlaps=config.use_async_batching and on_cuda,
            needs_results=lambda: sampler.needs_results,
            release_memory=torch.cuda.empty_cache if on_cuda else _nothing,
        )
        self._sink = sink
        self._watch = nullcontext() if watch is None else watch
        self._died = died
        self._short = short or _nothing
        self._inbox: deque[LoopSequence | str] = deque()  # a name cancels
        self._gives_up: tuple[int, Future[list[int]]] | None = None  # bytes; see `give_up`
        self._came = threading.Event()  # something to look at: these two, pause, stop
        self._state = threading.Condition()  # of the four below
        self._pauses = False
        self._stands = False
        self._stops = False
        self._ended = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="generation-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- any thread ---

    def submit(self, sequence_id: str, sampling: SequenceSampling, max_new_tokens: int) -> None:
        """Queue a sequence; its outputs go to the sink.

        Raises:
            EngineDied: the loop has ended.
        """
        self.check_health()
        end = len(sampling.prompt_ids) + max_new_tokens
        self._inbox.append(LoopSequence(sequence_id, sampling, end))
        self._came.set()
        # A loop that ends first says so, then fails what is queued: whoever still finds it running here will
        # hear from it.
        self.check_health()

    def cancel(self, sequence_id: str) -> None:
        """Forget a sequence, if it is still there. No output follows, but for those of a step being read."""
        self.cache.saved.forget(sequence_id)  # at once: a loop that is paused takes nothing in
        self._inbox.append(sequence_id)
        self._came.set()

    @property
    def is_empty(self) -> bool:
        return self._scheduler.is_empty and not self._inbox

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def is_full(self) -> bool:
        """Whether sequences wait because one had to give up its blocks."""
        return self._scheduler.is_full

    @property
    def waiting(self) -> int:
        queued = [1 if isinstance(each, LoopSequence) else -1 for each in self._inbox.copy()]
        # A paused loop takes no sequence away, and all of those that were cancelled meanwhile wait.
        return max(0, len(self._scheduler.waiting) + sum(queued))

    def check_health(self) -> None:
        """Raises EngineDied if the loop has ended."""
        if self._error is not None:
            raise EngineDied(f"the generation loop failed: {self._error}")
        if self._stops or self._ended or not self._thread.is_alive():
            raise EngineDied("the generation loop has ended")

    def extend_cache(self) -> None:
        """Let sequences have what has been mapped since."""
        self.cache.use_mapped()
        self._scheduler.is_full = False  # for want of room

    def give_up(self, size: int) -> list[int]:
        """Between two steps, have the cache give up parts; see `KvCache.give_up`. Not while paused.

        On the thread that pauses, and while nothing is mapped: so no part comes meanwhile.

        Raises:
            EngineDied: the loop has ended.
        """
        assert not self._pauses, "paused"
        given: Future[list[int]] = Future()
        with self._state:
            self.check_health()
            self._gives_up = size, given
        self._came.set()
        return given.result()

    # --- pause and end ---

    @property
    def paused(self) -> bool:
        return self._pauses

    def pause(self) -> None:
        """Return between two steps, with nothing unread; nothing runs until `resume`.

        Raises:
            EngineDied: the loop has ended.
        """
        assert not self._pauses, "already paused"
        with self._state:
            self._pauses = True
            self._came.set()
            self._state.wait_for(lambda: self._stands or self._ended)
            if not self._stands:
                self._pauses = False
                raise EngineDied("the generation loop has ended")

    def resume(self) -> None:
        assert self._pauses, "not paused"
        with self._state:
            self._pauses = False
            self._state.notify_all()

    def start_over(self, *, saves: bool) -> None:
        """Forget what the KV cache holds; running sequences begin again from their tokens so far. While paused.

        Args:
            saves: first of all to host memory, what is worth it; else what was saved before is forgotten, too.
        """
        self._take_in()  # who was cancelled has nothing that is worth it
        if saves:
            self._scheduler.save()
        else:
            self.cache.saved.clear()
        self._scheduler.start_over()

    def fail(self, error: Exception) -> None:
        """End out of a pause without another step, because of `error`."""
        if self._died is not None:
            self._died(error)  # before the sequences in flight hear of it
        self.refuse_steps()
        self.resume()

    def refuse_steps(self) -> None:
        """Compute no other step: one that is let out of its pause ends at once."""
        self._stops = True
        self._came.set()

    def stop(self, timeout_s: float) -> None:
        """End the loop without another step; sequences in flight fail. Not while paused."""
        self.refuse_steps()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the generation loop has not ended within %.0f s", timeout_s)

    # --- the loop's thread ---

    def _run(self) -> None:
        error: Exception = EngineDied("the generation loop has ended")
        try:
            while self._turn():
                pass
        except Exception as exc:
            logger.exception("the generation loop failed")
            self._error = error = exc
            if self._died is not None:
                self._died(exc)  # before the sequences in flight hear of it
        finally:
            with self._state:
                self._ended = True
                self._state.notify_all()
                given_up, self._gives_up = self._gives_up, None
            if given_up is not None:
                given_up[1].set_exception(EngineDied("the generation loop has ended"))
            self._fail_all(error)

    def _turn(self) -> bool:
        """A step, a pause or a wait; whether to go on."""
        if self._pauses and not self._stops:
            self._stand_still()
        if self._stops:
            with suppress(
                RuntimeError
            ):  # of a device that has failed, which is why nobody wants another step
                self.runner.synchronize()
            return False
        self._pipeline.wait()
        self._came.clear()
        self._take_in()
        self._give_up_parts()
        if self._pauses or self._stops:
            return True
        with self._watch:
            advanced = self._pipeline.advance()
        if self._scheduler.is_short:
            self._short()
        if not advanced:
            self._came.wait()
        return True

    def _stand_still(self) -> None:
        with self._watch:
            self._pipeline.read_newest()
            self.runner.synchronize()
        with self._state:
            self._stands = True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._pauses)
            self._stands = False

    def _take_in(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case LoopSequence() as sequence:
                    self._scheduler.add(sequence)
                case name:
                    self._scheduler.remove(name)

    def _give_up_parts(self) -> None:
        if self._gives_up is not None:
            size, given = self._gives_up
            self._gives_up = None  # whoever hears of the result may ask again
            given.set_result(self.cache.give_up(size))

    def _fail_all(self, error: Exception) -> None:
        self._take_in()
        names = [*self._scheduler.running, *self._scheduler.waiting]
        if names:
            self._sink([EngineOutput(name, (), None, error=error) for name in names])


def _nothing() -> None:
    """There is no cache of freed memory, or nobody who has any to give."""
