"""Mixture of the pinned plans, batches and states."""

from typing import Any

from batchloom import Mixture
from golden.conftest import Workspace

# Names in the mixture, and recipes with the same tokenizer.
SOURCES = {"web": "jsonl-mapped", "code": "text", "talk": "text-and-chat", "wide": "shards"}
WEIGHTS = {"web": 5, "code": 3, "talk": 1}


def make_mixture(workspace: Workspace, **settings: Any) -> Mixture:
    """Return a mixture of all sources; ``settings`` are those of ``Mixture``."""
    stores = {name: workspace.open(recipe) for name, recipe in SOURCES.items()}
    return Mixture(settings.pop("weights", WEIGHTS), stores=stores, **settings)
