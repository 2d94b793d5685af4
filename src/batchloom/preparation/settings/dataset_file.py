"""YAML files that name data sets: a list, a block, or the file of a trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError
from batchloom.core.settings import quote_value, suggest
from batchloom.core.wording import format_list
from batchloom.core.yaml_reader import read_yaml
from batchloom.preparation.settings.config_location import ConfigLocation
from batchloom.preparation.settings.peer_files import read_dataset_info, read_peer_file, split_dataset_info

# Keys that hold a block, and keys of a file that is one.
_BLOCK_KEYS = ("dataset", "dataset_config")
_DATASET_KEYS = ("datasets", "dataset_path")
# A file with one of these keys is called a manifest in messages; "modules" is a trainer's.
MANIFEST_KEYS = (*_BLOCK_KEYS, *_DATASET_KEYS, "modules")
_TRAINER_KEY = "sft_dataset_name"
_MAX_LISTED = 8
_REMEDY = "write datasets: and a list of data sets ({path: ..., data_type: ...}), or dataset: and its settings"


def read_dataset_file(path: Path) -> tuple[dict[str, Any], ConfigLocation]:
    """Return the unchecked settings in a file, and their location."""
    info_file = split_dataset_info(str(path))
    if info_file is not None:
        return read_dataset_info(*info_file)
    content = read_yaml(path)
    if isinstance(content, dict) and (peer_file := read_peer_file(path, content)) is not None:
        return peer_file
    if isinstance(content, list):
        content, key_prefix = _find_listed_job(content)
    else:
        key_prefix = ""
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {_describe_type(content)} and names no data sets; {_REMEDY}.")
    blocks = [name for name in _BLOCK_KEYS if name in content]
    dataset_keys = [name for name in _DATASET_KEYS if name in content]
    if len(blocks) + bool(dataset_keys) > 1:
        raise InputError(
            f"{path} holds {' and '.join([*blocks, *dataset_keys])}, and one of them is read; leave the others out."
        )
    if blocks:
        return _read_block(path, content, blocks[0], key_prefix)
    if dataset_keys:
        return content, ConfigLocation(path, has_block=set(content) != {"datasets"})
    if trainer_datasets := _find_trainer_datasets(content):
        return _read_trainer_dataset(path, trainer_datasets)
    if "inputs" in content:
        raise InputError(
            f"{path} is a recipe (it has inputs), not a manifest of data sets; give it with --recipe {path}."
        )
    raise InputError(f"{path} names no data sets: {_describe_keys(content)}; {_REMEDY}.")


def _find_listed_job(jobs: list[Any]) -> tuple[Any, str]:
    """Return the first job with data sets in a list of jobs (``- type: trainer``)."""
    for number, job in enumerate(jobs):
        config = job.get("config") if isinstance(job, dict) else None
        if isinstance(config, dict) and any(name in config for name in _BLOCK_KEYS):
            return config, f"[{number}].config."
    return jobs, ""


def _read_block(
    path: Path, content: dict[str, Any], name: str, key_prefix: str
) -> tuple[dict[str, Any], ConfigLocation]:
    values = content[name]
    if not isinstance(values, dict):
        raise InputError(f"{path}: {key_prefix}{name} holds {_describe_type(values)}, not settings; {_REMEDY}.")
    location = ConfigLocation(path, f"{key_prefix}{name}.")
    if len(content) > 1 or key_prefix:
        location = location.with_note(f"{key_prefix}{name} is read, and the rest is not")
    return values, location


def _find_trainer_datasets(content: dict[str, Any]) -> dict[str, Any]:
    """Return the data sets in a trainer's file, by their path in it."""
    trainer_datasets = {}
    modules = content.get("modules")
    for module, settings in modules.items() if isinstance(modules, dict) else ():
        overrides = settings.get("overrides") if isinstance(settings, dict) else None
        if isinstance(overrides, dict) and _TRAINER_KEY in overrides:
            trainer_datasets[f"modules.{module}.overrides.{_TRAINER_KEY}"] = overrides[_TRAINER_KEY]
    return trainer_datasets


def _read_trainer_dataset(path: Path, trainer_datasets: dict[str, Any]) -> tuple[dict[str, Any], ConfigLocation]:
    (key_path, name), *other_datasets = trainer_datasets.items()
    for other_path, other_name in other_datasets:
        if other_name != name:
            raise InputError(
                f"{path}: {key_path} is {quote_value(name)} and {other_path} {quote_value(other_name)}, and one "
                "data set is read; leave the other out, or write datasets: and a list of both."
            )
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: {key_path} is {quote_value(name)}, and names no data set; write a path or a Hub id.")
    location = ConfigLocation(path, key_path.removesuffix(_TRAINER_KEY), has_block=False)
    return {"dataset_path": name}, location.with_note(f"{key_path} ({name}) is read, and the rest is the trainer's")


def _describe_keys(content: Mapping[str, Any]) -> str:
    names = list(content)
    hint = next((suggestion for name in names if (suggestion := suggest(name, [*_BLOCK_KEYS, *_DATASET_KEYS]))), "")
    return f"it holds {format_list([quote_value(name) for name in names], _MAX_LISTED) or 'nothing'}{hint}"


def _describe_type(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else "a mapping")
