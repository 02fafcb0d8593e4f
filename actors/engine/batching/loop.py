"""The generation loop, as the engine drives it: transformers' manager, with what takes the place of its parts."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from actors.engine.batching.graphs import GraphRunner, forget_newest_tokens
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.pipeline import PipelinedManager
from actors.engine.batching.scheduling import NAME as TURNS
from actors.engine.batching.sequence import SequenceState, Sink, StepRouter
from actors.engine.batching.upstream import BackgroundThreadStatus, RequestStatus
from actors.engine.config import EngineConfig
from actors.engine.model.architectures import experts_need_host
from actors.engine.model.attention import decodes_in_pages, wants_mask
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.engine.sizing import Limits
from actors.errors import EngineDied
from actors.memory.driver import AllocatorPool

logger = logging.getLogger(__name__)


class GenerationLoop:
    """Computes the sequences that were submitted, all together, on a thread of its own.

    `pause`, `resume` and `stop` must all be called from one and the same thread, because the manager
    counts pauses per thread.

    Attributes:
        cache: its KV cache, to be moved before `start`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        limits: Limits,
        sampler: BatchSampler,
        sink: Sink,
        *,
        longest: int | None,
        watch: AbstractContextManager[None] | None = None,
        died: Callable[[Exception], None] | None = None,
    ) -> None:
        """Build it; nothing runs before `start`.

        Args:
            longest: tokens of a sequence, as far as model and configuration say.
            watch: entered for as long as a step takes, on the loop's thread.
            died: told of the error that ended the loop, there too.
        """
        self._manager = PipelinedManager(
            model,
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=_settings(model, config, limits, longest),
        )
        self._manager.logit_processor = sampler  # type: ignore[assignment]  # the same duck
        self._manager.output_router = StepRouter(sink)  # type: ignore[assignment]  # the same duck
        if watch is not None:
            self._manager.watch = watch
        if died is not None:
            self._manager.died = died
        self._manager.start_over = self.start_over
        self._manager.needs_results = lambda: sampler.needs_results
        self._processor = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor
        self.cache = KvCache(self._processor.cache, config.min_shared_prefix_tokens)
        self._pause: AbstractContextManager[None] | None = None

    def use_graphs(self, layers: CompiledLayers | None, pool: AllocatorPool | None) -> GraphRunner:
        """Have a `GraphRunner` compute, from the first batch on. For CUDA; takes what that takes."""
        runner = GraphRunner(self._processor, layers, pool)
        self._processor.model_runner = runner
        self._manager.complete_batch = runner.complete_batch
        return runner

    def start(self) -> None:
        self._manager.start()

    def submit(self, sequence_id: str, sequence: SequenceSampling, max_new_tokens: int) -> None:
        """Queue a sequence; its outputs go to the sink.

        Raises:
            EngineDied: the loop has ended.
        """
        self.check_health()
        state = SequenceState(
            request_id=sequence_id,
            initial_tokens=list(sequence.prompt_ids),
            streaming=True,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(sequence.stop_ids),
            sampling=sequence,
        )
        # What add_request does, with a state of our own class.
        self._manager.input_queue.put_nowait(state)
        self._manager._wake_up_loop.set()
        # A dying loop first stops accepting, then fails what is queued: whoever still finds it
        # accepting here will hear from it.
        self.check_health()

    def cancel(self, sequence_id: str) -> None:
        self._manager.cancel_request(sequence_id)

    @property
    def paused(self) -> bool:
        return self._pause is not None

    def pause(self) -> None:
        """Return between two steps; nothing runs until `resume`.

        Raises:
            EngineDied: the loop has ended.
        """
        assert self._pause is None, "already paused"
        pause = self._manager.pause()
        try:
            pause.__enter__()
        except RuntimeError as exc:
            raise EngineDied("the generation loop has ended") from exc
        self._pause = pause

    def resume(self) -> None:
        assert self._pause is not None, "not paused"
        pause, self._pause = self._pause, None
        pause.__exit__(None, None, None)

    def fail(self, error: Exception) -> None:
        """End out of a pause without another step, because of `error`."""
        self._manager.died(error)  # before the sequences in flight hear of it
        self.refuse_steps()
        self.resume()

    def start_over(self) -> None:
        """Forget what the KV cache holds; running sequences begin again from their tokens so far.

        While paused, or on the loop's own thread.
        """
        scheduler = self._processor.scheduler
        for state in list(scheduler.active_requests.values()):
            again = state.create_equivalent_initial_request()
            state._status = RequestStatus.FINISHED  # past the setter: this is no end of a request
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(again)
        forget_newest_tokens(self._processor)
        # Prefix sharing would otherwise match blocks whose bytes are gone.
        self.cache.paged.reset()
        scheduler.block_new_requests = False

    def extend_cache(self) -> None:
        """Let sequences have what has been mapped since. On any thread, at any time."""
        self.cache.use_mapped()
        self._processor.scheduler.block_new_requests = False  # for want of room

    @property
    def is_empty(self) -> bool:
        return not self._processor.has_pending_requests()

    @property
    def running(self) -> int:
        return len(self._processor.scheduler.active_requests)

    @property
    def waiting(self) -> int:
        queued = self._manager.input_queue.qsize()
        waiting = len(self._processor.scheduler.waiting_requests) + queued
        # A paused loop takes no sequence away, and all of those that were cancelled meanwhile wait.
        return max(0, waiting - self._manager.cancel_queue.qsize())

    def check_health(self) -> None:
        """Raises EngineDied if the loop has ended."""
        status = self._manager.background_thread_status
        if status.fatal_error is not None:
            raise EngineDied(f"the generation loop failed: {status.fatal_error}")
        if not self._manager.is_running() or status.can_accept_new_requests() is not None:
            raise EngineDied("the generation loop has ended")

    def refuse_steps(self) -> None:
        """Compute no other step: one that is let out of its pause ends at once."""
        self._manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)

    def stop(self, timeout_s: float) -> None:
        """End the loop without another step; sequences in flight fail. Not while paused."""
        self._manager.stop(timeout=timeout_s, hard_stop=True)


def _settings(
    model: PreTrainedModel, config: EngineConfig, limits: Limits, longest: int | None
) -> ContinuousBatchingConfig:
    on_cuda = model.device.type == "cuda"
    attention = model.config._attn_implementation
    paged = decodes_in_pages(model)
    graphs = paged and config.use_cuda_graphs
    if graphs and (reason := experts_need_host(model)):
        logger.info("no CUDA graphs: %s", reason)
        graphs = False
    logger.info("attention %s, decode in pages %s, CUDA graphs %s", attention, paged, graphs)
    # Of default size, the block table would send sequences of more than 32 pages, and with them
    # their whole batch, back to the path that gathers K and V.
    all_pages = limits.num_blocks
    pages = min(all_pages, -(-longest // config.page_size)) if longest else all_pages
    return ContinuousBatchingConfig(
        page_size=config.page_size,
        num_blocks=limits.num_blocks,
        allow_block_sharing=config.prefix_caching,
        max_batch_tokens=limits.max_batch_tokens,
        max_requests_per_batch=limits.max_requests_per_batch,
        max_memory_percent=1.0 if on_cuda else None,  # what fits has been planned
        max_blocks_per_request=pages if paged else 0,
        use_cuda_graph=(False, graphs),
        scheduler_type=TURNS if graphs else "fifo",
        # Masks as large as batch and cache would have to travel in every step.
        use_async_batching=config.use_async_batching and on_cuda and not wants_mask(model),
        auto_switch_to_flash=False,  # it would ask the hub for kernels
    )
