"""batchloom: the training-data engine for language models.

Names are loaded when first used, so that importing batchloom stays light.
"""

# As typing has it, which takes its time to import.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from batchloom.batches.inspect import inspect
    from batchloom.batches.loader import Loader
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
    from batchloom.diagnosis.check import check
    from batchloom.diagnosis.doctor import doctor
    from batchloom.plan.edits import Edit
    from batchloom.plan.mixture import Mixture
    from batchloom.plan.plan import Plan
    from batchloom.plan.spec import PlanSpec
    from batchloom.preparation.dataset_config import DatasetConfig
    from batchloom.preparation.job import prepare
    from batchloom.preparation.recipe import Recipe
    from batchloom.questions.explain import explain
    from batchloom.questions.when import when
    from batchloom.sources.presets import list_datasets
    from batchloom.store.opening import open_store
    from batchloom.store.reader import Store
    from batchloom.streams.stream import stream

__version__ = "0.1.0"

_HOMES = {
    "BatchloomError": "batchloom.core.errors",
    "DatasetConfig": "batchloom.preparation.dataset_config",
    "Edit": "batchloom.plan.edits",
    "InputError": "batchloom.core.errors",
    "Loader": "batchloom.batches.loader",
    "Mixture": "batchloom.plan.mixture",
    "OutputError": "batchloom.core.errors",
    "Plan": "batchloom.plan.plan",
    "PlanError": "batchloom.core.errors",
    "PlanSpec": "batchloom.plan.spec",
    "Recipe": "batchloom.preparation.recipe",
    "SettingsError": "batchloom.core.errors",
    "StateError": "batchloom.core.errors",
    "Store": "batchloom.store.reader",
    "StoreError": "batchloom.core.errors",
    "TokenizerError": "batchloom.core.errors",
    "check": "batchloom.diagnosis.check",
    "doctor": "batchloom.diagnosis.doctor",
    "explain": "batchloom.questions.explain",
    "inspect": "batchloom.batches.inspect",
    "list_datasets": "batchloom.sources.presets",
    "open_store": "batchloom.store.opening",
    "prepare": "batchloom.preparation.job",
    "stream": "batchloom.streams.stream",
    "when": "batchloom.questions.when",
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
    import importlib  # noqa: PLC0415 - a Ctrl-C during a slow start would find no answer

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batchloom' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
