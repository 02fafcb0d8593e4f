"""How much memory a process has, told so that it grows only if the process takes some."""

from collections import Counter

import psutil


def anonymous_regions(process: psutil.Process) -> Counter[str]:
    """Bytes that no file holds, by start and name of their region.

    Not what is private to the process (its USS): that grows by a library's pages when the last other process
    that had them ends. Those that compile for torch end after a minute without work, and 35 to 73 MiB of libraries
    are their parent's alone from then on.
    """
    return Counter(
        {
            f"{region.addr.partition('-')[0]} {region.path}": region.anonymous
            for region in process.memory_maps(grouped=False)
        }
    )
