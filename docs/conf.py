"""Settings of the documentation site: `make docs` builds it with Sphinx."""

from importlib.util import find_spec

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
# Members of pydantic's models.
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}
# Frameworks that a build may lack.
autodoc_mock_imports = [name for name in ("lightning", "megatron", "torchtitan") if find_spec(name) is None]

html_theme = "furo"
html_title = "batchloom"
html_show_sphinx = False
# Attribute names such as `steps` exist in several classes.
suppress_warnings = ["ref.python"]


def strip_settings(app, kind, name, documented, options, signature, result):  # noqa: ARG001 - Sphinx's signature
    """Remove the declarations of settings from type hints; settings.md shows them."""
    for holder in (*getattr(documented, "__mro__", ()), getattr(documented, "__init__", None)):
        hints = getattr(holder, "__annotations__", None) or {}
        for field, hint in hints.items():
            if getattr(hint, "__metadata__", None):
                hints[field] = hint.__origin__


def setup(app):
    """Connect the hook before Sphinx reads the type hints."""
    app.connect("autodoc-process-signature", strip_settings, priority=0)
