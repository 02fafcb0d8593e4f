"""Limits of the engine. Kept apart from the engine so that reading them needs no torch."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# docs/results/pages: what of the KV cache holds no token, and what it costs
DEFAULT_PAGE_SIZE = 32
REQUESTS_ON_CARD = 256  # in one step, at most, unless told otherwise
# More than anybody uses; what is beyond them is a typo, and no memory is asked for by it.
_MOST_POSITIONS = 2**31 - 1  # an int32 holds them
_MOST_BATCH_TOKENS = 2**20
_MOST_REQUESTS = 2**16
_MOST_PAGE_TOKENS = 2**16
_MOST_THREADS = 1024


class EngineConfig(BaseModel):
    """What one replica's engine may use.

    The KV cache holds `num_blocks * page_size` tokens, shared by all sequences of the replica. What is
    absent here, `actors.engine.sizing` chooses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute; `auto` takes CUDA when there is a device."
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_POSITIONS,
        description="Tokens of prompt and output together; the checkpoint's own limit, or what the "
        "KV cache holds, whichever is smaller, when absent. Of a model with LongRoPE it says which "
        "frequencies hold, for all sequences: those for long ones if it is more than the length of training.",
    )
    page_size: int = Field(
        default=DEFAULT_PAGE_SIZE,
        gt=0,
        le=_MOST_PAGE_TOKENS,
        description="Tokens in a page of the KV cache. What a sequence's last page does not hold is lost to "
        "others.",
    )
    prefix_caching: bool = Field(
        default=True,
        description="Remember prompts and answers in what of the KV cache nobody needs, in full pages, and do "
        "not compute again what a prompt begins with and is remembered. A sleep forgets it all. Of no effect "
        "for models with sliding windows, which remember nothing.",
    )
    min_shared_prefix_tokens: int = Field(
        default=256,
        gt=0,
        le=_MOST_POSITIONS,
        description="Remembered tokens from which on a prompt takes its beginning from the KV cache "
        "(prefix_caching); for fewer, reading the cache takes longer than computing them.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the card's memory for this replica: context, weights, activations, "
        "CUDA graphs and, with what is left, the KV cache. Where other processes hold memory when the "
        "replica starts, the share of what they leave. Of no effect on CPU, and with `card.memory_budget`.",
    )
    num_blocks: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_POSITIONS,
        description="Blocks in the KV cache; a block is one page in every layer. When absent, what "
        "gpu_memory_utilization has room for, but no more than max_requests_per_batch sequences of "
        "full length need; room for 16384 tokens on CPU. With `card.memory_budget` the most that the model may "
        "have: when absent, what a model alone on the card has room for.",
    )
    max_batch_tokens: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_BATCH_TOKENS,
        description="Tokens computed in one step, prompts and decodes together. When absent, 4096 (1024 "
        "for attention that writes scores out), fewer where memory is tight; 2048 on CPU.",
    )
    max_requests_per_batch: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_REQUESTS,
        description=f"Sequences computed in one step. When absent, {REQUESTS_ON_CARD}, fewer where memory is tight; "
        "32 on CPU.",
    )
    use_cuda_graphs: bool = Field(
        default=True,
        description="Replay CUDA graphs: of decode steps, captured for batches of 1, 2, 4, ... and "
        "max_requests_per_batch sequences, and of steps with prompts of up to 2048 tokens; of no effect on "
        "CPU and for models with sliding windows.",
    )
    step_target_ms: float = Field(
        default=15.0,
        gt=0,
        description="What a step may take that computes prompts beside sequences that decode; each of those "
        "waits so long for its next token. Of long prompts it computes parts. Where decoding alone takes more "
        "than half of it, twice that; where many prompts wait and few sequences decode, longer. Of no effect on CPU "
        "and for models with sliding windows.",
    )
    use_torch_compile: bool = Field(
        default=True,
        description="Compile the decoder layers once no request has been in flight for 2 s, at the latest "
        "60 s after the start, and capture the graphs again in the next such time; of no effect without "
        "CUDA graphs.",
    )
    use_async_batching: bool = Field(
        default=True,
        description="Prepare the next step while the device computes this one, which gives more "
        "tokens per second; of no effect on CPU.",
    )
    quantize_activations: bool = Field(
        default=True,
        description="Of FP8 checkpoints that were made for it (W8A8), quantise the inputs of projections to FP8, too, "
        "as their makers and vLLM do. Prompts and many sequences at once are faster. Without, tokens are those of the "
        "dequantised weights. For an H100 or H200 and dense models in bfloat16; of no effect elsewhere.",
    )
    cpu_threads: int | None = Field(
        default=None,
        gt=0,
        le=_MOST_THREADS,
        description="Threads of torch's operators on the CPU; torch's default when absent, and 1 beside "
        "a GPU.",
    )
    max_events_per_s: float = Field(
        default=3500.0,
        gt=0,
        description="Streamed events per second that this replica sends up at most; above it, the "
        "tokens of a stream are coalesced into fewer events.",
    )

    @model_validator(mode="after")
    def _every_sequence_has_a_token(self) -> Self:
        requests, tokens = self.max_requests_per_batch, self.max_batch_tokens
        if requests is not None and tokens is not None and requests > tokens:
            raise ValueError(
                f"max_requests_per_batch is {requests}, but max_batch_tokens {tokens}: a step "
                "computes a token of each sequence, so lower the one or raise the other"
            )
        return self
