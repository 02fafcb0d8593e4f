"""In processes of their own: what is set aside stays so."""

import json
import subprocess
import sys

SCRIPT = """
import gc, json, weakref
from serve_app.process.heap import set_aside

class Node:
    def __init__(self):
        self.me = self

def ring():
    node = Node()
    return weakref.ref(node)

gc.disable()
before, loaded = ring(), [Node() for _ in range(100_000)]
set_aside()
frozen, after = gc.get_freeze_count(), ring()
seen = len(gc.get_objects())
gc.collect()
print(json.dumps([before() is None, after() is None, frozen, seen, len(loaded)]))
"""


UNCOLLECTED = """
import gc, json
from serve_app.process.heap import uncollected

ran = []
gc.callbacks.append(lambda phase, info: ran.append(phase))
try:
    with uncollected():
        kept = [[] for _ in range(1_000_000)]
        during = len(ran)
        raise ImportError
except ImportError:
    enabled, seen = gc.isenabled(), len(gc.get_objects())
more = [[] for _ in range(1_000_000)]
print(json.dumps([during, enabled, seen, len(ran)]))
"""


GIVE_BACK = """
import ctypes, json, psutil
from serve_app.process.heap import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(1000) for _ in range(200_000)]
for piece in pieces:
    ctypes.memset(ctypes.c_void_p(piece), 1, 1000)
for piece in pieces[:-1]:  # the last one keeps the heap from shrinking by itself
    libc.free(piece)
before = psutil.Process().memory_full_info().uss
give_back()
print(json.dumps([before, psutil.Process().memory_full_info().uss]))
"""


def test_what_malloc_keeps_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True
    )
    before, after = json.loads(done.stdout)
    assert before - after > 150_000_000


def test_what_is_there_is_looked_at_once_more_and_what_comes_later_as_ever() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before_is_gone, after_is_gone, frozen, seen, loaded = json.loads(done.stdout)
    assert before_is_gone
    assert after_is_gone
    assert frozen >= loaded
    assert seen < loaded / 10


def test_nothing_is_collected_in_the_body_and_what_comes_behind_it_as_ever() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCOLLECTED], capture_output=True, text=True, check=True
    )
    during, enabled, seen, in_the_end = json.loads(done.stdout)
    assert during == 0
    assert enabled
    assert seen < 1000
    assert in_the_end > 0
