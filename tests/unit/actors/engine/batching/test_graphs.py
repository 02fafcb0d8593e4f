"""What can be told of the step runner without a GPU; the rest is in integration/test_engine_gpu.py."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from actors.engine.batching.graphs import fill_block_tables
from actors.engine.batching.upstream import (
    FutureRequestState,
    PagedAttentionCache,
    RequestState,
    RequestStatus,
)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_block_tables_are_those_of_transformers(num_layers: int) -> None:
    config = tf.Qwen2Config(
        hidden_size=32, num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2
    )
    limits = ContinuousBatchingConfig(
        page_size=8,
        num_blocks=40,
        max_batch_tokens=64,
        max_blocks_per_request=16,
        max_memory_percent=0.5,
    )
    helper = SimpleNamespace(tp_size=1)
    cache = PagedAttentionCache(config, limits, "cpu", helper, torch.float32)
    requests = []
    for i, length in enumerate((1, 8, 9, 100, 30)):
        state = RequestState(request_id=f"r{i}", initial_tokens=[0] * length)
        state._status = RequestStatus.DECODING
        assert cache.can_store_request_tokens(state, length)
        requests.append(FutureRequestState(state, True, 0, 1))
    expected, got = torch.full((2, 1, 8, 16), -1, dtype=torch.int32)
    for row, request in enumerate(requests):
        cache.fill_block_table(request.state.request_id, 0, 1, expected[:, row])
    fill_block_tables(cache, requests, got)
    for row, length in enumerate((1, 8, 9, 100, 30)):
        used = -(-length // 8)
        assert torch.equal(got[0, row, :used], expected[0, row, :used])
        assert used < 2 or len(set(got[0, row, :used].tolist())) == used
    assert (got[0, len(requests) :] == -1).all()  # padding rows are left alone
