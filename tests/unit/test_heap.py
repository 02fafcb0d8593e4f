"""In processes of their own: what is set aside stays so."""

import json
import subprocess
import sys

SCRIPT = """
import gc, json, weakref
from serve_app.heap import set_aside

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


def test_what_is_there_is_looked_at_once_more_and_what_comes_later_as_ever() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before_is_gone, after_is_gone, frozen, seen, loaded = json.loads(done.stdout)
    assert before_is_gone
    assert after_is_gone
    assert frozen >= loaded
    assert seen < loaded / 10
