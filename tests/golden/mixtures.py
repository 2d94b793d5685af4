"""The mixture that plans, batches and states are pinned of."""

from typing import Any

from batchloom import Mixture
from golden.conftest import Workspace

# Names in the mixture, and recipes of one tokenizer.
SOURCES = {"web": "jsonl-mapped", "code": "text", "talk": "text-and-chat", "wide": "shards"}
WEIGHTS = {"web": 5, "code": 3, "talk": 1}


def make_mixture(workspace: Workspace, **settings: Any) -> Mixture:
    """Return a mixture of all sources; ``weights`` and the rest as of ``Mixture``."""
    stores = {name: workspace.open(recipe) for name, recipe in SOURCES.items()}
    return Mixture(settings.pop("weights", WEIGHTS), stores=stores, **settings)
