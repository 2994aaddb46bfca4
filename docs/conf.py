"""The documentation site, by Sphinx. `.ci/site FOLDER` builds it, and looks at it in a browser.

The pages are written for the code host, where people read them too. `fit_page` changes what the
site needs to be different.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import gatekeeper

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
REPOSITORY = re.findall(r"https://github\.com/[\w-]+/[\w-]+", README)[0]

project = "gatekeeper"
author = "The gatekeeper authors"
version = release = gatekeeper.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 4  # `#heading` leads to a heading, as on the code host
myst_enable_extensions = ["attrs_inline", "colon_fence"]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_mock_imports = ["mitmproxy"]  # it needs packages that contradict those of the tests
autodoc_preserve_defaults = True
default_role = "code"

html_theme = "furo"
html_title = f"gatekeeper {version}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = html_show_sourcelink = False


def fit_page(_app: Any, page: str, source: list[str]) -> None:
    """Put the README on the first page, and make links and anchors those of the site."""
    text, folder = source[0], posixpath.dirname(page)
    if page == "index":
        text = README.replace(f"{REPOSITORY}/blob/main/docs/", "") + text

    def outside(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        return link[0] if place.startswith("docs/") else f"]({REPOSITORY}/blob/main/{place}"

    text = re.sub(r"\]\((\.\./[^)#]+)", outside, text)
    source[0] = re.sub(r'<a id="([^"]+)"></a>', r"[]{#\1}", text)


def link_names(_app: Any, _kind: str, _name: str, _it: Any, _opts: Any, lines: list[str]) -> None:
    """Make links of the public names that a docstring has in backticks."""
    for number, line in enumerate(lines):
        lines[number] = re.sub(
            r"(?<![`:])`([A-Z]\w+)`(?!`)",
            lambda it: f":py:obj:`~gatekeeper.{it[1]}`" if it[1] in gatekeeper.__all__ else it[0],
            line,
        )


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("source-read", fit_page)
    app.connect("autodoc-process-docstring", link_names)
