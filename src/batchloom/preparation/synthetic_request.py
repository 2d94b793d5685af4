"""Requests for synthetic data: its name as an input, and the settings that apply."""

import os
from collections.abc import Sequence

from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value, raise_problems, to_plain
from batchloom.core.synthetic_data import SyntheticSpec, parse_synthetic_spec
from batchloom.preparation.settings.recipe import Recipe, flatten_settings
from batchloom.store.format import UINT16_IDS

# Recipe settings that apply to synthetic documents.
SYNTHETIC_SETTINGS = ("tokens_per_shard", "dtype", "val_fraction", "test_fraction")


def parse_synthetic_input(inputs: Sequence[str]) -> SyntheticSpec | None:
    """Return the synthetic data that the inputs name; None for inputs to be read.

    A name that exists as a file or folder is read as one.

    Raises:
        SettingsError: the settings are invalid, or synthetic data is mixed with other inputs.
    """
    synthetic_names = [name for name in inputs if not os.path.lexists(name) and parse_synthetic_spec(name)]
    if synthetic_names and len(inputs) > 1:
        alone = "synthetic data, which cannot be combined with other inputs"
        raise SettingsError([f"inputs: {synthetic_names[0]} is {alone}; prepare it into a separate store"])
    return parse_synthetic_spec(synthetic_names[0]) if synthetic_names else None


def check_synthetic_settings(spec: SyntheticSpec, recipe: Recipe) -> None:
    """Refuse settings that do not apply to synthetic documents."""
    settings = flatten_settings(to_plain(recipe))
    default_settings = flatten_settings(to_plain(Recipe(inputs=recipe.inputs)))
    problems = [
        f"{name}: {quote_value(value)} does not apply to synthetic data, which consists of ids; set its vocabulary "
        f"with {spec.name}:vocab=50257"
        for name, value in settings.items()
        if name not in SYNTHETIC_SETTINGS and value != default_settings.get(name)
    ]
    if recipe.dtype == "uint16" and spec.vocab > UINT16_IDS:
        problems.append(f"dtype: uint16 cannot hold the {spec.vocab:,} ids of {spec.spec_string}")
    raise_problems(problems)
