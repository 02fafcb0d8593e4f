"""What crosses a process border: requests going down, token events coming up, the state of a replica.

No torch, no Ray: the router, the ingress and the tests import this for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from actors.errors import ServingError


class ReplicaState(StrEnum):
    """Where a replica is in its sleep/wake cycle."""

    AWAKE = "awake"
    DRAINING = "draining"  # takes no new request; those in flight finish
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"  # for good: the health check replaces the replica
    RESTARTING = "restarting"  # its worker failed; another one is being started


class CardRoom(StrEnum):
    """What the wake of a replica would find on the card that it shares."""

    FREE = "free"  # room, or nobody keeps account of the card
    EVICT = "evict"  # others have to make room first
    QUEUE = "queue"  # others wait already, or it waits itself


class SleepMode(StrEnum):
    """What a sleep does with the requests in flight; the words are vLLM's."""

    WAIT = "wait"  # let them finish first
    ABORT = "abort"  # end them now with finish_reason "abort"
    KEEP = "keep"  # freeze them; they go on after the wake


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # a sleep in mode "abort"


class GrammarKind(StrEnum):
    """What `Grammar.text` is."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"  # of the whole output, in the syntax of Rust's regex crate
    CHOICE = "list of strings"  # JSON; the output is one of them
    CFG = "grammar"  # Lark, or EBNF as llama.cpp and xgrammar have it


@dataclass(frozen=True, slots=True)
class Grammar:
    """The only form that an output may have. Its end ends the output; `max_tokens` may do so before."""

    kind: GrammarKind
    text: str
    param: str  # the field of the request that it came in, for error messages


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. The defaults are OpenAI's; names beyond OpenAI's are vLLM's.

    What is None and has a default of the model's gets it on the replica
    (`actors.text.sampling_defaults`): only that has the checkpoint. Ranges are checked by
    `actors.text.validation.validate`, once, before a request enters the engine.
    """

    max_tokens: int | None = None  # None: the model's default, or else whatever the context leaves
    min_tokens: int = 0  # no end-of-sequence or stop token before this many tokens
    ignore_eos: bool = False
    # None in these five: the model's default, or else OpenAI's
    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None  # 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None  # over prompt and output; 1 is none
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # None: a fresh seed for every request
    stop: tuple[str, ...] = ()  # not part of the output
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; k: the sampled token's and those of the k likeliest
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's chat template."""

    # {"role", "content": str, ...}; the arguments of tool calls are objects, not JSON text
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    must_call: tuple[
        str, ...
    ] = ()  # the output must be a call of one of these tools; none: as it likes

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message, and has no beginning of its own."""
        return bool(self.template_kwargs.get("continue_final_message"))


# Of a request that has sent nothing yet: it may be what kills them, and is not begun again.
MAX_LOST_WORKERS = 2

Prompt = str | tuple[int, ...] | ChatPrompt  # text, token ids or messages


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, `n` continuations."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    # First event of each continuation: the prompt's text without token ids, and with `sampling.logprobs`
    # the log-probabilities of its tokens.
    # `sampling.max_tokens` may be 0 then, which it may not otherwise: nothing follows but the end.
    echo: bool = False
    stream: bool = True  # False: one event per continuation, at its end
    # Those that the tokenizer adds by itself, as BOS. None: to text, not to messages.
    add_special_tokens: bool | None = None
    avoid: frozenset[str] = frozenset()  # replicas that could not serve it; others are asked first
    lost_workers: int = 0  # that failed while they had it, of whichever replica
    trace: str | None = None  # the W3C traceparent of whoever asks
    # How long the replica may be idle behind it before it sleeps, in place of its own setting; math.inf: without end.
    keep_alive_s: float | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether only the prompt is wanted, with what the model makes of it."""
        return self.echo and self.sampling.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Instead of events, or behind them: why a replica does not answer, or not to the end."""

    error: ServingError
    replica_id: str
    lost_workers: int = 0  # see GenerateRequest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token under the model's own distribution (before temperature).

    Under a grammar: among the tokens that it allows, as vLLM has it; `top` lists no others.
    """

    token_id: int
    token: str  # may hold U+FFFD where a character spans tokens; `token_bytes` is exact
    token_bytes: bytes
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    top: tuple["TokenLogprob", ...] = ()  # likeliest first; empty inside `top` itself
    # So many of the first of `token_bytes` are not in the text that comes with it: all of a special token's.
    unwritten: int = 0


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a model writes what in its messages is not content; None where it has no form for it."""

    reasoning: str | None = None  # a name of `serve_app.openai.reasoning`
    tools: str | None = None  # a name of `serve_app.openai.tool_calls`
    in_reasoning: bool = False  # the prompt ends inside the reasoning, so the output begins there


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One or more new tokens of one continuation.

    Text and tokens need not line up: text that may still become part of a stop string, or the
    first bytes of a character, arrives with a later event. One with neither says that it has begun.
    """

    index: int  # which of the request's `n` continuations
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int  # the same in every event of a request
    finish_reason: FinishReason | None = None  # set in the last event of a continuation
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    # One per entry of `token_ids`; in an echo, one per token of the prompt.
    logprobs: tuple[TokenLogprob, ...] | None = None
    form: MessageForm | None = None  # in the first event of a continuation in a chat
    cached_tokens: int = 0  # of the prompt, found in the KV cache; known with the first token

    def __reduce__(self) -> tuple[type["TokenEvent"], tuple[object, ...]]:
        """By its constructor: what dataclasses do for slots looks the fields up again for each one sent."""
        return TokenEvent, (
            self.index,
            self.text,
            self.token_ids,
            self.prompt_tokens,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.form,
            self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class SleepCommand:
    level: int = 1  # 1: the host image stays; 2: it is released, a wake loads from disk
    mode: SleepMode = SleepMode.WAIT
    hold: bool = False  # True: only `wake_up` wakes it, requests get 503
    deep: bool = False  # True: what the process has of the device besides goes as well


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """What a sleeping process still holds of its device, in bytes; the parts add up.

    On a CPU the context is the process as it was before the model came into it, and graphs and
    torch's reserve are nothing.
    """

    context: int  # the CUDA context
    graphs: int  # the engine's graphs without their pool, and the kernels that came with them
    kept_layers: int  # weights that stay mapped
    torch_reserve: int  # what torch's allocator still holds, graphs apart
    other: int  # the rest: kernels loaded since, page tables of pinned memory

    @property
    def total(self) -> int:
        return self.context + self.graphs + self.kept_layers + self.torch_reserve + self.other

    def __str__(self) -> str:
        return (
            f"{self.total} bytes (context {self.context}, graphs {self.graphs}, kept layers "
            f"{self.kept_layers}, torch's reserve {self.torch_reserve}, other {self.other})"
        )


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """What a sleep or a wake did to device memory, as its effects saw it."""

    mapped_before_bytes: int
    mapped_after_bytes: int
    copied_bytes: int  # over the link, host to device
    released_bytes: int | None = None  # by a sleep: used on the device before it, minus after it
    # The same by this process' own figure, where there is one.
    own_released_bytes: int | None = None
    left: MemoryLeft | None = None  # after a sleep
    deep: bool = False  # nothing at all is left

    def __str__(self) -> str:
        text = (
            f"mapped {self.mapped_before_bytes} -> {self.mapped_after_bytes} bytes, "
            f"copied {self.copied_bytes}"
        )
        if self.released_bytes is None:
            return text
        own = "" if self.own_released_bytes is None else f" (own {self.own_released_bytes})"
        left = "nothing is left" if self.deep else f"left are {self.left}"
        return f"{text}; the device got {self.released_bytes}{own} back, {left}"


@dataclass(frozen=True, slots=True)
class DeviceMemoryStatus:
    """What the device itself said at the end of the last sleep or settled wake, in bytes.

    On a CPU: the machine's memory, and the resident set of this process.
    """

    total: int
    free: int
    own: int | None  # held by this process, by NVML; None where that cannot tell
    released_by_last_sleep: int | None  # used on the device before it, minus after it
    own_released_by_last_sleep: int | None  # the same of `own`
    left: MemoryLeft | None  # None while awake


@dataclass(frozen=True, slots=True)
class DeviceNow:
    """The device of a replica as it is now, in bytes."""

    id: str  # the card's uuid as `nvidia-smi -L` has it, or "cpu of node ..."
    name: str
    total: int
    free: int  # for everybody
    wake_bytes: int  # what a wake of this replica would map; 0 while awake


@dataclass(frozen=True, slots=True)
class CardTenant:
    """What a worker has of the card that it shares, in bytes."""

    model_id: str
    replica_id: str
    held: int  # mapped, or granted and about to be
    residue: int  # what its process has besides
    awake: bool
    kv: int = 0  # of `held`, the KV cache
    kv_most: int = 0  # that it may have
    moving: bool = False  # between awake and asleep, or asked to make room


@dataclass(frozen=True, slots=True)
class CardWait:
    """Who waits for memory of a shared card."""

    model_id: str
    replica_id: str
    size: int  # bytes
    waited_s: float
    limit_s: float  # that it waits at most
    reason: str  # what ends the wait; empty before the keeper has decided
    # Until those whom `reason` names may be asked; None: time alone changes nothing.
    turn_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class CardStatus:
    """A shared card, by its keeper's account; bytes."""

    id: str
    total: int  # of the card
    budget: int  # for all tenants together
    held: int  # by them
    others: int  # of processes that are no tenants, as far as that is sure
    drift: int  # by how much the driver's figure was more than `held`, when nothing moved
    tenants: tuple[CardTenant, ...]
    waiting: tuple[CardWait, ...]  # the next first
    seen_s: float  # by its node's clock, when it was first seen so: of two accounts the higher is the newer


@dataclass(frozen=True, slots=True)
class LastSleep:
    """Why a replica slept last."""

    cause: str  # as `sleepserve_sleeps_total` has it
    for_model: str  # that wanted its memory; empty: nobody did
    ago_s: float  # since it was asleep


@dataclass(frozen=True, slots=True)
class WakeReport:
    """What a wake moved, and what the device computed of the bytes where they landed."""

    copied_bytes: int
    link_s: float  # from the start of the first copy to the end of the last, by the device's clock
    link_gb_per_s: float  # 10^9 bytes a second
    checked_segments: int
    checked_bytes: int
    check_s: float  # that checking took besides; on a card it runs beside the copies
    intact: bool  # False: a segment differs from its manifest; the replica fails


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """What a model's `sleep.schedule` wants of it."""

    wanted: Literal["awake", "asleep", "neither"]
    until: float | None  # seconds since the epoch; None: for good


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's own account of itself. Old as soon as it is read: it may steer, never gate."""

    model_id: str
    replica_id: str
    process_id: int
    worker_process_id: int  # of what computes for it; 0 while a sleep has ended it
    worker_restarts: int  # workers that took the place of one that failed
    state: ReplicaState
    held: bool  # asleep because an operator said `hold`
    in_flight: int  # requests being generated
    waiting_for_wake: int
    idle_s: float  # seconds since the last inference request ended; 0 while one is in flight
    idle_timeout_s: float | None  # it sleeps when `idle_s` gets there; None: not by itself, for now
    sleeps: int
    wakes: int
    last_sleep_s: float | None
    last_wake_s: float | None
    weights_bytes: int  # size of the packed image
    mapped_bytes: int  # device memory mapped now: weights, KV, the graphs' pool
    kv_bytes: int
    weights_from: str  # "image", "disk" or "" while the image is released
    reason: str  # why it is in this state, in words
    max_model_len: int  # tokens of prompt and output together
    device: DeviceNow
    device_memory: DeviceMemoryStatus
    last_wake: WakeReport | None  # of the last wake whose bytes have arrived and were checked
    card: CardStatus | None = None  # None: it shares none, or the keeper does not answer
    # Whose word `idle_timeout_s` is: the setting of that name, "keep_alive", "schedule" or "pin".
    idle_timeout_from: str = "idle_timeout_s"
    schedule: ScheduleStatus | None = None  # None: it has none
    last_sleep: LastSleep | None = None  # None: it never slept
    deep: bool = False  # asleep, and its process has nothing of the device, or has ended
    kv_given_back_bytes: int = 0  # to neighbours on its card while it was awake, all together


# Of an image: packed from the checkpoint on disk, read from a file that has it packed, or copied from another node's
# holder.
Origin = Literal["disk", "file", "node"]


@dataclass(frozen=True, slots=True)
class HeldImage:
    """A weight holder's account of one image."""

    key: str
    bytes: int
    segments: int
    load_s: float
    lessees: int
    spilled: bool
    origin: Origin
    on_disk: bool = False  # there is a file of it, too
    device_bytes: int = 0  # of the weights; more than `bytes` where the image is compressed
