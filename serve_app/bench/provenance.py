"""Which code a result speaks for: version, commit, and whether the tree had changed since. No torch here."""

import logging
import os
import re
import shlex
import subprocess
from pathlib import Path

from serve_app import __version__

logger = logging.getLogger(__name__)

COMMIT_VARIABLE = "SLEEPSERVE_COMMIT"
UNKNOWN = "unknown"
_TREE = Path(__file__).parents[2]
_DESCRIBE = ("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
_DESCRIBED = re.compile(r"([0-9a-f]{7,64})(-dirty)?")


def provenance(tree: Path = _TREE) -> dict[str, str | bool | None]:
    """What every result carries: `sleepserve`, `commit`, `clean`.

    The commit is that of the tree which this process has imported. A copy without git has it from the
    environment variable SLEEPSERVE_COMMIT, a hash with "-dirty" behind it if files had changed. Where
    neither tells, the commit is "unknown", `clean` is None, and a warning says so.

    Raises:
        ValueError: the variable holds no commit.
    """
    described = _of_git(tree) or _of_environment()
    if described is None:
        logger.warning(
            "the result will not say of which commit it is: %s is no git checkout. Set %s to what `%s` "
            "prints where the code comes from",
            tree,
            COMMIT_VARIABLE,
            shlex.join(_DESCRIBE),
        )
        return {"sleepserve": __version__, "commit": UNKNOWN, "clean": None}
    commit, _, changed = described.partition("-")
    return {"sleepserve": __version__, "commit": commit, "clean": not changed}


def _of_git(tree: Path) -> str | None:
    # An installed package may lie inside a checkout of something else.
    if not (tree / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(tree), *_DESCRIBE[1:]], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        logger.warning("%s is a git checkout, but there is no git here", tree)
    except subprocess.CalledProcessError as exc:
        logger.warning("git tells nothing of %s: %s", tree, exc.stderr.strip())
    else:
        return found.stdout.strip()
    return None


def _of_environment() -> str | None:
    given = os.environ.get(COMMIT_VARIABLE, "").strip()
    if given and not _DESCRIBED.fullmatch(given):
        raise ValueError(
            f"{COMMIT_VARIABLE} must be a commit's hash, with -dirty behind it if files have changed; "
            f"found {given!r}"
        )
    return given or None
