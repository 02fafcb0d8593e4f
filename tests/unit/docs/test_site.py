"""The documentation as a site: every link leads somewhere, and no page is forgotten."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_site_is_built_without_a_warning(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="extra `site`")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "quickstart" / "index.html").is_file()
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="benchmarks/"' in page
    assert 'src="page_1280.png"' in page


def test_every_page_of_results_is_in_the_menu(project: Path) -> None:
    """Here also where mkdocs, which says so, is not installed."""
    menu = (project / "mkdocs.yml").read_text(encoding="utf-8")
    pages = (project / "docs" / "results").glob("*/README.md")
    assert [page.parent.name for page in pages if f"{page.parent.name}/README.md" not in menu] == []
