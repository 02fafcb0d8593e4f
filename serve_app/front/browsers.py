"""What a page in somebody's browser may do with a server that asks for no key.

Any page can have its visitor's browser send requests to addresses that only that browser reaches, and a page
whose name was made to point here (DNS rebinding) can read the answers, too. Browsers tell of it: in
`Origin`, `Sec-Fetch-Site` and `Host`, which no page can forge. Where a route asks for a key the key
protects it, because a browser sends none by itself.
"""

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.front.errors import ForeignPage, NotJson
from serve_app.openai.fields import shown

_READS = ("GET", "HEAD", "OPTIONS")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Browsers:
    """Tells requests that a foreign page may have caused. Pure."""

    def __init__(self, allowed_hosts: Collection[str], allowed_origins: Collection[str]) -> None:
        """Take who is not foreign.

        Args:
            allowed_hosts: names, without ports, besides loopback's, this machine's own and any literal
                address, for which no page's name can be mistaken.
            allowed_origins: `scheme://host[:port]`; "*" for all.
        """
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, allowed_hosts)}
        self._origins = frozenset(allowed_origins)

    def check(self, scope: Scope) -> None:
        """Look at a request to a route without a key.

        Raises:
            ForeignPage: it names a host that is not ours, or would change something for another page.
            NotJson: it has a body that pages may send to anybody without being asked.
        """
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            raise ForeignPage(
                f"this server does not answer to the name {shown(host)} without API keys; add the name to "
                "http.allowed_hosts if it is yours"
            )
        if scope["method"] in _READS:
            return
        self._check_origin(headers, scope["scheme"], host)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and not _is_json(headers.get("content-type", "")):
            raise NotJson("send the body with Content-Type: application/json")

    def _check_origin(self, headers: Headers, scheme: str, host: str) -> None:
        origin = headers.get("origin")
        if origin is None:
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        else:
            allowed = "*" in self._origins or origin in self._origins
            foreign = not allowed and not _is_same(origin, host)
        if foreign:
            raise ForeignPage(
                f"a page of {shown(origin) if origin else 'another site'} may not use this server without an API key; add its "
                "origin to http.cors_allow_origins if it may"
            )

    def _is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._hosts or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Whether a page's origin is the server it talks to. TLS may have ended in front of us."""
    try:
        page, server = urlsplit(origin), urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        if page.hostname is None or page.hostname != server.hostname or default is None:
            return False
        return (page.port or default) == (server.port or default)
    except ValueError:  # no port that anybody could have
        return False


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
