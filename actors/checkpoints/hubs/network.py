"""Is there a way to a server? Asked before the hubs' libraries, which retry for half a minute."""

import os
import queue
import socket
import threading
import urllib.request
from typing import NamedTuple
from urllib.parse import urlsplit

from actors.checkpoints.errors import WrongRequest

_TIMEOUT_S = 2.0
_PORTS = {"https": 443, "socks5": 1080, "socks5h": 1080}
_PROXY_VARIABLES = {"http_proxy", "https_proxy", "all_proxy"}


def check_addresses(endpoint_variable: str) -> None:
    """Of the hub and of proxies, as the environment has them; a hub's library falls over a wrong one as it is imported.

    Raises:
        WrongRequest: one is no address; names its variable, and not its value, where a password may stand.
    """
    for name, address in os.environ.items():
        if name == endpoint_variable or name.lower() in _PROXY_VARIABLES:
            try:
                _ = urlsplit(address if "://" in address else f"http://{address}").port
            except ValueError as error:
                raise WrongRequest(f"{name} is no address: {error}") from error


class Route(NamedTuple):
    """The first machine on the way: the server itself, or the proxy that the environment names."""

    host: str
    port: int
    proxy: str | None = None


def route_to(endpoint: str) -> Route:
    target = urlsplit(endpoint)
    host = target.hostname or endpoint
    proxies = urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy is None or urllib.request.proxy_bypass(host):
        return Route(host, target.port or _PORTS.get(target.scheme, 80))
    server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return Route(server.hostname or proxy, server.port or _PORTS.get(server.scheme, 80), proxy)


def why_no_connection(route: Route) -> str | None:
    """The reason after two seconds at most, or None: a resolver alone may take half a minute."""
    outcome: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((route.host, route.port), timeout=_TIMEOUT_S).close()
        except OSError as error:
            outcome.put(str(error))
        else:
            outcome.put(None)

    threading.Thread(target=connect, name="network-probe", daemon=True).start()
    try:
        return outcome.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        return f"no answer within {_TIMEOUT_S:g} s"
