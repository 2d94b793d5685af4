"""Settings of the documentation site: `make docs` builds it with Sphinx."""

import batchloom

project = "batchloom"
author = "The batchloom authors"
version = release = batchloom.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "batchloom"
html_show_sphinx = False
