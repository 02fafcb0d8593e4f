"""Bytes of an object of the store that another process writes."""

import gc
import mmap
import resource
import tempfile
import weakref

import numpy as np

from actors.image.store import SHARED_MEMORY, map_pages, writable


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


def test_mapped_pages_are_written_without_faults() -> None:
    pages = 1000
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(pages * mmap.PAGESIZE)
        part = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)[100:-100]
        map_pages(part)
        before = page_faults()
        part[:] = 1
        assert page_faults() - before < pages / 2


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
