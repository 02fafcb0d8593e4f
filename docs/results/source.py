"""Of which code a result is."""

from collections.abc import Mapping
from typing import Any

from serve_app.bench.provenance import UNKNOWN

_SHOWN = 12  # digits of a commit


def source_of(result: Mapping[str, Any]) -> str:
    """One line for people, of any result; of one that names no commit, too."""
    facts = result.get("environment") or result.get("client") or result
    commit = facts.get("commit") or UNKNOWN
    state = "" if facts.get("clean") in (True, None) else ", with changes"
    version = facts.get("sleepserve") or UNKNOWN
    return f"sleepserve {version}, commit {commit[:_SHOWN]}{state}"
