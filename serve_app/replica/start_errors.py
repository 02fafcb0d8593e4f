"""What keeps a model from starting, in words for whoever configured it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from actors.errors import CannotStart

logger = logging.getLogger(__name__)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Of a ValueError of our own, which names what the configuration asks for, nobody needs a traceback."""
    try:
        yield
    except ValueError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
        if not raised_in.startswith(("actors.", "serve_app.")):
            raise
        logger.debug("this model cannot start", exc_info=True)
        raise CannotStart(" ".join(str(error).split())) from None
