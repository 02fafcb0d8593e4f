"""Decode steps replayed from CUDA graphs, inside transformers' continuous batching.

`GraphRunner` takes the place of the ModelRunner of transformers 5.23
(generation/continuous_batching/model_runner.py), which captures sampling together with the model,
captures whatever is missing in the middle of serving, and pads the prefills of a replica that has
graphs for decoding.
"""

# B sequences (padded to a captured size in decode steps), V vocabulary

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.batching.fetch import InputFetcher
from actors.engine.batching.pipeline import prepared_on_host
from actors.engine.batching.upstream import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    ContinuousBatchProcessor,
    FutureRequestState,
    ModelRunner,
    PagedAttentionCache,
    RequestStatus,
    create_warmup_future_states,
)
from actors.engine.model.compiled_layers import CompiledLayers
from actors.engine.sizing import PREFILL_SIZES
from actors.memory import workspaces
from actors.memory.driver import AllocatorPool

logger = logging.getLogger(__name__)

# Tokens from which on a batch without a graph runs compiled. Below, the guards of a compiled layer take
# the host longer than the launches that it saves.
_MANY = 1024

# Bytes for cuBLAS, which takes 32 MiB on Hopper and less before (torch's CUDABlas).
_WORKSPACE = 2**26

_Key = tuple[int, int, bool]  # of a graph: its inputs' address, tokens, whether it is a decode step


class GraphRunner(ModelRunner):
    """Runs each step: the model, then sampling.

    A graph holds the model alone. Sampling follows eagerly: the host enqueues it while the device
    is still busy with the graph, so the device need not wait; a batch pays for what its sequences
    ask for and no more, and may ask for what needs tensors from the host (penalties,
    log-probabilities).

    Graphs read and write fixed addresses of weights and KV cache, so `compute_batch` and `capture`
    need both mapped. Nothing is ever captured outside `capture`: a batch without a graph runs
    eagerly, with the same result.
    """

    def __init__(
        self,
        processor: ContinuousBatchProcessor,
        layers: CompiledLayers | None,
        pool: AllocatorPool | None,
    ) -> None:
        """Make a runner.

        Args:
            layers: of the model, to be compiled later on.
            pool: what the graphs compute in; torch's own when None. To be mapped whenever one of them
                runs, and while they are captured.
        """
        super().__init__(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=processor.cache,
            do_sample=False,
            return_logprobs=False,
        )
        assert self.cb_config.max_requests_per_batch is not None, "resolved by the manager"
        self._largest_B = self.cb_config.max_requests_per_batch
        self._layers = layers if self.use_cuda_graph_decode else None
        self._pool = pool
        # One for nothing else: cuBLAS's workspace of a thread on it comes out of the graphs' pool, with
        # the first of them, and not from where it would be given back.
        self._capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._compiled = False  # the layers, for the graphs that there are
        self._graphs: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._next_is_gated = False
        io = self.inputs_and_outputs
        pairs = io.io_pairs if isinstance(io, ContinuousBatchingAsyncIOs) else []
        self._fetchers = [InputFetcher(pair) for pair in pairs]
        self._longest_prefill = 0  # that has a graph
        # One request at a time, as everything else is, costs a copy for each.
        self.cache.fill_block_table = _leave_to_runner  # type: ignore[method-assign,assignment]
        # What all graphs write: the output of the largest, which is captured first.
        self._logits_BV: Tensor | None = None

    def maybe_pad_inputs(
        self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool
    ) -> tuple[int, int]:
        """Tokens and cached tokens to prepare the next batch for; more than asked in decode steps.

        The processor asks this first of all for each batch and then reads `pad_inputs`.
        """
        is_short = max_kv_read == 0 and num_q_tokens <= self._longest_prefill
        # A batch that may not be replayed is padded all the same: other shapes would be rounded in other
        # ways, and a greedy answer right after a wake could differ from those before.
        self.pad_inputs = self.use_cuda_graph_decode and (use_decode_fast_path or is_short)
        if self.pad_inputs and not use_decode_fast_path:
            return next(size for size in PREFILL_SIZES if size >= num_q_tokens), 0
        padded: tuple[int, int] = super().maybe_pad_inputs(
            num_q_tokens, max_kv_read, use_decode_fast_path
        )
        return padded

    def complete_batch(self) -> None:
        """Write the prepared batch's block tables; before its inputs are asked for."""
        io = prepared_on_host(self.inputs_and_outputs)
        if io.use_block_table:
            fill_block_tables(self.cache, io.requests_in_batch, io.block_table)

    def expect_gates(self) -> None:
        """Run the next batch module by module: hooks hold it until its weights are there."""
        self._gate_next(True)

    def _gate_next(self, gated: bool) -> None:
        self._next_is_gated = gated
        for fetcher in self._fetchers:
            fetcher.fetches = gated  # the weights' copies are under way

    def compute_batch(self, model: nn.Module, batch_data: dict[str, Any]) -> None:
        """Enqueue the prepared batch on the compute stream; its tokens land in the outputs."""
        carry_over_ids, previous_ids, output_ids = self.inputs_and_outputs.get_cb_kwargs()
        io = self._io
        stream = self.inputs_and_outputs.compute_stream
        assert stream is not None, "graphs are for CUDA"
        # Without asynchronous batching the inputs were written on the default stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            replays = self.pad_inputs and not self._next_is_gated
            graph = self._graphs.get(self._key(io)) if replays else None
            if graph is None:
                logits_BV = self._forward(model, batch_data, carry_over_ids, previous_ids)
            else:
                assert self._logits_BV is not None
                graph.replay()
                logits_BV = self._logits_BV
            self._sample_tokens(logits_BV[: io.num_request_in_batch], batch_data, output_ids)
        self._gate_next(False)

    def capture(self, model: nn.Module) -> None:
        """Capture decode graphs for every batch size, and load what prefills need.

        Those of an earlier capture go. Weights, KV cache and pool must be mapped; their contents do
        not matter. The cache must be empty, and no batch may be prepared or running.
        """
        try:
            with workspaces.in_use(), torch.no_grad():
                self._capture(model)
        finally:
            self.cache.reset()  # the fake sequences took blocks

    def _capture(self, model: nn.Module) -> None:
        started_s = time.perf_counter()
        self._graphs.clear()
        self._logits_BV = None
        self._gate_next(False)
        room = min(self.cache.num_blocks * self.cb_config.page_size, self.cache.max_batch_tokens)
        pairs = 2 if isinstance(self.inputs_and_outputs, ContinuousBatchingAsyncIOs) else 1
        self._run_fake_batch(model, room, decode=False)
        for pair in range(pairs):
            if self.use_cuda_graph_decode:
                layers = None if self._compiled else self._layers
                with layers.recording() if layers is not None else nullcontext():
                    # The largest first: the others fit into the memory it leaves in the pool.
                    for size in reversed(self._decode_sizes()):
                        self._run_fake_batch(model, size, decode=True, is_known=pair > 0)
                for size in self._prefill_sizes(room):
                    self._run_fake_batch(model, size, decode=False, is_known=pair > 0)
            if isinstance(self.inputs_and_outputs, ContinuousBatchingAsyncIOs):
                self.inputs_and_outputs.swap_io_pairs()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        logger.info("captured %d graphs in %.1f s", len(self._graphs), seconds)

    @property
    def compiles(self) -> bool:
        """Whether there is anything for `compile` to do."""
        return self._layers is not None and not self._compiled

    def compile(self) -> None:
        """See CompiledLayers.compile; after a `capture`."""
        assert self._layers is not None, "nothing to compile"
        with workspaces.in_use():
            self._layers.compile()

    def use_compiled(self, model: nn.Module) -> None:
        """Run the layers compiled from now on; under the conditions of `capture`."""
        assert self._layers is not None, "nothing was compiled"
        if not self._compiled:  # it may be a second try to capture
            self._layers.install()
        self._compiled = True
        self.capture(model)

    def _decode_sizes(self) -> list[int]:
        """Batch sizes that `maybe_pad_inputs` pads to."""
        largest = self._largest_B
        sizes = [1 << i for i in range(largest.bit_length()) if 1 << i < largest]
        return [*sizes, largest]

    def _prefill_sizes(self, room: int) -> list[int]:
        """Batch sizes that `maybe_pad_inputs` pads short prefills to, the largest first."""
        sizes = [size for size in reversed(PREFILL_SIZES) if size <= room]
        self._longest_prefill = max(sizes, default=0)
        return sizes

    def _run_fake_batch(
        self, model: nn.Module, num_tokens: int, *, decode: bool, is_known: bool = False
    ) -> None:
        """Run a batch, and capture it if such batches are padded.

        Args:
            is_known: one like it was run before, so that it need only be captured.
        """
        status = RequestStatus.DECODING if decode else RequestStatus.PREFILLING
        # The cache may have fewer blocks than a batch has rows; the rest is padding.
        count, length = (min(num_tokens, self.cache.num_blocks), 1) if decode else (1, num_tokens)
        states = create_warmup_future_states(count, status, length, 0, self.cache)
        try:
            num_q_tokens, max_kv_read = self.maybe_pad_inputs(num_tokens, 0, decode)
            self.inputs_and_outputs.prepare_batch_tensors(
                states, self.logit_processor, decode, num_q_tokens, max_kv_read, self.pad_inputs
            )
            self.complete_batch()
            inputs = self.inputs_and_outputs.get_model_kwargs(use_padding=self.pad_inputs)
            if not is_known:
                # First without a graph: nothing may compile or load while one is captured.
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                self.compute_batch(model, dict(inputs))
                if self.pad_inputs:
                    self._reserve(torch.cuda.max_memory_allocated() - before)
            if self.pad_inputs:
                self._capture_batch(model, dict(inputs))
        finally:
            torch.cuda.synchronize()
            for state in states:
                self.cache.free_blocks(state.state.request_id)

    def _reserve(self, size: int) -> None:
        """Have the pool hold what a batch took that ran without a graph, sampling included."""
        if self._pool is not None:
            with torch.cuda.stream(self._capture_stream):
                self._pool.reserve(size + _WORKSPACE)

    def _capture_batch(self, model: nn.Module, batch_data: dict[str, Any]) -> None:
        carry_over_ids, previous_ids, _ = self.inputs_and_outputs.get_cb_kwargs()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph,
                # Annotated int, is a handle.
                pool=self.graph_pool_id if self._pool is None else self._pool.id,  # type: ignore[arg-type]
                stream=self._capture_stream,
                capture_error_mode="thread_local",  # other threads may use the device meanwhile
            ):
                logits_BV = self._forward(model, batch_data, carry_over_ids, previous_ids)
                if self._logits_BV is None:
                    self._logits_BV = logits_BV
                else:
                    self._logits_BV[: logits_BV.shape[0]].copy_(logits_BV)
        except RuntimeError as exc:
            if "captur" not in str(exc):  # the driver's words, and torch's
                raise
            raise RuntimeError(
                f"no CUDA graph can hold a forward of {type(model).__name__}, which has the host wait "
                "for the device; set engine.use_cuda_graphs: false"
            ) from exc
        self._graphs[self._key(self._io)] = graph

    def _forward(
        self,
        model: nn.Module,
        batch_data: dict[str, Any],
        carry_over_ids: Tensor,
        previous_ids: Tensor,
    ) -> Tensor:
        """The model's logits [B, V] of the last token of each sequence."""
        self.inputs_and_outputs.carry_over_tokens(
            batch_data["input_ids"], carry_over_ids, previous_ids
        )
        if self._layers is not None:
            many = batch_data["input_ids"].shape[1] >= _MANY
            self._layers.active = self._compiled and (self.pad_inputs or many)
        if self.supports_logits_to_keep(model):
            batch_data["logits_to_keep"] = batch_data["logits_indices"]
            logits: Tensor = model(**batch_data).logits
            return logits[0]
        logits = model(**batch_data).logits
        return logits[0, batch_data["logits_indices"]]

    def _sample_tokens(
        self, logits_BV: Tensor, batch_data: dict[str, Any], output_ids: Tensor
    ) -> None:
        B = logits_BV.shape[0]
        input_ids_B = batch_data["input_ids"][0, batch_data["logits_indices"][:B]]
        args_PB = batch_data["logits_processor_args"][:, :B]
        sampler: Any = self.logit_processor  # a BatchSampler
        output_ids[0, :B].copy_(sampler.sample(input_ids_B, logits_BV.float(), args_PB))

    @property
    def _io(self) -> ContinuousBatchingIOs:
        """The tensors on the device for the prepared batch; asynchronous batching has two sets."""
        io = self.inputs_and_outputs
        if isinstance(io, ContinuousBatchingAsyncIOs):
            return io.io_pairs[io.current_pair].device_io
        return io

    @staticmethod
    def _key(io: ContinuousBatchingIOs) -> _Key:
        return io.input_ids.data_ptr(), io.num_q_tokens, io.use_block_table


def fill_block_tables(
    cache: PagedAttentionCache, requests: Sequence[FutureRequestState], tables: Tensor
) -> None:
    """Write the pages of a batch's sequences into their rows, in one copy per attention type.

    Args:
        tables: [attention types, B or more, any]; what lies past a sequence's pages is not read.
    """
    for i, allocator in enumerate(cache.cache_allocators.values()):
        rows = [allocator.block_table[request.state.request_id] for request in requests]
        width = max(map(len, rows))
        padded = [row + [0] * (width - len(row)) for row in rows]
        pages_per_block = allocator.block_physical_stride // allocator.tokens_per_page
        pages = torch.tensor(padded, dtype=tables.dtype) * pages_per_block
        tables[i, : len(rows), :width].copy_(pages)


def _leave_to_runner(*_: object) -> None:
    """In place of PagedAttentionCache.fill_block_table."""


def forget_newest_tokens(processor: ContinuousBatchProcessor) -> None:
    """Keep asynchronous batching from carrying the last step's tokens into sequences started over.

    It matches them to the next step by request id alone (infer_carry_over_ids).
    """
    io = processor.inputs_and_outputs
    if isinstance(io, ContinuousBatchingAsyncIOs):
        for pair in io.io_pairs:
            pair.host_io.req_id_to_new_token_position = {}
