"""Where images come from, for those who count. No torch."""

from enum import StrEnum


class ImageSource(StrEnum):
    """How a replica came to its image: from the object store, or why from disk."""

    IMAGE = "image"
    NO_HOLDER = "no_holder"  # nobody was to be asked
    MISSING_KEY = "missing_key"  # the holder has no such image and cannot make it
    LAYOUT_MISMATCH = "layout_mismatch"  # it makes another: dtype, ranks, packer
    STORE_FULL = "store_full"
    OVER_BUDGET = "over_budget"  # of the host's memory
    DIGEST_MISMATCH = "digest_mismatch"  # what the store has is not what was packed
    TIMEOUT = "timeout"
    HOLDER_GONE = "holder_gone"  # or with it, the bytes
    ERROR = "error"  # anything else; the log has it
