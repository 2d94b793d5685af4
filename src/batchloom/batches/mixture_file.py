"""Parsing of mixtures: YAML files, and command-line text of stores and weights."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from batchloom.core.errors import BatchloomError, SettingsError
from batchloom.core.settings import quote_value, raise_problems, suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES
from batchloom.core.yaml_reader import read_yaml
from batchloom.plan import Mixture, SourceSpec, Stage, list_weight_problems
from batchloom.plan.order import AssumedStore
from batchloom.store import Store, open_store

T = TypeVar("T")

_MIXTURE_KEYS = [field.name for field in fields(Mixture)]
# Options of a store in a mixture that do not follow from its content.
STORE_OPTIONS = ("cache", "cache_limit", "verify", "media")
_STORE_KEYS = ("path", "generation", *STORE_OPTIONS)
# Syntax of weights in other tools.
_COLON_WEIGHT = re.compile(r":[0-9.]+$")
_INLINE_SYNTAX = "write PATH=WEIGHT,PATH=WEIGHT, as in stores/web=0.7,stores/code=0.3, or name a YAML file"
_STORES_REMEDY = "write stores: and weights:, each with the names of the sources"


def read_mixture(text_or_path: str | os.PathLike[str]) -> Mixture:
    """Read a mixture from a YAML file or text like ``stores/web=0.7,stores/code=0.3``.

    In a file the keys are the fields of :class:`Mixture`; a store is a path relative to the file's folder (or
    ``{path: ..., generation: ...}``, with other options of ``open_store``), or a name of synthetic data. In a text
    the last name of a path is the source name, and a path without a weight is reserved for an edit.

    Raises:
        SettingsError: unknown keys, stores that cannot be opened, weights that cannot be met; lists each problem
            with its path in the file.
        InputMissingError: the file does not exist.
        RecordError: invalid YAML; names the line.
        PlanError: stores of different tokenizers.
    """
    text = os.fspath(text_or_path)
    if os.path.lexists(text):
        if Path(text).is_dir():
            raise SettingsError([f"mixture: {text} is a folder without a weight; {_INLINE_SYNTAX}"])
    elif "=" in text:
        return _parse_inline(text)
    elif "," in text or _COLON_WEIGHT.search(text):
        raise SettingsError(
            [f"mixture: {quote_value(text)} is not a file, and none of its sources has a weight; {_INLINE_SYNTAX}"]
        )
    return _read_mixture_file(Path(text))


def rebuild_mixture(identity: Mapping[str, Any], stores: Mapping[str, Any]) -> Mixture:
    """Return the mixture of a plan's identity, over stores by name."""
    mixture = identity["mixture"]
    return Mixture(
        mixture["weights"],
        stores=stores,
        unit=mixture["unit"],
        temperature=mixture["temperature"],
        most_epochs=mixture["most_epochs"],
        exhausted=mixture["exhausted"],
        sources={
            name: SourceSpec(**{key: entry[key] for key in ("epochs", "seed", "overlong") if key in entry})
            for name, entry in identity["sources"].items()
        },
        stages=[Stage(**stage) for stage in mixture["stages"]],
    )


def open_recorded_data(data: Mapping[str, Any]) -> str | Mixture | None:
    """Return the data that a run recorded: the path of a store, or a mixture.

    Args:
        data: ``data`` of its ``run.json``.

    Returns:
        The data; None if the run did not record where they are.

    Raises:
        InputError, StoreError: a store of the mixture cannot be opened.
    """
    if "mixture" not in data:
        return data.get("path")
    places = data.get("places") or {}
    if not places or not all(place.get("path") for place in places.values()):
        return None
    stores = {
        name: open_store(place["path"], **{option: place[option] for option in STORE_OPTIONS if option in place})
        for name, place in places.items()
    }
    return rebuild_mixture(data, stores)


def _parse_inline(text: str) -> Mixture:
    weights: dict[str, float] = {}
    paths: dict[str, str] = {}
    problems = []
    for word in text.split(","):
        path, equals, weight = word.strip().rpartition("=")
        path = path if equals else weight
        name = Path(path).name
        number = _parse_weight(weight) if equals else None
        if not name or (equals and number is None):
            problems.append(f"mixture: {quote_value(word)} is not PATH=WEIGHT")
        elif name in paths:
            problems.append(
                f"mixture: {paths[name]} and {path} are both called {name!r}; name them in a YAML file: "
                "stores: {NAME: PATH, ...}"
            )
        else:
            paths[name] = path
            if number is not None:
                weights[name] = number
    stores = {name: _open_store_entry(path, f"stores.{name}", problems) for name, path in paths.items()}
    if weights:
        problems += list_weight_problems(weights, stores, "weights")
    raise_problems(problems)
    return Mixture(weights, stores={name: store for name, store in stores.items() if store})


def _parse_weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_mixture_file(file: Path) -> Mixture:
    values = read_yaml(file, _STORES_REMEDY)
    if not isinstance(values, dict):
        raise SettingsError([f"{file}: holds {quote_value(values)}, not a mapping; {_STORES_REMEDY}"])
    problems = [
        f"{name}: unknown setting{suggest(name, _MIXTURE_KEYS)}" for name in values if name not in _MIXTURE_KEYS
    ]
    problems += [f"{name}: missing" for name in ("weights", "stores") if name not in values]
    ready = {name: value for name, value in values.items() if name in _MIXTURE_KEYS}
    ready["stores"] = _open_stores(values.get("stores"), file.parent, problems)
    ready["sources"] = _parse_sources(values.get("sources", {}), problems)
    ready["stages"] = _parse_stages(values.get("stages", []), problems)
    stores = values.get("stores")
    if isinstance(stores, dict) and stores:
        # Without the wrong stages, the others would have other numbers.
        stages = [] if any(problem.startswith("stages") for problem in problems) else ready["stages"]
        problems += _list_value_problems({"weights": "size", **ready, "stages": stages}, stores)
    if problems:
        raise SettingsError([f"{file}: {problem}" for problem in dict.fromkeys(problems)])
    return Mixture(**ready)


def _list_value_problems(settings: dict[str, Any], names: Iterable[str]) -> list[str]:
    """List the problems of a mixture's settings, even if its stores cannot be opened."""
    stores = dict.fromkeys(names, AssumedStore("", 1, 1))
    problems = list_weight_problems(settings["weights"], stores, "weights")
    for number, stage in enumerate(settings["stages"]):
        problems += list_weight_problems(stage.weights, stores, f"stages[{number}].weights")
    try:
        Mixture(**{**settings, "weights": "size" if problems else settings["weights"], "stores": stores})
    except SettingsError as error:
        problems += error.problems
    return problems


def _open_stores(entries: Any, folder: Path, problems: list[str]) -> dict[str, Store]:
    if entries is None:
        return {}
    if not isinstance(entries, dict) or not entries:
        problems.append(f"stores: {quote_value(entries)} is not a mapping of names to paths")
        return {}
    stores = {}
    for name, value in entries.items():
        key_path = f"stores.{name}"
        entry = value if isinstance(value, dict) else {"path": value}
        wrong = [
            f"{key_path}.{key}: unknown setting{suggest(key, _STORE_KEYS)}" for key in entry if key not in _STORE_KEYS
        ]
        path = entry.get("path")
        if wrong or not isinstance(path, str) or not path:
            problems += wrong or [f"{key_path}: {quote_value(value)} is not the path of a store"]
            continue
        options = {key: entry[key] for key in entry if key != "path"}
        opened = _open_store_entry(_resolve_store_path(folder, path), key_path, problems, options)
        if opened is not None:
            stores[name] = opened
    return stores


def _resolve_store_path(folder: Path, path: str) -> str:
    """Resolve a path from a folder; URLs and names of synthetic data stay.

    An existing file takes precedence over a name of synthetic data.
    """
    is_synthetic = path.partition(":")[0] in SYNTHETIC_NAMES and not os.path.lexists(folder / path)
    return path if is_synthetic or "://" in path else str(folder / path)


def _open_store_entry(
    path: str, key_path: str, problems: list[str], options: Mapping[str, Any] = MappingProxyType({})
) -> Store | None:
    try:
        return open_store(path, **options)
    except BatchloomError as error:
        # Report stores that cannot be opened together with all other problems.
        problems.append(f"{key_path}: {error}")
        return None


def _parse_sources(entries: Any, problems: list[str]) -> dict[str, SourceSpec]:
    if not isinstance(entries, dict):
        problems.append(f"sources: {quote_value(entries)} is not a mapping of names to settings")
        return {}
    specs = {name: _parse_settings(SourceSpec, values, f"sources.{name}", problems) for name, values in entries.items()}
    return {name: spec or SourceSpec() for name, spec in specs.items()}


def _parse_stages(entries: Any, problems: list[str]) -> list[Stage]:
    if not isinstance(entries, list):
        problems.append(f"stages: {quote_value(entries)} is not a list of stages")
        return []
    stages = [_parse_settings(Stage, values, f"stages[{number}]", problems) for number, values in enumerate(entries)]
    return [stage for stage in stages if stage]


def _parse_settings(cls: type[T], values: Any, key_path: str, problems: list[str]) -> T | None:
    if not isinstance(values, Mapping):
        problems.append(f"{key_path}: {quote_value(values)} is not a mapping of settings")
        return None
    field_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    unknown_names = [name for name in values if name not in field_names]
    problems += [f"{key_path}.{name}: unknown setting{suggest(name, field_names)}" for name in unknown_names]
    if cls is Stage and "weights" not in values:
        problems.append(f"{key_path}.weights: missing")
        return None
    try:
        return cls(**{name: value for name, value in values.items() if name in field_names})
    except SettingsError as error:
        problems += [f"{key_path}.{problem}" for problem in error.problems]
        return None
