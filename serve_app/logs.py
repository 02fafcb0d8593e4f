"""Log lines of our packages go where Ray Serve's go: the replica's log file and its stderr."""

import logging

_PACKAGES = ("serve_app", "actors")
_CHATTY = ("ContinuousBatchingLogger",)  # of transformers: a dozen INFO lines at every start


def adopt_serve_handlers() -> None:
    """Give both packages' loggers the handlers and level Serve has set up in this replica.

    Call it in a replica's constructor. Serve configures the logger `ray.serve` alone, by the
    `logging_config` of the deployment, so without this our lines would be dropped.
    """
    serve = logging.getLogger("ray.serve")
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.level)
        logger.propagate = False
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
