"""Settings of the documentation site: `make docs` builds it with Sphinx."""

from importlib.util import find_spec

import batchloom

project = "batchloom"
author = "The batchloom authors"
version = release = batchloom.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
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
html_show_copyright = html_show_sphinx = False
# Attribute names such as `steps` exist in several classes.
suppress_warnings = ["ref.python"]
