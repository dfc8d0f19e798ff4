"""Hooks of the documentation site: pages that live outside of `docs/`, and links that leave it.

A link to a page of the repository leads to its copy in the site. A link to any other file of the
repository (a test, say) becomes its name with the path as a tooltip: the site works offline, and
without knowing the address of a forge.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
"""Pages outside of `docs/`, and their names in the site."""

_LINK = re.compile(r"\[((?:`[^`]*`|[^\]`])+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live elsewhere, as if they were in `docs/`."""
    for source, name in PAGES.items():
        folder = posixpath.dirname(source)
        content = _LINK.sub(partial(_relative_to_docs, folder), (ROOT / source).read_text())
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite links that leave `docs/`."""
    folder = posixpath.dirname(page.file.src_uri)
    up = "../" * folder.count("/") + ("../" if folder else "")

    def rewritten(match: re.Match[str]) -> str:
        """One link as the site has it."""
        label, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return match[0]
        if path in PAGES:
            return f"[{label}]({up}{PAGES[path]}{anchor})"
        return f'{label}{{ title="{path}" }}' if label.startswith("`") else f"{label} (`{path}`)"

    return _LINK.sub(rewritten, markdown)


def _relative_to_docs(folder: str, match: re.Match[str]) -> str:
    """A link of a page at `folder` as a page in `docs/` writes it."""
    path = posixpath.normpath(posixpath.join(folder, match[2]))
    return f"[{match[1]}]({posixpath.relpath(path, 'docs')}{match[3] or ''})"
