"""YAML files that name data sets: manifests and blocks of trainers' files."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputError
from batchloom.core.settings import quote_value, suggest
from batchloom.core.wording import format_list
from batchloom.core.yaml_reader import read_yaml


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """Location that a DatasetConfig was read from; without a file it is from Python."""

    file: Path | None = None  # the YAML file
    block: str = ""  # path of its settings in the file, with a final dot; empty for the complete file
    has_block: bool = True  # whether it states packing settings; False for a bare list
    notes: tuple[str, ...] = ()  # about the file, one sentence each
    recipe: bool = False  # whether it is a recipe, whose paths are not confined to its folder

    @property
    def name(self) -> str:
        """Name of the given file in messages; empty without one."""
        return str(self.file or "")

    def describe(self, key_path: str) -> str:
        """Return the name of a key in messages; empty without a file."""
        return "" if self.file is None else f"{self.file}: {key_path}"

    def with_note(self, note: str) -> "ConfigLocation":
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, f"{self.file}: {note}."))

    def resolve_path(self, name: str) -> str:
        """Return a name as a path in the file's folder if it exists there, else as it is."""
        if self.file is None or os.path.isabs(name):
            return name
        path = self.file.parent / name
        # Without the dot, ./gpt2 would be a tokenizer name.
        if not path.exists() or (self.recipe and self.file.parent == Path()):
            return name
        if self.recipe:
            return str(path)
        if ".." in path.parts[len(self.file.parent.parts) :] or not path.resolve().is_relative_to(
            self.file.parent.resolve()
        ):
            raise InputError(
                f"{self.describe(self.block)}processor_config.processor_name: {quote_value(name)} lies outside of the "
                "folder of the manifest; put it there, or write its path out in full, from its / on."
            )
        return str(path)


# Keys that hold a block, and keys of a file that is one.
_BLOCK_KEYS = ("dataset", "dataset_config")
_DATASET_KEYS = ("datasets", "dataset_path")
# A file with one of these keys is called a manifest in messages.
MANIFEST_KEYS = (*_BLOCK_KEYS, *_DATASET_KEYS)
# Keys of the jobs of axolotl, LLaMA-Factory and ms-swift.
_MODEL_KEYS = ("base_model", "model_name_or_path", "model")
_MAX_LISTED = 8
_REMEDY = "write datasets: and a list of data sets ({path: ..., data_type: ...}), or dataset: and its settings"


def read_dataset_file(path: Path) -> tuple[dict[str, Any], ConfigLocation]:
    """Return the unchecked settings in a file, and their location."""
    content = read_yaml(path)
    if isinstance(content, list):
        content, key_prefix = _find_listed_job(content)
    else:
        key_prefix = ""
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {_describe_type(content)} and names no data sets; {_REMEDY}.")
    _refuse_trainer_job(path, content)
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
    if "inputs" in content:
        raise InputError(
            f"{path} is a recipe (it has inputs), not a manifest of data sets; give it with --recipe {path}."
        )
    raise InputError(f"{path} names no data sets: {_describe_keys(content)}; {_REMEDY}.")


def _refuse_trainer_job(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a job of axolotl, LLaMA-Factory or ms-swift, which name a model."""
    key = next((name for name in _MODEL_KEYS if name in content), None)
    has_block = any(isinstance(content.get(name), dict) for name in _BLOCK_KEYS)
    if has_block or (key is None and not isinstance(content.get("dataset"), (str, list))):
        return
    raise InputError(
        f"{path} is the job of another trainer{f' (it has {key}:)' if key else ''}, whose settings are not read. List "
        f"its data sets in a manifest (datasets:), and give what is trained as options: docs/how-to/coming-from says "
        "how, key by key."
    )


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


def _describe_keys(content: Mapping[str, Any]) -> str:
    names = list(content)
    hint = next((suggestion for name in names if (suggestion := suggest(name, [*_BLOCK_KEYS, *_DATASET_KEYS]))), "")
    return f"it holds {format_list([quote_value(name) for name in names], _MAX_LISTED) or 'nothing'}{hint}"


def _describe_type(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else "a mapping")
