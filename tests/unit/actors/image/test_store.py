"""Bytes of an object of the store that somebody writes."""

import gc
import weakref

import numpy as np

from actors.image.store import writable


def test_written_bytes_are_the_views_and_keep_it() -> None:
    whole = np.zeros(100, np.uint8)
    view = whole.view()
    view.flags.writeable = False
    kept = weakref.ref(view)
    part = writable(view, 10, 20)[5:]
    del view
    gc.collect()
    part[:] = 1
    assert whole.sum() == 15
    assert whole[15:30].all()
    assert kept() is not None
    del part
    gc.collect()
    assert kept() is None
