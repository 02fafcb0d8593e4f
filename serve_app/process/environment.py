"""Variables that Ray and Ray Serve are started with where we start them, and why.

`sleepserve serve`, the tests and the benches take them from here; docs/operations.md names them for those
who start Ray themselves. Ray and Serve read most of them once, when they are imported.
"""

import os
import sysconfig
from collections.abc import Mapping

from serve_app.process import haproxy

# Ray 2.60 opens its own ports on every interface unless this is 0 (ray/_private/services.py,
# resolve_ip_for_localhost), and does not find a cluster on loopback; one machine needs none of them from outside.
LOOPBACK: Mapping[str, str] = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

CHEAP_STREAMS: Mapping[str, str] = {
    # Serve's proxy takes streamed events over gRPC: half of its time for each (docs/decisions/39).
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    # An answer that is not streamed is one message; gRPC's own limit, 4 MiB, is reached by 3,000 tokens with
    # 20 log-probabilities each.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**28),
    # No event goes from thread to thread within a process (docs/decisions/74).
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}

# A proxy that is killed is started anew after three failed looks, 10 s apart by default: half a minute without HTTP.
PROXY_LOOKS: Mapping[str, str] = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}

# Ray starts workers, and so all of our processes but itself, at niceness 15, so that they do not starve its own
# (worker_niceness in src/ray/common/ray_config_def.h, 2.60): whatever else computes on the machine would go first.
OWN_PRIORITY: Mapping[str, str] = {"RAY_worker_niceness": "0"}


def serve_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What `serve run` is started with on one machine; a variable of the user's own wins."""
    # As if the environment of this interpreter were activated: its programs are found by their names.
    path = os.pathsep.join([sysconfig.get_path("scripts"), *filter(None, [given.get("PATH")])])
    ours = {**LOOPBACK, **CHEAP_STREAMS, **haproxy.environment(path), **PROXY_LOOKS, **OWN_PRIORITY}
    return {**ours, **given, "PATH": path}
