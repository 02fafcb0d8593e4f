"""The exceptions that cross process borders.

ServingError
  InvalidRequest          the caller's fault: 4xx
    ContextLengthExceeded   prompt plus max_tokens does not fit the model
    UnsupportedParameter    understood, but this server cannot honour it
    ModelNotFound           no such model here
    PayloadTooLarge         the HTTP body is over the limit
  Unavailable             try again after `retry_after_s`: 503 (QueueFull: 429)
    QueueFull               more requests wait than the configuration allows
    WakeTimeout             the replica did not wake in time; it may still do so
    DrainTimeout            requests in flight did not finish in time, so the replica stays awake
    HeldAsleep              an operator put the model to sleep with `hold`
    FrozenTooLong           a sleep froze the request, and no wake came in time
    DeviceMemoryShort       the card has not enough memory free; the replica stays asleep
      NoRoom                  its keeper found no room on the card in time
      NeverFits               it is more than the card ever has for it
    ShuttingDown            the replica is going away
  ReplicaFailed           ours; the worker or the replica is replaced: 500
    DeviceMemoryError       mapping or copying device memory failed
    LayoutMismatch          image and module disagree
    ImageMissing            the holder has no such image and cannot make it
    WeightsCorrupted        bytes do not match their digest
    StoreFull               the image does not fit into the object store or /dev/shm
      HostMemoryFull          or into what images may take of the host's memory
    HolderLost              the holder of the image went away
    EngineDied              the generation loop ended with an error
    WorkerLost              the process that computes ended
    CannotStart             the model does not start as it is configured, on the card as it is

Every class takes its arguments by position, so that it survives pickling between Ray processes.
"""


class ServingError(Exception):
    """Anything this project raises on purpose. `str()` of it is fit for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidRequest(ServingError):
    """The caller's fault. `param` names the offending field, as OpenAI's error body does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.args = (message, param)


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus `max_tokens` does not fit the model's context."""


class UnsupportedParameter(InvalidRequest):
    """The field is known, but this server cannot honour the value."""


class ModelNotFound(InvalidRequest):
    """The named model is not served here."""


class PayloadTooLarge(InvalidRequest):
    """The HTTP body is larger than the limit."""


class Unavailable(ServingError):
    """Not now: try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.args = (message, retry_after_s)


class QueueFull(Unavailable):
    """More requests wait than the configuration allows."""


class WakeTimeout(Unavailable):
    """The replica did not wake within the request's patience."""


class DrainTimeout(Unavailable):
    """Requests in flight did not finish in time; the replica stays awake."""


class HeldAsleep(Unavailable):
    """An operator put the model to sleep with `hold`; only `wake_up` ends it."""


class FrozenTooLong(Unavailable):
    """A sleep in mode `keep` froze the request, and no wake came in time."""


class DeviceMemoryShort(Unavailable):
    """The device has not as much free memory as was asked for; what was mapped is given back."""


class NoRoom(DeviceMemoryShort):
    """The keeper of the card found no room in time; `retry_after_s` is from its queue."""


class NeverFits(DeviceMemoryShort):
    """It would not fit if all others slept; the configuration has to change."""


class ShuttingDown(Unavailable):
    """The replica is going away."""


class ReplicaFailed(ServingError):
    """The replica cannot serve any more; Serve's health check replaces it."""


class DeviceMemoryError(ReplicaFailed):
    """Mapping, unmapping or copying memory failed."""


class LayoutMismatch(ReplicaFailed):
    """An image and a module or arena disagree about where tensors sit."""


class ImageMissing(ReplicaFailed):
    """A holder has no image of that key, and no checkpoint that would make it."""


class WeightsCorrupted(ReplicaFailed):
    """Bytes do not match the digest in the manifest."""


class StoreFull(ReplicaFailed):
    """An image does not fit into the object store or into /dev/shm."""


class HostMemoryFull(StoreFull):
    """An image does not fit into `host.memory_budget_gib`, beside those that are in use. `file` is one of it."""

    def __init__(self, message: str, file: str | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.args = (message, file)


class HolderLost(ReplicaFailed):
    """The holder of an image went away, or does not answer."""


class EngineDied(ReplicaFailed):
    """The generation loop ended with an error."""


class WorkerLost(ReplicaFailed):
    """The process that computes for a replica ended."""


class CannotStart(ReplicaFailed):
    """The model does not start as it is configured, on the card as it is; says what is needed and what to change."""
