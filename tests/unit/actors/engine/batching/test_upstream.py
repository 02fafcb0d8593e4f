"""What we rely on of transformers' continuous batching is there: by name, with its arguments and attributes.

At another release of transformers this fails first. What it names is to be read again in the source, and then
our side of it; what the same names do differently, only the tests of answers find.
"""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import transformers.modeling_flash_attention_utils as flash_utils
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.utils.generic import is_flash_attention_requested

from actors.engine.batching import upstream
from actors.engine.batching.graphs import GraphRunner
from actors.engine.batching.kv_growth import GrowingPool
from actors.engine.batching.pipeline import PipelinedManager, _StatusThatReads
from actors.engine.batching.prefixes import PrefixCache
from actors.engine.batching.scheduling import TurnsScheduler
from actors.engine.batching.sequence import SequenceState, StepRouter
from actors.engine.model.compiled_layers import _PAGED
from actors.engine.sampling.sampler import BatchSampler
from tests.unit.actors.engine.batching.manager_on_cpu import manager_on_cpu

# What we call, and what of ours stands in for it, with the arguments that it has.
FUNCTIONS = {
    "create_warmup_future_states": "num, status, num_q_tokens, max_kv_read, cache",
    "drain_queue": "q",
    "eager_paged_attention_forward": "module, query, key, value, attention_mask, scaling, **kwargs",
    "find_head_dim": "config",
    "find_num_key_value_heads": "config",
    "group_layers_by_attn_type": "config",
    "infer_max_single_request_tokens": "cache",
}
METHODS = {
    "BackgroundThreadStatus": {
        "can_accept_new_requests": "self",
        "is_pause_requested": "self, local",
        "pause_and_wait": "self",
        "request_stop": "self, status, global_rank",
        "update_with_tp_status": "self, tp_status",
    },
    "CachePool": {
        "__init__": "self, num_sectors, num_allocators, num_reserved_sectors",
        "count_free_blocks": "self, index",
        "free_blocks": "self, index, block_ids",
        "reset": "self",
    },
    "ContinuousBatchProcessor": {
        "_generation_step": "self, model",
        "_update_tp_group_state": "self",
        "has_pending_requests": "self",
        "prepare_next_batch": "self",
        "update_batch": "self",
    },
    "ContinuousBatchingAsyncIOs": {
        "carry_over_tokens": "self, input_ids, carry_over_ids, prev_output_ids",
        "get_cb_kwargs": "self",
        "get_model_kwargs": "self, use_padding",
        "infer_carry_over_ids": "self",
        "prepare_batch_tensors": "self, requests_in_batch, logits_processors, use_decode_fast_path, "
        "num_q_tokens, max_kv_read, use_padding",
        "swap_io_pairs": "self",
    },
    "ContinuousBatchingIOs": {
        "_transfer_inputs": "self, other, stream, non_blocking",
        "carry_over_tokens": "self, input_ids, carry_over_ids, prev_output_ids",
        "get_cb_kwargs": "self",
        "get_model_kwargs": "self, use_padding",
        "prepare_batch_tensors": "self, requests_in_batch, logits_processors, use_decode_fast_path, "
        "num_q_tokens, max_kv_read, use_padding",
    },
    "ContinuousBatchingManager": {
        "__init__": "self, model, generation_config, continuous_batching_config, workload_hints",
        "_create_batch_processor": "self",
        "_generation_loop_body": "self, batch_processor, bootstrapping",
        "_generation_step": "self",
        "_handle_critical_error": "self, error, batch_processor",
        "cancel_request": "self, request_id",
        "is_running": "self",
        "pause": "self",
        "start": "self",
        "stop": "self, block, timeout, keep_for_next_session, hard_stop",
    },
    "FIFOScheduler": {
        "_process_candidates": "self, candidates, token_budget, cache_budget, "
        "request_ids_to_remove_from_waiting",
        "_try_to_meet_safety_margin": "self",
        "add_waiting_request": "self, state",
        "clear_cancelled_requests": "self",
        "finish_request": "self, request_id",
        "reset": "self",
        "set_request_cancellation": "self, request_id",
    },
    "FullAttentionCacheAllocator": {
        "acquire_prefix_blocks": "self, request_id, prefix_len, block_ids",
        "get_bytes_per_page": "num_key_value_heads, head_dim, cache_dtype, page_size",
        "mark_complete_blocks": "self, request_id, token_ids, new_new_blocks",
        "match_prefix_blocks": "self, prompt_ids",
        "needs_new_blocks": "self, request_id, past_length, query_length",
        "register_cache_tensor": "self, bytes_per_sector, non_trash_bytes, cache_tensor, pool",
    },
    "HostDeviceIOPair": {"transfer_inputs_h2d": "self, stream"},
    "ModelRunner": {
        "__init__": "self, logit_processor, cb_config, inputs_and_outputs, cache, do_sample, "
        "return_logprobs",
        "compute_batch": "self, model, batch_data",
        "maybe_pad_inputs": "self, num_q_tokens, max_kv_read, use_decode_fast_path",
        "supports_logits_to_keep": "self, model",
    },
    "PagedAttentionCache": {
        "can_store_request_tokens": "self, state, request_len, dry_run",
        "compute_free_capacity": "self, relative",
        "count_new_complete_blocks": "self, state, request_len",
        "fill_block_table": "self, request_id, past_length, query_length, block_table",
        "free_blocks": "self, request_id, no_cache",
        "mark_complete_blocks": "self, state, complete_blocks",
        "reset": "self",
        "search_prefix_match": "self, request_id, prompt_ids",
        "update": "self, key_states, value_states, layer_idx, kwargs",
    },
    "RequestState": {
        "create_equivalent_initial_request": "self",
        "current_len": "self",
        "generated_len": "self",
        "to_generation_output": "self",
    },
}

# What instances have besides, by their name in `objects`.
ATTRIBUTES = {
    "manager": "_wake_up_loop background_thread_status batch_processor cancel_queue input_queue "
    "logit_processor model output_router",
    "status": "fatal_error local_status tp_status",
    "processor": "cache cb_config inputs_and_outputs logit_processor model_runner output_router scheduler",
    "scheduler": "active_requests block_new_requests max_requests_per_batch waiting_requests",
    "cache": "bytes_per_sector cache_allocators cache_tensor max_batch_tokens num_blocks num_sectors pool "
    "use_prefix_sharing",
    "allocator": "block_physical_stride block_table blocks_per_sector bytes_per_block index layer_type ledger "
    "num_blocks supports_block_table tokens_per_page",
    "ledger": "block_to_hash cached_blocks hash_to_block shared_ref_counts",
    "pool": "free_sectors num_free_sectors num_reserved_sectors",
    "io": "block_table compute_stream input_ids num_q_tokens num_request_in_batch "
    "req_id_to_new_token_position requests_in_batch use_block_table",
    "runner": "cache cb_config graph_pool_id inputs_and_outputs logit_processor pad_inputs "
    "use_cuda_graph_decode",
    "sequence": "_eos_token_ids _status eos_token_id error generated_tokens initial_tokens lifespan "
    "max_new_tokens position_offset request_id status streaming",
}

# Of what needs a card to be built: the attributes that its constructor sets.
SET_BY_CONSTRUCTOR = {
    "ContinuousBatchingAsyncIOs": "compute_stream current_pair io_pairs max_batch_tokens",
    "HostDeviceIOPair": "device_io host_io",
}

# Our classes, and what they are to be taken for.
OURS: list[tuple[type, type]] = [
    (GraphRunner, upstream.ModelRunner),
    (GrowingPool, upstream.CachePool),
    (PipelinedManager, upstream.ContinuousBatchingManager),
    (PrefixCache, upstream.PagedAttentionCache),
    (SequenceState, upstream.RequestState),
    (TurnsScheduler, upstream.FIFOScheduler),
    (_StatusThatReads, upstream.BackgroundThreadStatus),
    (BatchSampler, ContinuousBatchingLogitsProcessorList),
    (StepRouter, OutputRouter),
]
# Nobody calls these of what is replaced.
UNUSED = {"clear"}


def arguments(function: Any) -> str:
    signs = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(signs.get(p.kind, "") + p.name for p in parameters)


@pytest.fixture(scope="module")
def objects() -> Iterator[dict[str, Any]]:
    manager = manager_on_cpu(max_batch_tokens=16, max_requests_per_batch=2, num_blocks=4)
    processor = manager._create_batch_processor()
    allocator = next(iter(processor.cache.cache_allocators.values()))
    yield {
        "manager": manager,
        "status": manager.background_thread_status,
        "processor": processor,
        "scheduler": processor.scheduler,
        "cache": processor.cache,
        "allocator": allocator,
        "ledger": allocator.ledger,
        "pool": processor.cache.pool,
        "io": processor.inputs_and_outputs,
        "runner": processor.model_runner,
        "sequence": upstream.RequestState(request_id="a", initial_tokens=[1]),
    }
    manager.destroy()


@pytest.mark.parametrize(("name", "expected"), FUNCTIONS.items())
def test_functions_take_the_same(name: str, expected: str) -> None:
    assert arguments(getattr(upstream, name)) == expected


@pytest.mark.parametrize(
    ("owner", "name", "expected"),
    [(owner, *method) for owner, methods in METHODS.items() for method in methods.items()],
)
def test_methods_take_the_same(owner: str, name: str, expected: str) -> None:
    assert arguments(getattr(getattr(upstream, owner), name)) == expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in ATTRIBUTES.items() for name in names.split()],
)
def test_attributes_are_there(owner: str, name: str, objects: dict[str, Any]) -> None:
    assert hasattr(objects[owner], name)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in SET_BY_CONSTRUCTOR.items() for name in names.split()],
)
def test_constructors_set_attributes(owner: str, name: str) -> None:
    assert name in getattr(upstream, owner).__init__.__code__.co_names


@pytest.mark.parametrize(("ours", "theirs"), OURS, ids=lambda kind: kind.__name__)
def test_what_we_replace_can_be_called_as_before(ours: type, theirs: type) -> None:
    replaced = {
        name
        for name, value in vars(ours).items()
        if isinstance(value, FunctionType)
        and isinstance(inspect.getattr_static(theirs, name, None), FunctionType)
        and name not in ("__init__", "__repr__")  # called by us, written by dataclass
    }
    if issubclass(ours, theirs):
        assert replaced <= METHODS[theirs.__name__].keys(), "to be listed above"
    for name in replaced:
        inspect.signature(getattr(ours, name)).bind(
            *inspect.signature(getattr(theirs, name)).parameters
        )


def test_sampler_and_router_have_all_that_is_asked_of_them() -> None:
    sampler, router = BatchSampler(), StepRouter(lambda outputs: None)
    for ours, theirs in (
        (sampler, ContinuousBatchingLogitsProcessorList),
        (router, OutputRouter),
    ):
        public = {name for name in vars(theirs) if not name.startswith("_")} - UNUSED
        assert not [name for name in public if not hasattr(ours, name)]
    assert hasattr(sampler, "do_processing")
    assert hasattr(sampler, "tensors_required")


def test_sequences_and_statuses() -> None:
    assert upstream.FutureRequestState.__slots__ == (
        "state",
        "has_new_token",
        "complete_blocks",
        "query_length",
    )
    names = [status.name for status in upstream.RequestStatus]
    assert names == ["PENDING", "PREFILLING", "DECODING", "FINISHED", "FAILED"]
    status = upstream.BackgroundThreadStatus
    assert status.DONT_STOP < status.FLUSH_AND_STOP < status.HARD_STOP


def test_attention_is_told_what_it_reads() -> None:
    read = "block_table cache cu_seq_lens_k cu_seq_lens_q max_length_k max_length_q"
    assert set(read.split()) <= _PAGED
    sampled = {"input_ids", "logits_indices", "logits_processor_args"}
    assert sampled <= upstream.PagedAttentionArgs.__annotations__.keys()


def test_types_of_attention() -> None:
    assert upstream.SLIDING_ATTENTION == "sliding_attention"
    assert set(upstream.ATTN_TYPE_TO_ALLOCATOR) == {"full_attention", "sliding_attention"}


def test_schedulers_are_found_by_name() -> None:
    assert upstream.SCHEDULER_MAPPING["fifo"] is upstream.FIFOScheduler
    assert upstream.SCHEDULER_MAPPING["turns"] is TurnsScheduler


def test_names_of_attention_with_flash_need_no_mask() -> None:
    assert is_flash_attention_requested(requested_attention_implementation="paged_flash_2")
    assert arguments(flash_utils._lazy_imports).split(", ")[0] == "implementation"
    assert callable(flash_utils._pad_input)
    assert callable(flash_utils._unpad_input)


def test_every_name_is_looked_at() -> None:
    looked_at = {*FUNCTIONS, *METHODS, *SET_BY_CONSTRUCTOR}
    by_hand = {
        "ATTN_TYPE_TO_ALLOCATOR",
        "FutureRequestState",
        "PagedAttentionArgs",
        "RequestStatus",
        "SCHEDULER_MAPPING",
        "SLIDING_ATTENTION",
        "Scheduler",  # as FIFOScheduler
    }
    assert set(upstream.__all__) == looked_at | by_hand
