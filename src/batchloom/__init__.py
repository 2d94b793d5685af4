"""batchloom: the training-data engine for language models.

Names are loaded when first used, so that importing batchloom stays light.
"""

# As typing has it, which takes its time to import.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from batchloom.analysis import explain, inspect, when
    from batchloom.analysis.doctor import check, doctor
    from batchloom.batches import Loader
    from batchloom.core.errors import (
        BatchloomError,
        InputError,
        OutputError,
        PlanError,
        SettingsError,
        StateError,
        StoreError,
        TokenizerError,
    )
    from batchloom.plan import Edit, Mixture, Plan, PlanSpec
    from batchloom.preparation import DatasetConfig, Recipe, prepare
    from batchloom.sources import list_datasets
    from batchloom.store import Store, open_store
    from batchloom.streaming import stream

__version__ = "0.1.0"

_HOMES = {
    "BatchloomError": "batchloom.core.errors",
    "DatasetConfig": "batchloom.preparation.settings.dataset_config",
    "Edit": "batchloom.plan.order.edits",
    "InputError": "batchloom.core.errors",
    "Loader": "batchloom.batches.loading.loader",
    "Mixture": "batchloom.plan.mixture",
    "OutputError": "batchloom.core.errors",
    "Plan": "batchloom.plan.order.plan",
    "PlanError": "batchloom.core.errors",
    "PlanSpec": "batchloom.plan.packing.plan_spec",
    "Recipe": "batchloom.preparation.settings.recipe",
    "SettingsError": "batchloom.core.errors",
    "StateError": "batchloom.core.errors",
    "Store": "batchloom.store.read.store_reader",
    "StoreError": "batchloom.core.errors",
    "TokenizerError": "batchloom.core.errors",
    "check": "batchloom.analysis.doctor.path_check",
    "doctor": "batchloom.analysis.doctor.diagnosis",
    "explain": "batchloom.analysis.explanation",
    "inspect": "batchloom.analysis.inspection",
    "list_datasets": "batchloom.sources.hf_datasets",
    "open_store": "batchloom.store.read.store_opening",
    "prepare": "batchloom.preparation.prepare_job",
    "stream": "batchloom.streaming.raw_stream",
    "when": "batchloom.analysis.explanation",
}

__all__ = [
    "BatchloomError",
    "DatasetConfig",
    "Edit",
    "InputError",
    "Loader",
    "Mixture",
    "OutputError",
    "Plan",
    "PlanError",
    "PlanSpec",
    "Recipe",
    "SettingsError",
    "StateError",
    "Store",
    "StoreError",
    "TokenizerError",
    "check",
    "doctor",
    "explain",
    "inspect",
    "list_datasets",
    "open_store",
    "prepare",
    "stream",
    "when",
]


def __getattr__(name: str) -> object:
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchloom' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
