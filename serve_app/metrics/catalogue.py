"""Every Prometheus metric that we add to Serve's: name, unit, labels, help.

`EXPORTED` is what `/metrics` has, and what replicas tell Ray, where a colon in a name becomes an
underscore and every name begins with `ray_`. Names with `vllm:` mean what they mean in vLLM
(vllm/v1/metrics/loggers.py), with its buckets. The rest is counted where there is no replica, and told
to Ray only; `in_ray` makes those, once Ray runs.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ray.util.metrics import Counter

from actors import errors
from actors.holder.sources import ImageSource
from actors.observer import (
    Ending,
    GrantOutcome,
    GrowthOutcome,
    KvChange,
    SleepCause,
    WakeCause,
    WakePhase,
    WakeResult,
)
from actors.protocol import ReplicaState


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as on `/metrics`; a counter's ends in `_total`.
        labels: besides those that every metric has; their values, or none where the set is not closed.
        buckets: upper bounds, ascending, without infinity; of a histogram.
        in_ray: replicas tell it to Ray as well.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    in_ray: bool = True

    @property
    def series(self) -> tuple[tuple[str, ...], ...]:
        """Its labels' values in every combination; none where a set is not closed."""
        return tuple(itertools.product(*(map(str, values) for values in self.labels.values())))

    @property
    def in_vllm(self) -> bool:
        return self.name.startswith("vllm:")

    @property
    def ray_name(self) -> str:
        """What Ray is told; it puts `ray_` in front, and `_total` behind a counter's."""
        return self.name.replace(":", "_").removesuffix("_total")


# vLLM's; its token buckets end at the model's length, ours at a million, so that replicas can be summed.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)
# Ours.
_WAKE = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5),
    *(2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_BYTES_PER_S = tuple(
    1e9 * rate for rate in (0.5, 1, 2, 4, 8, 12, 16, 20, 25, 30, 40, 50, 60, 100, 200, 400)
)


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _histogram(
    name: str,
    text: str,
    buckets: tuple[float, ...],
    *,
    in_ray: bool = True,
    **labels: tuple[str, ...],
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, buckets, in_ray)


RUNNING = _gauge("vllm:num_requests_running", "Sequences in the engine's batches.")
WAITING = _gauge(
    "vllm:num_requests_waiting",
    "Sequences that wait for the engine, and requests that wait for the replica to wake.",
)
KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it.")
SLEEP_STATE = _gauge(
    "vllm:engine_sleep_state",
    "1 for what the engine is: awake, asleep at level 1 (weights_offloaded) or level 2 (discard_all).",
    sleep_state=("awake", "weights_offloaded", "discard_all"),
)
PROMPT_TOKENS = _counter("vllm:prompt_tokens_total", "Prompt tokens of sequences that got a token.")
PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries_total",
    "Prompt tokens that were looked up in the KV cache: all of `prompt_tokens_total`, unless "
    "`engine.prefix_caching` is off or the model has sliding windows.",
)
PREFIX_HITS = _counter(
    "vllm:prefix_cache_hits_total",
    "Prompt tokens that were found in the KV cache, and not computed again.",
)
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "Tokens generated.")
REQUESTS = _counter(
    "vllm:request_success_total",
    "Sequences that ended, by why; one request has `n`. `abort`: its client left, or a sleep ended it.",
    finished_reason=tuple(Ending),
)
TTFT = _histogram(
    "vllm:time_to_first_token_seconds",
    "From the request's arrival at the replica to a sequence's first token, a wake included.",
    _TTFT,
)
INTER_TOKEN = _histogram(
    "vllm:inter_token_latency_seconds",
    "Between two outputs of a sequence.",
    _PER_TOKEN,
    in_ray=False,  # Ray can only be told one value at a time, and its dashboard does not ask
)
TIME_PER_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "From first to last token, by token after the first; one value for each sequence.",
    _PER_TOKEN,
)
LATENCY = _histogram(
    "vllm:e2e_request_latency_seconds",
    "From the request's arrival at the replica to the end of a sequence.",
    _REQUEST,
)
QUEUE_TIME = _histogram(
    "vllm:request_queue_time_seconds",
    "From the engine's queue into a batch. A wait for a wake comes before it.",
    _REQUEST,
)
PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds", "From the queue's end to the first token.", _REQUEST
)
DECODE_TIME = _histogram(
    "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST
)
INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "From the queue's end to the last token.", _REQUEST
)
REQUEST_PROMPT_TOKENS = _histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of each sequence that ended.", _TOKENS
)
REQUEST_GENERATION_TOKENS = _histogram(
    "vllm:request_generation_tokens", "Generated tokens of each sequence that ended.", _TOKENS
)

SLEEPS = _counter(
    "sleepserve_sleeps_total",
    "Sleeps, by what asked for them and how deep they are. `room`: an idle model's, for another one; "
    "`preempted`: a busy one's. Who falls asleep deeper is counted once more.",
    cause=tuple(SleepCause),
    level=("1", "2", "deep"),
)
SLEEP_SECONDS = _histogram(
    "sleepserve_sleep_seconds", "How long sleeps took, after the drain.", _WAKE
)
RELEASED_BYTES = _counter(
    "sleepserve_released_bytes_total", "Device memory that sleeps gave back, as the device tells."
)
WAKES = _counter(
    "sleepserve_wakes_total",
    "Wakes, by what caused them and what came of it. `refused`: not possible then, and still asleep.",
    cause=tuple(WakeCause),
    result=tuple(WakeResult),
)
WAKE_SECONDS = _histogram(
    "sleepserve_wake_seconds",
    "From the start of a wake until requests run. Their first layers wait for their bytes.",
    _WAKE,
)
WAKE_PHASE_SECONDS = _histogram(
    "sleepserve_wake_phase_seconds",
    "Parts of wakes: `resume` (after a deep sleep: the process again as it was, or another one), `image` (got again after level 2), `map` (and copies begun), `copy` (the bytes on "
    "the link), `check` (checksums). The last two run beside the first requests.",
    _WAKE,
    phase=tuple(WakePhase),
)
WAKE_CHECKS = _counter(
    "sleepserve_wake_checks_total",
    "Wakes whose bytes were compared with what had been packed.",
    result=("intact", "corrupted"),
)
WAKE_WAIT_SECONDS = _histogram(
    "sleepserve_wake_wait_seconds",
    "What requests waited that did not find the replica awake, also those that gave up.",
    _WAKE,
)
GRANTS = _counter(
    "sleepserve_card_grants_total",
    "Times that the keeper of a shared card was asked for memory, by what came of it. `after_room`: others "
    "slept for it. `alone`: no keeper was there, and the driver decided.",
    outcome=tuple(GrantOutcome),
)
GRANT_SECONDS = _histogram(
    "sleepserve_card_grant_seconds",
    "From asking the keeper of a shared card for memory to its answer.",
    (0.0005, 0.001, 0.002, *_WAKE),
)
DRAINS_TAKEN_BACK = _counter(
    "sleepserve_card_drains_taken_back_total",
    "Drains of busy models, to make room on a shared card, that ended with the model awake: nobody wanted the room "
    "any more.",
)
GROWTH = _counter(
    "sleepserve_card_growth_total",
    "Times that the keeper of a shared card was asked for more KV cache of a model that is awake, by its answer. "
    "Asked again ten times a second while sequences wait for blocks.",
    outcome=tuple(GrowthOutcome),
)
KV_PARTS = _counter(
    "sleepserve_kv_parts_total",
    "Parts of the KV cache that came while the model was awake on a shared card, and that went back.",
    change=tuple(KvChange),
)
KV_PARTS_BYTES = _counter(
    "sleepserve_kv_parts_bytes_total",
    "Bytes of these parts.",
    change=tuple(KvChange),
)
CARD_WAITING = _gauge(
    "sleepserve_card_waiting",
    "1 while a replica waits for memory of a shared card; summed, who stands in the queues.",
)
RESTORED_BYTES = _counter(
    "sleepserve_restored_bytes_total", "Bytes that wakes copied to the device."
)
RESTORE_RATE = _histogram(
    "sleepserve_restore_bytes_per_second", "How fast each wake's copies were.", _BYTES_PER_S
)
REFUSED = _counter(
    "sleepserve_requests_refused_total",
    "Requests that the replica refused, by class of `actors/errors.py`.",
    error=tuple(
        kind.__name__
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.ServingError)
        and kind is not errors.ServingError
    ),
)
WORKER_RESTARTS = _counter(
    "sleepserve_worker_restarts_total", "Workers that took the place of one that failed."
)
FASTLOAD = _counter(
    "sleepserve_fastload_total",
    "Images that replicas asked for: from the object store (`hit`), from disk because nobody had "
    "one (`miss`), or from disk because something went wrong (`fallback`).",
    result=("hit", "miss", "fallback"),
)
IMAGES_OBTAINED = _counter(
    "sleepserve_images_obtained_total",
    "The same by way: `image`, or why the replica read its weights from disk.",
    way=tuple(ImageSource),
)
DEVICE_MEMORY = _gauge(
    "sleepserve_device_memory_bytes",
    "Device memory of a replica: `mapped` weights, KV cache and graphs' pool; the `rest`, as context "
    "and kernels, as it was at the last sleep or wake.",
    kind=("mapped", "rest"),
)
DEVICE_SAVED = _gauge(
    "sleepserve_device_saved_bytes",
    "Device memory that a sleeping replica does without: what its wake would map.",
)
DEVICE_SAVED_TIME = _counter(
    "sleepserve_device_saved_byte_seconds_total",
    "The same, summed over time; divided by 2^30, GiB seconds.",
)
IMAGE_BYTES = _gauge(
    "sleepserve_image_bytes",
    "The image that a replica uses, in host memory, where replicas of a node share one, and what its weights take on "
    "the device, which is more where it is compressed; 0 while it is released.",
    kind=("host", "device"),
)
# Known to the ingress only.
REPLICAS = Metric(
    "sleepserve_replicas",
    Kind.GAUGE,
    "Replicas that answered, by state.",
    {"state": tuple(ReplicaState)},
    in_ray=False,
)
SILENT_REPLICAS = Metric(
    "sleepserve_silent_replicas",
    Kind.GAUGE,
    "Replicas that did not answer in time; their counts are those they told last.",
    in_ray=False,
)

OF_REPLICAS = (
    *(RUNNING, WAITING, KV_USAGE, SLEEP_STATE),
    *(PROMPT_TOKENS, PREFIX_QUERIES, PREFIX_HITS, GENERATION_TOKENS, REQUESTS),
    *(TTFT, INTER_TOKEN, TIME_PER_TOKEN, LATENCY),
    *(QUEUE_TIME, PREFILL_TIME, DECODE_TIME, INFERENCE_TIME),
    *(REQUEST_PROMPT_TOKENS, REQUEST_GENERATION_TOKENS),
    *(SLEEPS, SLEEP_SECONDS, RELEASED_BYTES),
    *(WAKES, WAKE_SECONDS, WAKE_PHASE_SECONDS, WAKE_CHECKS, WAKE_WAIT_SECONDS),
    *(
        GRANTS,
        GRANT_SECONDS,
        DRAINS_TAKEN_BACK,
        GROWTH,
        KV_PARTS,
        KV_PARTS_BYTES,
        CARD_WAITING,
        RESTORED_BYTES,
        RESTORE_RATE,
        REFUSED,
        WORKER_RESTARTS,
        FASTLOAD,
        IMAGES_OBTAINED,
    ),
    *(DEVICE_MEMORY, DEVICE_SAVED, DEVICE_SAVED_TIME, IMAGE_BYTES),
)
EXPORTED = (*OF_REPLICAS, REPLICAS, SILENT_REPLICAS)

SCALING_DECISIONS = _counter(
    "sleepserve_scaling_decisions_total",
    "Decisions of the scaling policy that differ from the one before, by kind.",
    application=(),
    deployment=(),
    why=(),
)
SCALING_ERRORS = _counter(
    "sleepserve_scaling_errors_total",
    "Times that the scaling policy failed; the number of replicas stayed.",
    application=(),
    deployment=(),
)
IMAGE_LOADS = _counter(
    "sleepserve_image_loads_total",
    "Images that a node's holder put into its store: packed from a checkpoint on `disk`, read from a `file` that has "
    "it packed, or from another `node`.",
    origin=("disk", "file", "node"),
)
IMAGE_LOADED_BYTES = _counter(
    "sleepserve_image_loaded_bytes_total",
    "Bytes of those images.",
    origin=("disk", "file", "node"),
)
IMAGE_EVICTIONS = _counter(
    "sleepserve_image_evictions_total",
    "Images that left a node's store for others (`host.memory_budget_gib`): to a `file`, or to `nothing`.",
    to=("file", "nothing"),
)
RAY_ONLY = (
    SCALING_DECISIONS,
    SCALING_ERRORS,
    IMAGE_LOADS,
    IMAGE_LOADED_BYTES,
    IMAGE_EVICTIONS,
)


def in_ray(metric: Metric) -> Counter:
    """One of `RAY_ONLY`, once Ray runs."""
    counter = Counter(metric.ray_name, description=metric.help, tag_keys=tuple(metric.labels))
    begin_at_zero(counter, metric)
    return counter


def begin_at_zero(counter: Counter, metric: Metric, tags: Mapping[str, str] | None = None) -> None:
    """Have Ray tell of every series that is known beforehand, so that its first event is an increase.

    `inc` refuses 0; what it hands a value on to does not (ray/util/metrics.py, 2.60).

    Args:
        tags: besides the metric's own labels.
    """
    for values in metric.series:
        counter._record(0, {**(tags or {}), **dict(zip(metric.labels, values, strict=True))})


def common_labels(metric: Metric) -> tuple[str, ...]:
    """Labels that a metric has besides its own.

    vLLM's have `engine`: a replica's id where each has a value of its own, "all" for sums.
    """
    if metric.in_vllm:
        return "model_name", "engine"
    if metric.kind is Kind.GAUGE and metric not in (REPLICAS, SILENT_REPLICAS):
        return "model_name", "replica"
    return ("model_name",)
