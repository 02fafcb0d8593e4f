"""Log lines of our packages go where Ray Serve's go: the replica's log file and its stderr."""

import logging
from collections.abc import Callable, Sequence

_PACKAGES = ("serve_app", "actors")
_CHATTY = ("ContinuousBatchingLogger",)  # of transformers: a dozen INFO lines at every start


def adopt_serve_handlers() -> None:
    """Give both packages' loggers the handlers and level Serve has set up in this replica.

    Call it in a replica's constructor. Serve configures the logger `ray.serve` alone, by the
    `logging_config` of the deployment, so without this our lines would be dropped.
    """
    serve = logging.getLogger("ray.serve")
    _hand_over(serve.handlers, serve.level)


def log_to_stderr() -> None:
    """The same in an actor that is no replica; Ray keeps what it writes."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s - %(message)s"))
    _hand_over([handler], logging.INFO)


class _Forwarder(logging.Handler):
    def __init__(self, send: Callable[[int, str, str], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(record.levelno, record.name, self.format(record))
        except Exception:  # noqa: BLE001  # logging's way: who logs must not fail by it
            self.handleError(record)


def log_to(send: Callable[[int, str, str], None]) -> None:
    """The same in an actor whose lines somebody else writes.

    Args:
        send: gets level, logger and text with a traceback, if there is one; from any thread.
    """
    _hand_over([_Forwarder(send)], logging.INFO)


def _hand_over(handlers: Sequence[logging.Handler], level: int) -> None:
    """Have these handlers, and nobody else, get the lines of both packages."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = list(handlers)
        logger.setLevel(level)
        logger.propagate = False
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
