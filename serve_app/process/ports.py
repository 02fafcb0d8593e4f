"""TCP ports for servers of ours on this machine."""

import random
import socket

_RANGE = range(20000, 30000)
_TRIES = 100


def free_port() -> int:
    """One that nobody listens on, and that nobody is given who asks for any.

    Ray opens dozens of those (/proc/sys/net/ipv4/ip_local_port_range), and Serve shares its port with whoever
    came first. Ray's workers begin at 10002, HAProxy's at 30000.
    """
    for port in random.sample(_RANGE, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_RANGE.start} and {_RANGE.stop}")
