"""Whether something is kept by nobody any more."""

import time
import weakref
from collections.abc import Sequence


def is_let_go(refs: Sequence[weakref.ref[object]]) -> bool:
    """Soon: a thread may still be on its way out of what failed."""
    assert refs
    limit_s = time.monotonic() + 5
    while any(ref() is not None for ref in refs) and time.monotonic() < limit_s:
        time.sleep(0.01)
    return all(ref() is None for ref in refs)
