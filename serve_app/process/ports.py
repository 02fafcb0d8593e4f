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


def listen_error(host: str, port: int) -> OSError | None:
    """Why nobody more can listen there; on every interface, for 0.0.0.0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
