"""The engine: a generation loop over transformers' modules.

Requests are validated before they enter (one that raises inside a step would end the loop for everybody),
the KV cache lives in an arena that can be unmapped, and sequences in flight can be frozen over a sleep. How
steps are made is in `batching`.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from actors.engine.batching.graphs import GraphRunner
from actors.engine.batching.kv_cache import KvCache
from actors.engine.batching.kv_growth import kv_parts
from actors.engine.batching.loop import GenerationLoop
from actors.engine.batching.sequence import Sink
from actors.engine.cache_shape import CacheShape, cache_shape
from actors.engine.config import EngineConfig
from actors.engine.model.attention import NAME as OUR_ATTENTION
from actors.engine.model.attention import choose_attention
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.model.merged_projections import merge_projections
from actors.engine.model.rotation import settle_rotation
from actors.engine.outputs import EngineStats
from actors.engine.sampling.sampler import BatchSampler, SequenceSampling
from actors.engine.sizing import CardMemory, plan_limits
from actors.errors import DeviceMemoryShort
from actors.image.decoder_layers import decoder_layers
from actors.memory import whole_device, workspaces
from actors.memory.arena import DeviceArena
from actors.memory.driver import AllocatorPool
from actors.quantization.linear import quantise_activations
from actors.quantization.summary import summary

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


class TransformersEngine:
    """Generates tokens for many sequences at once, on a thread of its own.

    The model's tensors and the KV cache are views of arenas; `pause`, `resume` and `stop` are called
    from one thread.

    Attributes:
        max_model_len: tokens of prompt and output together.
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
        budget: int | None = None,
        short: Callable[[], None] | None = None,
        captures_by_need: bool = False,
        held: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Build the loop, move its KV cache into an arena, and start.

        Args:
            model: accepted by `check_architecture`, its tensors on an arena.
            make_kv_arena: sizes -> a mapped arena with segments of so many bytes. After an unmap the
                first segment must be mapped before all others, and those in their order.
            card: what `plan_limits` makes the limits from, and `weights_bytes` likewise.
            pool: what CUDA graphs compute in; mapped and unmapped with the KV arena.
            watch: entered for as long as a step takes, on the engine's thread.
            died: told of the error that ended the generation loop, there too.
            budget: bytes of the card that it shares with others; the KV cache's parts come and go then.
            short: called on the engine's thread, with each step for which somebody waits for KV cache.
            captures_by_need: have `warm_up` capture few graphs, and others once a step wants them.
            held: what is captured meanwhile has its weights waited for whenever it is replayed. None: hooks do that,
                in the first step after a wake, and it is not replayed.

        Raises:
            ValueError: the limits contradict each other or the model.
        """
        self._model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        choose_attention(model)
        merged = merge_projections(model)
        logger.info("%d groups of projections are computed as one", merged)
        if config.quantize_activations:
            quantising = quantise_activations(model)
            if not quantising and "quantize_activations" in config.model_fields_set:
                logger.warning(
                    "engine.quantize_activations is of no effect: the checkpoint was not made for it"
                )
        if (quantised := summary(model, next(model.parameters()).device)) is not None:
            logger.info("%s", quantised)
        shape = cache_shape(model, config.page_size)
        limits = plan_limits(config, shape, card, weights_bytes, budget)
        logger.info("%s", limits.describe())
        self._sampler = BatchSampler(limits.max_requests_per_batch)
        self._loop = GenerationLoop(
            model,
            config,
            limits,
            shape,
            self._sampler,
            sink,
            layers=_layers_to_compile(model) if config.use_torch_compile else None,
            pool=pool,
            held=held,
            watch=watch,
            died=died,
            short=short,
            captures_by_need=captures_by_need,
        )
        runner = self._loop.runner
        self._runner = runner if isinstance(runner, GraphRunner) else None
        cache = self._loop.cache
        self.max_model_len = _resolve_max_model_len(config, shape, cache)
        settle_rotation(model, self.max_model_len)
        parts = kv_parts(shape, limits.num_blocks, self.max_model_len, is_shared=budget is not None)
        self.kv_arena = cache.move(make_kv_arena, parts)
        if self._runner is not None:
            workspaces.begin_use()
        self._loop.start()

    @property
    def paused(self) -> bool:
        return self._loop.paused

    def submit(self, sequence_id: str, sequence: SequenceSampling) -> None:
        """Queue a sequence that passed `actors.text.validation.check_request`; its outputs go to the sink.

        Raises:
            EngineDied: the loop has ended.
        """
        left = self.max_model_len - len(sequence.prompt_ids)
        self._loop.submit(sequence_id, sequence, min(left, sequence.params.max_tokens or left))

    def cancel(self, sequence_id: str) -> None:
        """Forget a sequence and free its blocks at the next step. No output follows."""
        self._loop.cancel(sequence_id)

    def pause(self) -> None:
        """Return between two steps, with the device idle; nothing runs until `resume`.

        Raises:
            Exception: the device has failed. The engine has ended without another step, and is not paused.
        """
        self._loop.pause()
        if self._runner is None:
            return
        try:
            whole_device.synchronize()  # the loop waits for its compute stream only
        except Exception as exc:
            # Who takes a pause for granted would unmap; who resumes one, compute with what has failed.
            self._loop.fail(exc)
            raise
        workspaces.end_use()

    def resume(self) -> None:
        assert self.paused, "not paused"
        if self._runner is not None:
            workspaces.begin_use()
        self._loop.resume()

    def drop_kv(self, *, saves: bool = False) -> None:
        """Forget what the KV cache holds; running sequences start over from their tokens so far.

        Only while paused.

        Args:
            saves: keep in host memory what of it is worth that, until these sequences go on or end; without it,
                what an earlier call has kept is forgotten, too.
        """
        assert self.paused, "not paused"
        self._loop.start_over(saves=saves)
        self._sampler.free()

    def reserve_host(self) -> bool:
        """Take or give back some host memory, towards what the last `drop_kv` would have kept; whether to go on.

        Only while paused.
        """
        assert self.paused, "not paused"
        return self._loop.cache.saved.reserve()

    def prepare_wake(self) -> None:
        """Get ready for weights that arrive while the first batch runs. Only while paused.

        What is mapped of the KV arena, its first part at least, is what sequences get from now on.
        The next step waits for its weights: as a graph that was captured so, or module by module, held by hooks.
        """
        assert self.paused, "not paused"
        self.extend_kv()
        if self._runner is not None:
            self._runner.expect_gates()

    def end_gates(self) -> None:
        """No hooks hold the model's modules any more. On any thread, at any time."""
        if self._runner is not None:
            self._runner.end_gates()

    def has_new_graphs(self) -> bool:
        """Whether steps had some captured since this was asked before. Only while paused."""
        return self._runner is not None and self._runner.has_new_graphs()

    def extend_kv(self) -> None:
        """Let sequences have what has been mapped of the KV arena since. On any thread, at any time."""
        self._loop.extend_cache()

    def give_up_kv(self, size: int) -> list[int]:
        """Use no longer the last segments of the KV arena that no sequence has anything in.

        As many as have `size` bytes, if there are so many; never the first. While it runs, between two steps.

        Returns:
            These, to be unmapped once the device has done what it was given until now.

        Raises:
            EngineDied: the loop has ended.
        """
        return self._loop.give_up(size)

    def warm_up(self) -> None:
        """Compile and capture what the device replays later, so that serving never does.

        Weights and KV cache must be mapped; what they hold does not matter. Only while paused, and
        before any sequence has been submitted. Optional: without it, steps are slower.
        """
        assert self.paused, "not paused"
        assert self._loop.is_empty, "sequences in flight"
        self.extend_kv()
        if self._runner is not None:
            self._runner.capture()
            self._sampler.warm_up(self._model.device, self.vocab_size)

    @property
    def compiles(self) -> bool:
        """Whether there is anything for `compile` to do."""
        return self._runner is not None and self._runner.compiles

    def compile(self) -> None:
        """Compile for the device what can be; blocks for seconds, on any thread, and changes nothing.

        The engine may run, be paused and have its memory unmapped meanwhile.

        Raises:
            DeviceMemoryShort: others have the memory for it; later it may go well.
            Exception: compiling failed. The engine goes on as it is.
        """
        assert self._runner is not None, "nothing to compile"
        try:
            self._runner.compile()
        except torch.OutOfMemoryError as exc:
            device = self._model.device
            raise DeviceMemoryShort(f"no memory for a copy of a layer on {device}") from exc

    def use_compiled(self) -> None:
        """Put to use what `compile` made. Under the conditions of `warm_up`."""
        assert self.paused, "not paused"
        assert self._runner is not None, "nothing was compiled"
        self.extend_kv()
        self._runner.use_compiled()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._loop.running,
            waiting=self._loop.waiting,
            kv_used_blocks=self._loop.cache.used_blocks,
            kv_total_blocks=self._loop.cache.total_blocks,
            kv_parts_in_use=self._loop.cache.parts_in_use,
        )

    def check_health(self) -> None:
        """Raises EngineDied if the loop has ended."""
        self._loop.check_health()

    def stop(self) -> None:
        """End the loop without another step; sequences in flight fail. Also while paused."""
        # First of all: a loop that is let out of its pause would compute, on memory that may be unmapped.
        self._loop.refuse_steps()
        if self.paused:
            self.resume()
        self._loop.stop(_STOP_TIMEOUT_S)
        self._loop.cache.saved.clear()
        if self._runner is not None:
            workspaces.end_use()


def _layers_to_compile(model: PreTrainedModel) -> CompiledLayers | None:
    # A model's own attention would be compiled with them.
    suits = model.device.type == "cuda" and model.config._attn_implementation == OUR_ATTENTION
    return CompiledLayers(model) if suits and decoder_layers(model) else None


def _resolve_max_model_len(config: EngineConfig, shape: CacheShape, cache: KvCache) -> int:
    """The longest sequence: a lone one that outgrew the cache would end the loop for everybody."""
    holds = cache.longest_sequence
    knows = shape.max_positions or holds
    if config.max_model_len is None:
        return min(holds, knows)
    for limit, what in (
        (holds, f"the KV cache of {cache.num_blocks} blocks of {config.page_size} tokens holds"),
        (knows, "the checkpoint's max_position_embeddings is"),
    ):
        if config.max_model_len > limit:
            raise ValueError(f"engine.max_model_len is {config.max_model_len}, but {what} {limit}")
    return config.max_model_len
