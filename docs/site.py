"""Hooks of the site's build.

The README and the measurements are pages, links to other files are text, and the addresses that the
publisher fills in are read from pyproject.toml.
"""

import re
from pathlib import Path
from typing import Any

import tomllib
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "results.md": "examples/benchmarks/RESULTS.md"}
"""Pages that are written outside of the folder of the docs."""
PLACES = {ROOT / path: name for name, path in PAGES.items()}
WIDE = {"settings.md", "limits.md", "optimizers.md"}
"""Pages of wide tables, which get the place of the table of contents."""
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((?!https?://|#)([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Take the addresses of the site and the repository, if there are any."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {})
    config.site_url = urls.get("Documentation", "")
    config.repo_url = urls.get("Repository")
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README as the index, and the measurements."""
    for name, path in PAGES.items():
        text = (ROOT / path).read_text()
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Keep links to other pages; of links to files of the repository, keep the text."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]

    def kept(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = (source.parent / path).resolve()
        if (made := PLACES.get(target)) is None and target.parent == ROOT / "docs":
            made = target.name if target.exists() else None
        return f"[{link[1]}]({made}{mark}{anchor})" if made else link[1]

    source = ROOT / PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = markdown.replace("](docs/memory.png", "](memory.png")
    return LINK.sub(kept, markdown)
