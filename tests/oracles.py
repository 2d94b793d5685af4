"""Other people's readers, imported without what they say while being imported."""

import importlib
import warnings
from types import ModuleType


def megatron(module: str) -> ModuleType:
    """A module of megatron-core, which warns of what else could be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.datasets.{module}")
