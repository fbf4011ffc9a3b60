"""Hooks of the site's build: the README is a page, and links that leave the pages are text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
WIDE = {"settings.md", "limits.md", "optimizers.md"}
"""Pages of wide tables, which get the place of the table of contents."""
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?://|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README as the index."""
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Keep links to other pages; of links to files of the repository, keep the text."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def kept(link: re.Match[str]) -> str:
        page = link[2].partition("#")[0]
        is_page = "/" not in page and page.endswith(".md") and (ROOT / "docs" / page).exists()
        return link[0] if is_page else link[1]

    return LINK.sub(kept, markdown)
