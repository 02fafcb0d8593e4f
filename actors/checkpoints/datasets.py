"""Texts that are known by name: which files of which dataset they are, and where they lie once fetched."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoints.plan import at_home
from actors.checkpoints.source import Hub

DEFAULT_DATASETS_DIR = Path("~/.cache/sleepserve/datasets")


@dataclass(frozen=True, slots=True)
class KnownText:
    """Some files of a dataset.

    Attributes:
        ids: the dataset's id on each hub.
        include: patterns of the files.
    """

    ids: Mapping[Hub, str]
    include: tuple[str, ...]

    def fetched(self, datasets_dir: Path) -> Path | None:
        """The first whole file that a download has left there, from whichever hub; None without one."""
        base = at_home(datasets_dir)
        found = (
            file
            for dataset in self.ids.values()
            for pattern in self.include
            for file in sorted(base.glob(f"{dataset.replace('/', '--')}/*/{pattern}"))
        )
        return next(found, None)


KNOWN_TEXTS: Mapping[str, KnownText] = {
    "wikitext": KnownText(
        ids={Hub.MODELSCOPE: "modelscope/wikitext", Hub.HUGGINGFACE: "Salesforce/wikitext"},
        include=("wikitext-103-v1/test-*.parquet",),
    ),
}
