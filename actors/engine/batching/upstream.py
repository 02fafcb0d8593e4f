"""Every name that we take from transformers' continuous batching, which is private (5.23).

This is the only module that imports it; ruff holds that. What we use of these, call and replace, with what
arguments, is in tests/unit/actors/engine/batching/test_upstream.py: at another release of transformers that test
fails first, and names what has changed.
"""

from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    PagedAttentionCache,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import (
    SLIDING_ATTENTION,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    HostDeviceIOPair,
    PagedAttentionArgs,
)
from transformers.generation.continuous_batching.model_runner import (
    ModelRunner,
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import (
    FutureRequestState,
    RequestState,
    RequestStatus,
    create_warmup_future_states,
)
from transformers.generation.continuous_batching.scheduler import (
    SCHEDULER_MAPPING,
    FIFOScheduler,
    Scheduler,
)
from transformers.generation.continuous_batching.utils import (
    drain_queue,
    find_head_dim,
    find_num_key_value_heads,
)
from transformers.integrations.eager_paged import eager_paged_attention_forward

__all__ = [
    "ATTN_TYPE_TO_ALLOCATOR",  # which types of attention there is a cache for
    "SCHEDULER_MAPPING",  # where a scheduler of ours is entered by name
    "SLIDING_ATTENTION",  # the name of that type of attention
    "BackgroundThreadStatus",  # pause, stop and the error that ended the loop; ours reads before a pause
    "CachePool",  # sectors that are free; ours gives out what is mapped
    "ContinuousBatchProcessor",  # what prepares a batch and takes its results in
    "ContinuousBatchingAsyncIOs",  # two pairs of tensors, so that a batch is prepared while one computes
    "ContinuousBatchingIOs",  # the tensors of a batch
    "ContinuousBatchingManager",  # the queues and the thread; ours has a loop of its own
    "FIFOScheduler",  # who is in a batch; ours has prompts and decode steps take turns
    "FullAttentionCacheAllocator",  # how large a page is
    "FutureRequestState",  # a sequence in a batch
    "HostDeviceIOPair",  # tensors on the host and on the device; ours may have a kernel fetch them
    "ModelRunner",  # the model's forward and sampling; ours replays graphs of the model alone
    "PagedAttentionArgs",  # what attention is told of a batch, through every layer
    "PagedAttentionCache",  # the KV cache; ours is moved into an arena
    "RequestState",  # a sequence; ours carries its sampling
    "RequestStatus",  # how far it is
    "Scheduler",  # the sequences that run and wait
    "create_warmup_future_states",  # made-up sequences, to capture graphs with
    "drain_queue",  # all that a queue holds
    "eager_paged_attention_forward",  # attention in plain torch, for what needs no softcap of ours
    "find_head_dim",  # of a model's keys and values
    "find_num_key_value_heads",  # of a model
    "group_layers_by_attn_type",  # which layers attend how
    "infer_max_single_request_tokens",  # the longest sequence that a cache holds
]
