"""What a replica and its worker say to each other. No torch, no Ray: both sides import this.

Down go sequences and cancels, one message for all of a turn of the replica's event loop, and calls. Up come
the tokens of all sequences, one message a step, the answers to calls, and the worker's state.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

import actors.errors
from actors.engine.outputs import EngineOutput, EngineStats, RawLogprob
from actors.errors import ReplicaFailed, ServingError
from actors.protocol import DeviceNow, Grammar, MemoryChange, MemoryLeft, WakeReport
from actors.text.sampling_defaults import ResolvedSampling

# --- down ---


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """Continuations of one prompt to generate. It passed `actors.text.validation.check_request`."""

    seeds: dict[str, int]  # by the id of each sequence, never used before with this worker
    prompt_ids: tuple[int, ...]
    params: ResolvedSampling
    stop_ids: frozenset[int]  # end-of-sequence and stop tokens


class Sequences(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the engine is to begin and to end; in this order."""

    new: list[NewRequest]
    cancelled: list[str]


class Wake(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered when the engine runs; `Settled` follows when the bytes have arrived and were checked."""


class Sleep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered when the memory has been given back."""

    level: int
    deep: bool = False


class Settle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered once the last wake is over, and all KV cache is mapped that comes unasked."""


class FinishCompiling(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered once nothing is compiled any more, and what was is in use."""


class Score(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with the log-probabilities of a prompt, and of the `top` likeliest tokens in each place."""

    token_ids: tuple[int, ...]
    top: int


class CheckGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered once the grammar is compiled, or refused."""

    grammar: Grammar


class ReadDevice(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with what the device says now."""

    node: str


class GrowKv(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Short`: answered with what came."""

    granted: bool


class GiveBackKv(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with what went: so many bytes, as far as nobody uses them."""

    size: int


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered when the engine has ended. Nothing may follow."""


Task: TypeAlias = (
    Wake
    | Sleep
    | Settle
    | FinishCompiling
    | Score
    | CheckGrammar
    | ReadDevice
    | GrowKv
    | GiveBackKv
    | Stop
)


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A task with one answer."""

    number: int
    task: Task


class Abandon(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody waits for that answer any more."""

    number: int


class Begin(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Sized`: what it names may be mapped, unless there is an error."""

    error: Exception | None = None


ToWorker: TypeAlias = Sequences | Call | Abandon | Begin

# --- up ---


class Woke(msgspec.Struct, frozen=True):
    """The answer to `Wake`."""

    change: MemoryChange
    resume_s: float | None  # to have back what a deep sleep had given back of the device
    image_s: float | None  # to get the image again, after a level 2 sleep
    map_s: float  # to map, to begin the copies and to resume


class KvResized(msgspec.Struct, frozen=True):
    """The answer to `GrowKv` and `GiveBackKv`: parts of the KV cache that came, or went, and their bytes."""

    parts: int = 0
    size: int = 0


class WorkerFacts(msgspec.Struct, frozen=True):
    """What does not change while a worker lives."""

    process_id: int
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    weights_bytes: int  # on the device
    kv_bytes: int  # at most
    # Of these, what a wake maps where a card is shared; 0: all come with every wake.
    kv_first_bytes: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """What a worker was a moment ago; bytes unless said otherwise."""

    engine: EngineStats
    mapped_bytes: int
    wake_bytes: int  # what a wake would take now; 0 while awake
    image_origin: str  # "" while the image is released
    image_bytes: int  # of host memory
    device_total: int  # this and the next three: by the device, at the last sleep or settled wake
    device_free: int
    device_held: int  # by this process
    device_own: int | None  # the same as seen from outside, where that can be told
    left: MemoryLeft | None  # None while awake
    last_wake: WakeReport | None  # of the last wake whose bytes have arrived and were checked
    residue: int = 0  # of a card, by this process, beside what is mapped; at the last sleep
    suspended: bool = False  # the process has nothing of its device
    can_suspend: bool = False  # the driver has not refused yet to take what the process has
    kv_mapped: int = 0  # of the KV cache
    kv_spare: int = 0  # of that, behind what sequences have and the first part


class Starting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A sign of life: at once, and every second until `Ready`."""


class Sized(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the worker is about to map for its first steps, all at once; it waits for `Begin`."""

    process_id: int
    card: str
    card_bytes: int
    size: int


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It is asleep, and takes calls from now on."""

    facts: WorkerFacts
    state: WorkerState


class Outputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step of the engine."""

    outputs: list[EngineOutput]


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The outcome of a call."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: Exception | None = None


class Settled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The bytes of a wake have arrived and were checked; if they are not what was packed, `Failed` came first."""

    report: WakeReport


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ten times a second at most, when anything has changed, and once a second in any case; before every answer."""

    state: WorkerState


class Short(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sequences wait for blocks, and there could be so much more KV cache. `GrowKv` follows."""

    size: int


class Obtained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker has an image; `source` is one of `actors.holder.sources.ImageSource`."""

    source: str


class Logged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line of the worker's log, which has no file of its own."""

    level: int  # of `logging`
    name: str  # of the logger
    text: str


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker can serve no more."""

    error: Exception


ToReplica: TypeAlias = (
    Starting
    | Sized
    | Ready
    | Outputs
    | Answer
    | Settled
    | State
    | Short
    | Obtained
    | Logged
    | Failed
)
Send: TypeAlias = Callable[[ToReplica], None]  # from any thread

# What calls are answered with; None where nothing is listed.
ANSWERS: dict[type, Any] = {
    Wake: Woke,
    Sleep: MemoryChange,
    Score: list[RawLogprob | None],
    ReadDevice: DeviceNow,
    GrowKv: KvResized,
    GiveBackKv: KvResized,
}


def encode_error(error: object) -> object:
    """For msgspec: an exception of ours as its class's name and its arguments.

    Raises:
        NotImplementedError: it is no ServingError; who catches another one says what it was.
    """
    if isinstance(error, ServingError):
        return type(error).__name__, error.args
    raise NotImplementedError(f"cannot send {error!r}")


def decode_error(_: type, sent: Any) -> ServingError:
    """The reverse. A class that is not known here comes as ReplicaFailed."""
    name, args = sent
    kind = getattr(actors.errors, name, None)
    if kind is None:
        return ReplicaFailed(str(args[0]))
    error = kind(*args)
    assert isinstance(error, ServingError)
    return error
