"""Hook of mkdocs: documents of the repository's root as pages, and links to what is no page."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_BESIDE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md", "UPGRADING.md")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_IMAGE = re.compile(r'(src="|srcset="|!\[[^\]]*\]\()docs/')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The documents beside docs/ stand in its root."""
    for name in _BESIDE:
        text = (_ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they lead among the pages. Those to code, of which there is no page, become their text."""
    here = PurePosixPath(page.file.src_uri).parent
    is_beside = page.file.src_uri in _BESIDE

    def placed(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        at = normpath(str(here / target))  # from docs/
        if is_beside:
            at = at.removeprefix("docs/")
        at = at.removeprefix("../")
        if files.get_file_from_path(at) is None:
            return text
        up = "../" * len([part for part in here.parts if part != "."])
        return f"[{text}]({up}{at}{anchor or ''})"

    markdown = _LINK.sub(placed, markdown)
    return _IMAGE.sub(r"\1", markdown) if is_beside else markdown
