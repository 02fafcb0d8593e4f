"""Limits of the engine. Kept apart from the engine so that reading them needs no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineConfig(BaseModel):
    """What one replica's engine may use.

    The KV cache holds `num_blocks * page_size` tokens, shared by all sequences of the replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; `auto` takes CUDA when there is a device."
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of prompt and output together; the checkpoint's own limit, or what the "
        "KV cache holds, whichever is smaller, when absent.",
    )
    page_size: int = Field(default=256, gt=0, description="Tokens in a page of the KV cache.")
    num_blocks: int = Field(
        default=64, gt=0, description="Blocks in the KV cache; a block is one page in every layer."
    )
    max_batch_tokens: int = Field(
        default=2048, gt=0, description="Tokens computed in one step, prompts and decodes together."
    )
    max_requests_per_batch: int = Field(
        default=32, gt=0, description="Sequences computed in one step."
    )
    use_cuda_graphs: bool = Field(
        default=True,
        description="Replay decode steps from CUDA graphs, captured for batches of 1, 2, 4, ... and "
        "max_requests_per_batch sequences; of no effect on CPU and for models with sliding windows.",
    )
    use_async_batching: bool = Field(
        default=False,
        description="Prepare the next step while the device computes this one: more tokens per "
        "second for many sequences, but a later first token; of no effect on CPU.",
    )
    cpu_threads: int | None = Field(
        default=None, gt=0, description="Threads of a CPU replica; torch's default when absent."
    )
    max_events_per_s: float = Field(
        default=1000.0,
        gt=0,
        description="Streamed events per second that this replica sends up at most; above it, the "
        "tokens of a stream are coalesced into fewer events.",
    )
