"""
Settings of Sphinx for the site, which `make docs` builds.

The source of the site is the repository itself, with this file as its only configuration. So pages, notebooks, records
and pictures are used where they are, and a link or a picture that works on the site works in the repository too.
"""

from pathlib import Path

from sphinx.application import Sphinx

import hf_hybrid_cache
from hf_hybrid_cache import models, planning

# Public names are imported when they are asked for, and a reference has to have them all.
for room in (hf_hybrid_cache, models, planning):
    for name in room.__all__:
        setattr(room, name, getattr(room, name))

project = "hf_hybrid_cache"
author = "the authors of hf_hybrid_cache"
release = hf_hybrid_cache.__version__

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/api/*.rst",
    "hub/README.md",
    "notebooks/*.ipynb",
    "results/README.md",
]
# These folders have no pages.
exclude_patterns = [".*", "*.egg-info", "build", "dist", "docs/_build", "hf_hybrid_cache", "tests", "shared"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# Pages.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # notebooks may begin with any level of heading

# Notebooks are shown as they were committed.
nb_execution_mode = "off"
nb_merge_streams = True

# Two hyphens begin an option, and are no dash.
smartquotes_action = "qe"

# Docstrings are Google's style, with names in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# Nothing is fetched while the site is built, so what others document is not linked to.
# The forms of blocks, the shapes of states and the parts of plans are not public: a user only passes them on.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|numpy|collections|contextlib|pathlib|os|typing)\..*"),
    (r"py:class", r"PreTrained\w+|ProcessGroup"),  # imported for types only
    (
        r"py:class",
        r"hf_hybrid_cache\.(storage\.codec\.Codec|storage\.kv_shape\.KVShape|planning\.\w+\.\w+)",
    ),
]

html_theme = "furo"
html_title = "hf_hybrid_cache"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
templates_path: list[str] = []

START_PAGE = '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">docs</a>\n'


def write_start_page(app: Sphinx, error: Exception | None) -> None:
    """Write the redirect of the site's root to the front page, which is in a folder."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(START_PAGE)


def setup(app: Sphinx) -> None:
    app.connect("build-finished", write_start_page)
