"""What processes have of the host, as the kernel tells it."""

import subprocess
import sys

import psutil

from serve_app.bench.host_use import host_use

_MIB = 2**20
_GROWS = """
import sys
sys.stdin.readline()
kept = bytearray(range(256)) * (64 * 4096)
print(len(kept), flush=True)
sys.stdin.readline()
"""


def test_memory_that_a_process_takes_is_seen_at_the_end_and_who_has_ended_is_left_out() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        gone = psutil.Process(ended.pid)
    command = [sys.executable, "-c", _GROWS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as grows:
        assert grows.stdin is not None
        assert grows.stdout is not None
        with host_use(lambda: [gone, psutil.Process(grows.pid)]) as use:
            grows.stdin.write("\n")
            grows.stdin.flush()
            assert int(grows.stdout.readline()) == 64 * _MIB
        grows.communicate()
    assert len(use.at_s) == len(use.anonymous_bytes) == len(use.handles) >= 2
    assert use.anonymous_bytes[-1] - use.anonymous_bytes[0] > 60 * _MIB
    assert use.handles[-1] >= 3
