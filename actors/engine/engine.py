"""The engine: transformers' continuous batching behind a Protocol of ours.

What the wrapper adds to the manager of transformers 5.23: requests are validated before they enter
(one that raises inside a step would end the loop for everybody), outputs are routed per step instead
of through a shared queue, sampling is per request, the KV cache lives in an arena that can be
unmapped, and sequences in flight can be frozen over a sleep.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from actors.engine.batching.graphs import GraphRunner, forget_newest_tokens
from actors.engine.batching.kv_growth import GrowingPool, kv_parts
from actors.engine.batching.pipeline import PipelinedManager
from actors.engine.batching.prefixes import share_from
from actors.engine.batching.scheduling import NAME as TURNS
from actors.engine.cache_shape import cache_shape
from actors.engine.config import EngineConfig
from actors.engine.model.architectures import experts_need_host
from actors.engine.model.attention import NAME as OUR_ATTENTION
from actors.engine.model.attention import choose_attention, decodes_in_pages, wants_mask
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.model.rotation import settle_rotation
from actors.engine.outputs import EngineOutput, EngineStats
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.engine.sizing import CardMemory, Limits, plan_limits
from actors.errors import DeviceMemoryShort, EngineDied
from actors.image.decoder_layers import decoder_layers
from actors.memory import workspaces
from actors.memory.arena import DeviceArena
from actors.memory.driver import AllocatorPool
from actors.protocol import FinishReason

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


Sink = Callable[[Sequence[EngineOutput]], None]


class Engine(Protocol):
    """Generates tokens for many sequences at once, on a thread of its own."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int

    @property
    def paused(self) -> bool: ...

    def submit(self, sequence_id: str, sequence: SequenceSampling) -> None:
        """Queue a sequence that passed `actors.text.validation.check_request`; its outputs go to the sink.

        Raises:
            EngineDied: the loop has ended.
        """

    def cancel(self, sequence_id: str) -> None:
        """Forget a sequence and free its blocks at the next step. No output follows."""

    def pause(self) -> None:
        """Return between two steps, with the device idle; nothing runs until `resume`."""

    def resume(self) -> None: ...

    def drop_kv(self) -> None:
        """Forget what the KV cache holds; running sequences start over from their tokens so far.

        Only while paused.
        """

    def prepare_wake(self) -> None:
        """Get ready for weights that arrive while the first batch runs. Only while paused.

        What is mapped of the KV arena, its first part at least, is what sequences get from now on.
        Freshly mapped, it becomes safe to read where padding points, and the next batch runs module by
        module, so that hooks can hold it.
        """

    def extend_kv(self) -> None:
        """Let sequences have what has been mapped of the KV arena since. On any thread, at any time."""

    def warm_up(self) -> None:
        """Compile and capture what the device replays later, so that serving never does.

        Weights and KV cache must be mapped; what they hold does not matter. Only while paused, and
        before any sequence has been submitted. Optional: without it, steps are slower.
        """

    @property
    def compiles(self) -> bool:
        """Whether there is anything for `compile` to do."""

    def compile(self) -> None:
        """Compile for the device what can be; blocks for seconds, on any thread, and changes nothing.

        The engine may run, be paused and have its memory unmapped meanwhile.

        Raises:
            DeviceMemoryShort: others have the memory for it; later it may go well.
            Exception: compiling failed. The engine goes on as it is.
        """

    def use_compiled(self) -> None:
        """Put to use what `compile` made. Under the conditions of `warm_up`."""

    def stats(self) -> EngineStats: ...

    def check_health(self) -> None:
        """Raises EngineDied if the loop has ended."""

    def stop(self) -> None:
        """End the loop without another step; sequences in flight fail. Also while paused."""


@dataclass(eq=False)
class _SequenceState(RequestState):
    """A request of the manager that carries its sampling state and reports only what is new."""

    sampling: SequenceSampling = field(kw_only=True)
    _reported: int = field(default=0, init=False)

    def to_generation_output(self) -> EngineOutput:
        """What came since the last call; the base class would copy the whole list every step."""
        new = tuple(self.generated_tokens[self._reported :])
        self._reported += len(new)
        self.sampling.output_ids.extend(new)
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        if self.status is RequestStatus.FINISHED:
            stopped = bool(new) and new[-1] in self._eos_token_ids
            finish = FinishReason.STOP if stopped else FinishReason.LENGTH
            stop_token_id = new[-1] if stopped else None
        logprobs = self.sampling.take_logprobs(len(new))
        grammar = self.sampling.grammar
        error = None if grammar is None else grammar.refusal
        return EngineOutput(
            self.request_id, new, logprobs, finish, stop_token_id, error, self.lifespan[0]
        )

    def create_equivalent_initial_request(self) -> "_SequenceState":
        """The same sequence with its tokens so far as the prompt, for a requeue."""
        base = super().create_equivalent_initial_request()
        return _SequenceState(
            request_id=base.request_id,
            initial_tokens=base.initial_tokens,
            streaming=True,
            max_new_tokens=base.max_new_tokens,
            eos_token_id=self.eos_token_id,
            sampling=self.sampling,
        )


class _StepRouter:
    """Stands in for the manager's OutputRouter: one call of the sink per step, on its thread."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def deliver(self, output: EngineOutput) -> None:
        self._sink([output])

    def deliver_batch(self, outputs: list[EngineOutput]) -> None:
        self._sink(outputs)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        state.error = str(error)
        self._sink([EngineOutput(state.request_id, (), None, error=error)])


class TransformersEngine:
    """Engine on transformers' continuous batching.

    The model's tensors and the KV cache are views of arenas; `pause`, `resume` and `stop` must all
    be called from one and the same thread, because the manager counts pauses per thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        make_kv_arena: Callable[[Sequence[int]], DeviceArena],
        sink: Sink,
        card: CardMemory | None = None,
        weights_bytes: int = 0,
        pool: AllocatorPool | None = None,
        watch: AbstractContextManager[None] | None = None,
        died: Callable[[Exception], None] | None = None,
    ) -> None:
        """Build the manager and move its KV cache into an arena.

        Args:
            model: accepted by `check_architecture`, its tensors on an arena.
            make_kv_arena: sizes -> a mapped arena with segments of so many bytes. After an unmap the
                first segment must be mapped before all others, and those in their order.
            card: what `plan_limits` makes the limits from, and `weights_bytes` likewise.
            pool: what CUDA graphs compute in; mapped and unmapped with the KV arena.
            watch: entered for as long as a step takes, on the engine's thread.
            died: told of the error that ended the generation loop, there too.

        Raises:
            ValueError: the limits contradict each other or the model.
        """
        self._model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        choose_attention(model, config.page_size)
        shape = cache_shape(model, config.page_size)
        limits = plan_limits(config, shape, card, weights_bytes)
        logger.info("%s", limits.describe())
        self._sampler = BatchSampler(limits.max_requests_per_batch)
        self._manager = _make_manager(model, config, limits, self._sampler)
        self._manager.output_router = _StepRouter(sink)  # type: ignore[assignment]  # the same duck
        if watch is not None:
            self._manager.watch = watch
        if died is not None:
            self._manager.died = died
        self._manager.start_over = self._start_over
        self._manager.needs_results = lambda: self._sampler.needs_results
        self._processor = self._manager._create_batch_processor()
        self._manager.batch_processor = self._processor
        self._runner: GraphRunner | None = None
        if model.device.type == "cuda":
            layers = _layers_to_compile(model) if config.use_torch_compile else None
            self._processor.model_runner = self._runner = GraphRunner(self._processor, layers, pool)
            self._manager.complete_batch = self._runner.complete_batch
        self._cache: PagedAttentionCache = self._processor.cache
        share_from(self._cache, config.min_shared_prefix_tokens)
        self.max_model_len = _resolve_max_model_len(model, config, self._cache)
        settle_rotation(model, self.max_model_len)
        parts = kv_parts(shape, limits.num_blocks, self.max_model_len)
        self._pool = GrowingPool(self._cache.num_sectors, len(self._cache.cache_allocators))
        self._cache.pool = self._pool
        self.kv_arena = _move_kv_cache(self._cache, make_kv_arena, parts)
        self._pause: AbstractContextManager[None] | None = None
        if self._runner is not None:
            workspaces.begin_use()
        self._manager.start()

    @property
    def paused(self) -> bool:
        return self._pause is not None

    def submit(self, sequence_id: str, sequence: SequenceSampling) -> None:
        self.check_health()
        left = self.max_model_len - len(sequence.prompt_ids)
        state = _SequenceState(
            request_id=sequence_id,
            initial_tokens=list(sequence.prompt_ids),
            streaming=True,
            max_new_tokens=min(left, sequence.params.max_tokens or left),
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

    def pause(self) -> None:
        assert self._pause is None, "already paused"
        pause = self._manager.pause()
        try:
            pause.__enter__()
        except RuntimeError as exc:
            raise EngineDied("the generation loop has ended") from exc
        if self._runner is not None:
            torch.cuda.synchronize()  # the manager waits for its compute stream only
            workspaces.end_use()
        self._pause = pause

    def resume(self) -> None:
        assert self._pause is not None, "not paused"
        if self._runner is not None:
            workspaces.begin_use()
        pause, self._pause = self._pause, None
        pause.__exit__(None, None, None)

    def drop_kv(self) -> None:
        assert self._pause is not None, "not paused"
        self._start_over()
        self._sampler.free()

    def _start_over(self) -> None:
        scheduler = self._processor.scheduler
        for state in list(scheduler.active_requests.values()):
            again = state.create_equivalent_initial_request()
            state._status = RequestStatus.FINISHED  # past the setter: this is no end of a request
            scheduler.finish_request(state.request_id)
            scheduler.add_waiting_request(again)
        forget_newest_tokens(self._processor)
        # Prefix sharing would otherwise match blocks whose bytes are gone.
        self._cache.reset()
        scheduler.block_new_requests = False

    def prepare_wake(self) -> None:
        assert self._pause is not None, "not paused"
        self.extend_kv()
        # Padding reads the two sectors in front, and garbage there may be NaN.
        self._cache.cache_tensor[: 2 * self._cache.bytes_per_sector].zero_()
        if self._runner is not None:
            self._runner.expect_gates()

    def extend_kv(self) -> None:
        # The arena may be a little larger than the cache. Two sectors are for padding.
        mapped = min(self.kv_arena.mapped_bytes, self._cache.cache_tensor.nbytes)
        usable = mapped // self._cache.bytes_per_sector - 2
        self._pool.use(usable)
        self._cache.num_sectors = usable  # what compute_free_capacity calls the whole
        self._processor.scheduler.block_new_requests = False  # for want of room

    def warm_up(self) -> None:
        assert self._pause is not None, "not paused"
        assert not self._processor.has_pending_requests(), "sequences in flight"
        self.extend_kv()
        if self._runner is not None:
            self._runner.capture(self._model)
            self._sampler.warm_up(self._model.device, self.vocab_size)

    @property
    def compiles(self) -> bool:
        return self._runner is not None and self._runner.compiles

    def compile(self) -> None:
        assert self._runner is not None, "nothing to compile"
        try:
            self._runner.compile()
        except torch.OutOfMemoryError as exc:
            device = self._model.device
            raise DeviceMemoryShort(f"no memory for a copy of a layer on {device}") from exc

    def use_compiled(self) -> None:
        assert self._pause is not None, "not paused"
        assert self._runner is not None, "nothing was compiled"
        self.extend_kv()
        self._runner.use_compiled(self._model)

    def stats(self) -> EngineStats:
        allocators = self._cache.cache_allocators.values()
        used = sum(len(blocks) for a in allocators for blocks in list(a.block_table.values()))
        scheduler = self._processor.scheduler
        waiting = len(scheduler.waiting_requests) + self._manager.input_queue.qsize()
        return EngineStats(
            running=len(scheduler.active_requests),
            # A paused loop takes no sequence away, and all of those that were cancelled meanwhile wait.
            waiting=max(0, waiting - self._manager.cancel_queue.qsize()),
            kv_used_blocks=used,
            kv_total_blocks=sum(a.num_blocks for a in allocators),
        )

    def check_health(self) -> None:
        status = self._manager.background_thread_status
        if status.fatal_error is not None:
            raise EngineDied(f"the generation loop failed: {status.fatal_error}")
        if not self._manager.is_running() or status.can_accept_new_requests() is not None:
            raise EngineDied("the generation loop has ended")

    def stop(self) -> None:
        # First of all: a loop that is let out of its pause would compute, on memory that may be unmapped.
        self._manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
        if self._pause is not None:
            self.resume()
        self._manager.stop(timeout=_STOP_TIMEOUT_S, hard_stop=True)
        if self._runner is not None:
            workspaces.end_use()


def _make_manager(
    model: PreTrainedModel, config: EngineConfig, limits: Limits, sampler: BatchSampler
) -> PipelinedManager:
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
    limit = config.max_model_len or _knows(model)
    pages = min(limits.num_blocks, -(-limit // config.page_size) if limit else limits.num_blocks)
    manager = PipelinedManager(
        model,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=config.page_size,
            num_blocks=limits.num_blocks,
            max_batch_tokens=limits.max_batch_tokens,
            max_requests_per_batch=limits.max_requests_per_batch,
            max_memory_percent=1.0 if on_cuda else None,  # what fits has been planned
            max_blocks_per_request=pages if paged else 0,
            use_cuda_graph=(False, graphs),
            scheduler_type=TURNS if graphs else "fifo",
            # Masks as large as batch and cache would have to travel in every step.
            use_async_batching=config.use_async_batching and on_cuda and not wants_mask(model),
            auto_switch_to_flash=False,  # it would ask the hub for kernels
        ),
    )
    manager.logit_processor = sampler  # type: ignore[assignment]  # the same duck
    return manager


def _layers_to_compile(model: PreTrainedModel) -> CompiledLayers | None:
    # No other attention knows where compiled layers leave its arguments.
    ours = model.config._attn_implementation == OUR_ATTENTION
    return CompiledLayers(model) if ours and decoder_layers(model) else None


def _knows(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model has positions for; None when it does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def _move_kv_cache(
    cache: PagedAttentionCache,
    make_arena: Callable[[Sequence[int]], DeviceArena],
    parts: Sequence[int],
) -> DeviceArena:
    count, on_cuda = cache.cache_tensor.numel(), cache.cache_tensor.is_cuda
    assert count == sum(parts), "planned for another cache"
    # Let go of transformers' own tensor first: a card has no room for two caches.
    _place_kv_cache(cache, torch.empty(count, dtype=torch.uint8, device="meta"))
    if on_cuda:
        torch.cuda.empty_cache()
    arena = make_arena(parts)
    _place_kv_cache(cache, arena.first_bytes(count))
    cache.cache_tensor[: 2 * cache.bytes_per_sector].zero_()
    return arena


def _place_kv_cache(cache: PagedAttentionCache, memory: torch.Tensor) -> None:
    cache.cache_tensor = memory
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(
            cache.bytes_per_sector,
            cache.num_sectors * cache.bytes_per_sector,
            cache.cache_tensor,
            cache.pool,
        )


def _resolve_max_model_len(
    model: PreTrainedModel, config: EngineConfig, cache: PagedAttentionCache
) -> int:
    """The longest sequence: a lone one that outgrew the cache would end the loop for everybody."""
    holds = infer_max_single_request_tokens(cache)
    knows = _knows(model) or holds
    if config.max_model_len is None:
        return min(holds, knows)
    for limit, what in (
        (holds, f"the KV cache of {cache.num_blocks} blocks of {config.page_size} tokens holds"),
        (knows, "the checkpoint's max_position_embeddings is"),
    ):
        if config.max_model_len > limit:
            raise ValueError(f"engine.max_model_len is {config.max_model_len}, but {what} {limit}")
    return config.max_model_len
