"""The documentation site, built by `make docs`: the repository's own pages where they lie, so that every link between
them holds there as it does here; the code that they link to, by line; and a reference from docstrings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.parsers import Parser
from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashzoo  # noqa: E402 - from this checkout

MENU = {
    "Use": tuple(f"docs/{name}" for name in ("start", "use", "options", "call", "context_parallel", "reference")),
    "Choose": ("docs/versions", "docs/measured"),
    "Learn": ("docs/learn/v1", "docs/learn/v2", "docs/learn/v3", "docs/learn/blocksparse"),
    "Versions": tuple(f"flashzoo/{name}/README" for name in ("v1", "v2", "v3", "decode", "blocksparse")),
    "Extend": ("docs/write_a_variant", "docs/add_an_option", "CONTRIBUTING"),
    "Project": ("docs/measurements", "CHANGELOG", "docs/releasing", "SECURITY"),
}
PAGES = ["README.md", *(f"{page}.md" for pages in MENU.values() for page in pages)]


def linked_code() -> set[str]:
    """The Python files that pages link to."""
    found = set()
    for page in PAGES:
        here = (ROOT / page).parent
        for path in re.findall(r"\]\(([\w./-]+\.py)\b", (ROOT / page).read_text()):
            found.add((here / path).resolve().relative_to(ROOT).as_posix())
    return found


project = "flashzoo"
release = flashzoo.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [*PAGES, *sorted(linked_code())]
exclude_patterns = [".*", "build", "dist", "tests"]

html_theme = "furo"
html_title = f"flashzoo {release}"
html_copy_source = False
html_static_path = html_css_files = ["site.css"]
html_show_copyright = False

myst_heading_anchors = 4
default_role = "py:obj"  # a name in backticks is a link where it is in the reference
add_module_names = False
maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True


class Code(Parser):
    """A Python file as a page with numbered lines, to which `#L12` leads."""

    supported = ("python",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the page."""
        env: BuildEnvironment = document.settings.env
        name = env.docname
        title = nodes.section("", nodes.title("", f"{name}.py"), ids=["file"], names=["file"])
        code = nodes.literal_block(inputstring, inputstring, language="python", linenos=True)
        code["highlight_args"] = {"lineanchors": "L", "anchorlinenos": True}
        title += code
        document += title
        count = len(inputstring.splitlines())
        env.metadata[name] |= {
            "orphan": True,
            "myst_slugs": {f"L{n}": (n, f"L-{n}", f"line {n}") for n in range(1, count + 1)},
        }


def with_options(app: Sphinx) -> None:
    """Show each argument of the calls by its name, where type checkers are told of overloads."""
    calls = ModuleAnalyzer.for_module("flashzoo.call.api")
    calls.analyze()
    calls.overloads.clear()


def with_menu(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the first page the menu, which its place in the repository has no use for."""
    if docname == root_doc:
        source[0] += "".join(
            f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(f"/{page}" for page in pages) + "\n```\n"
            for caption, pages in MENU.items()
        )


def refuse_gaps(app: Sphinx, env: BuildEnvironment) -> None:
    """A public name without a place in the reference is an error."""
    known = {name for name, *_ in env.get_domain("py").get_objects()}
    missing = [name for name in flashzoo.__all__ if f"flashzoo.{name}" not in known]
    if missing:
        raise ExtensionError(f"docs/reference.md: expected every public name, got none of {', '.join(missing)}")


def finish(app: Sphinx, error: Exception | None) -> None:
    """Show the first page for a folder, too, and refuse links within the site that lead nowhere."""
    if error is None:
        out = Path(app.outdir).resolve()
        (out / "index.html").write_text((out / f"{root_doc}.html").read_text())
        if dead := sorted(dead_links(out)):
            raise ExtensionError(f"expected links to what is there, got {', '.join(dead)}")


def dead_links(out: Path) -> Iterator[str]:
    """Links within the site to a file or an id that is not there."""
    pages = {page: page.read_text() for page in out.rglob("*.html")}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in set(re.findall(r'(?:href|src)="(?!\w+:|//)([^"]+)"', text)):
            path, _, anchor = unescape(link).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and target in ids and anchor not in ids[target]):
                yield f"{page.relative_to(out)}: {link}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_source_suffix(".py", "python")
    app.add_source_parser(Code)
    app.connect("builder-inited", with_options)
    app.connect("source-read", with_menu)
    app.connect("env-check-consistency", refuse_gaps)
    app.connect("build-finished", finish)
