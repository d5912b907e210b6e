"""MkDocs hooks: pages from files outside ``docs/``, and their links.

README, CONTRIBUTING, the changelog and the benchmarks' README are pages of the site. The page of
examples also shows their code, and the page of SGLang's arguments their table. Links are relative
to their own folder, so that they also work in the repository. The hooks turn each link into a link
between pages. A link to a file that is not on the site becomes the file's name.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sglrl.launching import argument_table

ROOT = Path(__file__).parents[2]
INCLUDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "benchmarks.md",
}
"""Files of the repository that are pages, and the names of the pages."""
EXAMPLES = "examples.md"
ARGUMENTS = "engine-arguments.md"
PAGES = {**INCLUDED, "examples": EXAMPLES}
"""Files and folders of the repository that a link may name, and the page that shows them."""
_SOURCES = {page: source for source, page in INCLUDED.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]+)?\)")
_HOST = r"\"(?:https?:)?//[^\"]*"
_LOADED = re.compile(
    rf"<(?:script|img|iframe|source)\b[^>]*\bsrc={_HOST}"
    rf"|<link\b(?![^>]*\brel=\"canonical\")[^>]*\bhref={_HOST}"
    r"|class=\"mermaid\""
)
"""What a browser would load from another host. Material loads Mermaid from a CDN."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is outside ``docs/``."""
    for source, page in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def _examples() -> str:
    """Return a section for each script in ``examples``. The docstring of a script is its text."""
    parts = []
    for file in sorted((ROOT / "examples").rglob("*.py")):
        code = file.read_text()
        end = ast.parse(code).body[0].end_lineno
        script = "\n".join(code.splitlines()[end:]).strip()
        docstring = ast.get_docstring(ast.parse(code))
        parts += [f"## {file.name}", f"{docstring}", f"```python\n{script}\n```"]
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into links between pages. Add the code of the examples."""
    here = page.file.src_uri
    folder = posixpath.dirname(_SOURCES.get(here, f"docs/{here}"))

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        name = PAGES.get(path, path.removeprefix("docs/"))
        if path.startswith("examples/") and path.endswith(".py"):
            # The heading of the script.
            name, anchor = EXAMPLES, f"#{posixpath.basename(path).replace('.', '')}"
        if files.get_file_from_path(name) is None:
            if path.startswith("docs/") or not (ROOT / path).exists():
                return found[0]  # MkDocs reports it.
            return str(text) if "`" in text else f"`{text}`"
        relative = posixpath.relpath(name, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({relative}{anchor or ''})"

    markdown = _LINK.sub(link, markdown)
    if here == ARGUMENTS:
        return f"{markdown}\n\n{argument_table.markdown()}"
    return f"{markdown}\n\n{_examples()}" if here == EXAMPLES else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Reject a page that loads something from another host: the site works offline."""
    loaded = _LOADED.search(output)
    if loaded is not None:
        raise PluginError(f"{page.file.src_uri} loads from another host: {loaded[0]}")
    return output
