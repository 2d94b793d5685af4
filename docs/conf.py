"""Settings of the documentation site: `make docs` builds it with Sphinx."""

import re
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


def strip_settings(app, domain, kind, node):  # noqa: ARG001 - Sphinx's signature
    """Remove the declarations of settings from recorded type hints; settings.md shows them."""
    for hints in app.env.current_document.autodoc_annotations.values():
        for name, hint in hints.items():
            hints[name] = re.sub(r"Annotated\[(.+?), [~\w.]*Setting\(.*\)\]", r"\1", hint)


def setup(app):
    """Connect the hook before autodoc uses the type hints."""
    app.connect("object-description-transform", strip_settings, priority=0)
