"""Python's garbage collector in a process that serves."""

import gc


def set_aside() -> None:
    """Collect once, and leave what is there now out of all later collections.

    One of all the objects of a replica, 420,000 of them, took 0.2 s, in which no other thread gets the
    interpreter's lock; and they come at any moment, in the middle of a wake for one.
    """
    gc.collect()
    gc.freeze()
