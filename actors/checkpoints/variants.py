"""Checkpoints that share one set of files and have other weights each: many models without as many on disk.

A variant is a folder of links to the files of a base, and a number. Who loads it rotates every row of every
tensor by steps that follow from the number: random weights stay as random as they were.
"""

import json
from pathlib import Path

from actors.checkpoints.directory import missing_from_checkpoint

VARIANT_FILE = "sleepserve_variant.json"
_STEP = 7919  # a prime: rows of many lengths are rotated differently by any two small numbers


def write_variant(directory: Path, base: Path, number: int) -> Path:
    """Make a variant of a checkpoint; one that is there already gets the base's files and the number.

    Returns:
        `directory`.

    Raises:
        ValueError: the base is no checkpoint, or a variant itself; the number is not above 0; `directory` is
            something else.
    """
    if (missing := missing_from_checkpoint(base)) is not None:
        raise ValueError(f"{base} is not a checkpoint: {missing}")
    if (base / VARIANT_FILE).exists():
        raise ValueError(f"{base} is a variant itself; name the checkpoint that it comes from")
    if number < 1:
        raise ValueError(f"a variant's number is 1 or more, not {number}")
    if directory.exists() and variant_of(directory) is None:
        raise ValueError(f"{directory} exists and is not a variant")
    directory.mkdir(parents=True, exist_ok=True)
    for path in list(directory.iterdir()):
        if path.is_symlink():  # to a file of an earlier base, which the new one may not have
            path.unlink()
    (directory / VARIANT_FILE).write_text(json.dumps({"number": number}) + "\n")
    for file in base.iterdir():
        link = directory / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    return directory


def variant_of(directory: Path) -> int | None:
    """The number of a variant; None of any other checkpoint.

    Raises:
        ValueError: the file that has it is unreadable.
    """
    file = directory / VARIANT_FILE
    try:
        return int(json.loads(file.read_bytes())["number"])
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} is unreadable ({type(error).__name__}: {error})") from error


def steps(number: int, length: int) -> int:
    """By how many places a row of so many values is rotated: 0 only where there is but one place."""
    return 1 + (number * _STEP) % (length - 1) if length > 1 else 0
