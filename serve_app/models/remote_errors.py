"""Exceptions of other processes."""


def unwrap(exc: BaseException) -> BaseException:
    """The exception that was raised in the other process.

    Ray wraps it in a RayTaskError that has it as `cause`, or in a class made on the fly that
    inherits from RayTaskError and from the cause's class (ray/exceptions.py,
    `make_dual_exception_instance`, 2.60); `str()` of both is a traceback. Ray is not imported: the
    attribute says enough.
    """
    seen = {id(exc)}
    while isinstance(cause := getattr(exc, "cause", None), BaseException) and id(cause) not in seen:
        seen.add(id(cause))
        exc = cause
    return exc
