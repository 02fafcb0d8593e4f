"""transformers' continuous batching over a model of one tiny layer, for tests of what surrounds it."""

from typing import Any

import transformers as tf
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from actors.engine.batching.pipeline import PipelinedManager


def manager_on_cpu(**limits: Any) -> PipelinedManager:
    """A manager whose loop does not run, without asynchronous batching.

    Args:
        limits: of ContinuousBatchingConfig.
    """
    config = tf.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return PipelinedManager(
        tf.AutoModelForCausalLM.from_config(config, attn_implementation="paged|eager"),
        generation_config=tf.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            max_memory_percent=0.5, use_async_batching=False, **limits
        ),
    )
