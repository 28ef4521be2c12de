"""Hooks of mkdocs: the README is the first page, and examples are pages, too.

Links are written for the repository, `../examples/x.py` or `docs/x.md` in the README.
On the site they lead to the pages made here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# Texts beside the folder docs, and the pages that they are.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that lie outside the folder docs."""
    pages = {page: (ROOT / name).read_text() for name, page in OUTSIDE.items()}
    for path in sorted(ROOT.glob("examples/**/*.py")):
        pages[_page_of(path)] = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    for path in sorted(ROOT.glob("examples/**/*.ipynb")):
        pages[_page_of(path)] = "\n\n".join(map(_of_cell, _cells(path)))
    pages["examples/index.md"] = _list_of_examples(list(pages.items()))
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def _page_of(path: Path) -> str:
    return f"{path.relative_to(ROOT)}.md"


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


def _of_cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook and what it printed."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    printed = "".join("".join(o.get("text", "")) for o in cell["outputs"])
    output = f"\n\n```text\n{printed}```" if printed else ""
    return f"```python\n{text}\n```{output}"


def _list_of_examples(pages: list[tuple[str, str]]) -> str:
    lines = ["# Examples", ""]
    for page, text in pages:
        if page.startswith("examples/"):
            name = page.removeprefix("examples/")
            says = re.search(r'"""(.*?)(?:"""|\n)', text) or re.search(r"# (.*)", text)
            lines.append(f"* [{name[:-3]}]({name}): {says[1] if says else name}")
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are on the site."""
    source = page.file.src_uri
    if source.startswith("examples/"):
        return re.sub(r"\]\((?:\.\./)+docs/", "](../../", markdown)
    if source in OUTSIDE.values():
        markdown = markdown.replace("](docs/", "](")
    markdown = re.sub(
        r"\]\((?:\.\./)?examples(?:/notebooks)?\)", "](examples/index.md)", markdown
    )
    markdown = re.sub(
        r"\]\((?:\.\./)?(examples/[\w/]+\.(?:py|ipynb))\)", r"](\1.md)", markdown
    )
    for name, target in OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{name}", f"]({target}", markdown)
    return re.sub(r"\[([^]]+)\]\(\.\./src/\w+\)", r"`\1`", markdown)
