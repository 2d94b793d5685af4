"""Settings of the documentation site: `make docs` builds it with Sphinx."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import batchloom

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

project = "batchloom"
author = "The batchloom authors"
version = release = batchloom.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = {"version": version}
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
# Frameworks that a build may lack.
autodoc_mock_imports = [name for name in ("lightning", "megatron", "torchtitan") if find_spec(name) is None]

# "--option" stays as it is.
smartquotes = False

html_theme = "furo"
html_title = "batchloom"
html_search_scorer = str(DOCS / "scorer.js")
html_show_copyright = html_show_sphinx = False
# Attribute names such as `steps` exist in several classes.
suppress_warnings = ["ref.python"]


def setup(app: Any) -> None:
    """Make a page of each public object."""
    # The script of the reference imports every framework.
    from api_pages import link_api_pages, write_api_pages, write_out_options

    write_api_pages(DOCS)
    app.connect("source-read", link_api_pages)
    # Before napoleon, which reads the items of the docstring.
    app.connect("autodoc-process-docstring", write_out_options, priority=400)
