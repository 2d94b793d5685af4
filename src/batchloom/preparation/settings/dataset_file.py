"""YAML files that name data sets: manifests, and the files of other libraries.

The libraries are LLaMA-Factory, axolotl and ms-swift.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from batchloom.chat import TEMPLATE_NAMES
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.settings import quote_value, suggest
from batchloom.core.wording import format_list
from batchloom.core.yaml_reader import read_yaml
from batchloom.preparation.settings import axolotl_datasets, llamafactory_datasets, swift_datasets
from batchloom.preparation.settings.peer_keys import PeerDatasets


class FileSetting(NamedTuple):
    """Setting that a file of another library states, with its key there."""

    value: Any
    key: str
    file: str


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """Location that a DatasetConfig was read from; without a file it is from Python.

    Attributes:
        file: the YAML file.
        block: path of its settings in the file, with a final dot; empty for the complete file.
        has_block: whether it states packing settings; False for a bare list.
        notes: notes about the file, one sentence each.
        recipe: whether it is a recipe, whose paths are not confined to its folder.
        entry_names: names of the data sets in messages; empty for their numbers.
        settings: settings of the recipe that the file of another library states.
        column_keys: keys of the file that name columns, for messages.
        job: file that was given, if it names the data sets of ``file``.
    """

    file: Path | None = None
    block: str = ""
    has_block: bool = True
    notes: tuple[str, ...] = ()
    recipe: bool = False
    entry_names: tuple[str, ...] = ()
    settings: Mapping[str, FileSetting] = field(default_factory=dict)
    column_keys: str = "mapping:"
    job: Path | None = None

    @property
    def name(self) -> str:
        """Name of the given file in messages; empty without one."""
        return str(self.job or self.file or "")

    def describe(self, key_path: str) -> str:
        """Return the name of a key in messages; empty without a file."""
        return "" if self.file is None else f"{self.file}: {key_path}"

    def with_note(self, note: str) -> "ConfigLocation":
        """Return a copy with one more note."""
        return replace(self, notes=(*self.notes, f"{self.file}: {note}."))

    def resolve_path(self, name: str) -> str:
        """Return a name as a path in the file's folder if it exists there, else as it is."""
        if self.file is None or os.path.isabs(name):  # noqa: PTH117
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
_MAX_LISTED = 8
_REMEDY = "write datasets: and a list of data sets ({path: ..., data_type: ...}), or dataset: and its settings"


def read_dataset_file(path: Path) -> tuple[dict[str, Any], ConfigLocation]:
    """Return the unchecked settings in a file, and their location."""
    info_file = split_dataset_info(str(path))
    if info_file is not None:
        return _read_dataset_info(*info_file)
    content = read_yaml(path)
    if isinstance(content, dict) and (peer_file := _read_peer_file(path, content)) is not None:
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


def _describe_keys(content: Mapping[str, Any]) -> str:
    names = list(content)
    hint = next((suggestion for name in names if (suggestion := suggest(name, [*_BLOCK_KEYS, *_DATASET_KEYS]))), "")
    return f"it holds {format_list([quote_value(name) for name in names], _MAX_LISTED) or 'nothing'}{hint}"


def _describe_type(value: object) -> str:
    kinds = {list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else "a mapping")


DATASET_INFO = "dataset_info.json"
_INFO_PATTERN = re.compile(r"((?:.*/)?dataset_info\.json)(?::(.*))?", re.DOTALL)
# Keys of the file of this name in a folder of save_to_disk.
_SAVED_KEYS = {"features", "builder_name", "citation"}
# Keys that locate a data set.
_LOCATION_KEYS = {"file_name", "hf_hub_url", "cloud_file_name", "dataset_path", "hf_dataset_id"}
_REMOTE_FOLDERS = ("ONLINE", "REMOTE:")
PeerFile = tuple[dict[str, Any], ConfigLocation]


def split_dataset_info(text: str) -> tuple[Path, list[str]] | None:
    """Split ``FOLDER/dataset_info.json:NAME,NAME#N``; None if it is another path."""
    match = None if is_url(text) else _INFO_PATTERN.fullmatch(text)
    if match is None:
        return None
    return Path(match[1]), [name.strip() for name in (match[2] or "").split(",") if name.strip()]


def _read_dataset_info(path: Path, names: list[str]) -> PeerFile:
    """Read a ``dataset_info.json`` of LLaMA-Factory; if it is a list, of ms-swift.

    Without names all of its data sets are read, which must be files.
    """
    content = read_yaml(path)
    translate: Callable[[Sequence[str]], PeerDatasets]
    if isinstance(content, list):
        known_names = swift_datasets.list_dataset_names(content)
        translate = partial(swift_datasets.translate_dataset_info, content)
    else:
        info = _check_dataset_info(path, content)
        known_names, translate = list(info), partial(llamafactory_datasets.translate_dataset_info, info)
    peer = PeerDatasets()
    for known_name in names or known_names:
        name, mark, count = known_name.partition("#") if names else (known_name, "", "")
        part = translate([name])
        if mark and (not count.isdecimal() or int(count) < 1 or len(part.datasets) > 1):
            peer.problems.append(f"{name}#{count}: {count!r} is not a number of records of at least 1, of one data set")
        elif mark:
            part.datasets = [{**dataset, "num_samples": int(count)} for dataset in part.datasets]
        if not names and not part.problems:
            peer.problems += [
                f"{name}: {dataset['path']} is no file or folder, and a data set of the Hub is read only by name; name "
                f"the data sets to read: {path}:NAME,NAME"
                for dataset in part.datasets
                if not _is_file(str(dataset["path"]), path.parent)
            ]
        peer.datasets += part.datasets
        peer.notes += part.notes
        peer.problems += part.problems
        peer.column_keys = part.column_keys
    return _make_values(path, peer, path)


def _is_file(name: str, folder: Path) -> bool:
    return is_url(name) or (folder / _resolve_from_current_folder(name, folder)).exists()


def describe_dataset_info(folder: Path) -> str:
    """Return the note about data sets that a folder's file names; else empty."""
    path = folder / DATASET_INFO
    try:
        content = read_yaml(path) if path.is_file() else None
    except InputError:
        # The file is no input here.
        return ""
    entries = content if isinstance(content, list) else content.values() if isinstance(content, dict) else ()
    if not any(isinstance(entry, dict) and not _LOCATION_KEYS.isdisjoint(entry) for entry in entries):
        return ""
    return (
        f"{folder} is read as a folder of files, without the columns and roles of {path}; give {path} to read its data "
        f"sets, or {path}:NAME,NAME for some of them."
    )


def _read_peer_file(path: Path, content: dict[str, Any]) -> PeerFile | None:
    """Return the data sets of a job of another library; None if the file is none."""
    named = content.get("dataset")
    if axolotl_datasets.is_axolotl_config(content):
        return _make_values(path, axolotl_datasets.translate_config(content), path)
    if not isinstance(named, (str, list)):
        return None
    if any(key in content for key in llamafactory_datasets.JOB_MARKERS):
        info_path = _find_dataset_info(path, content.get("dataset_dir"))
        info = _check_dataset_info(info_path, read_yaml(info_path))
        return _make_values(path, llamafactory_datasets.translate_job(content, info), info_path)
    return _make_values(path, swift_datasets.translate_job(content), path)


def _check_dataset_info(path: Path, content: object) -> dict[str, Any]:
    if isinstance(content, dict) and _SAVED_KEYS & content.keys():
        raise InputError(f"{path} describes a saved data set; name its folder instead: {path.parent}.")
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {quote_value(content)}, and no data sets by name.")
    return content


def _find_dataset_info(path: Path, folder: object) -> Path:
    """Return the path of a job's ``dataset_info.json``.

    As in LLaMA-Factory, the folder begins in the current one; else in that of the job.
    """
    if folder is not None and not isinstance(folder, str):
        raise SettingsError([f"{path}: dataset_dir: {quote_value(folder)} is not a text"])
    name = folder or "data"
    if name.startswith(_REMOTE_FOLDERS):
        raise InputError(
            f"{path}: dataset_dir {name} names no folder; list the data sets of the Hub in a manifest (datasets: and "
            "path: ORG/NAME)."
        )
    candidates = list(dict.fromkeys((Path(name) / DATASET_INFO, path.parent / name / DATASET_INFO)))
    for candidate in candidates:
        if candidate.exists():
            return candidate
    listing = " and no ".join(map(str, candidates))
    raise InputMissingError(f"{path}: there is no {listing}; write the folder of {DATASET_INFO} under dataset_dir.")


def _make_values(path: Path, peer: PeerDatasets, base: Path) -> PeerFile:
    """Return settings and their location; relative paths begin next to ``base``."""
    datasets = [_locate_dataset(dataset, base.parent, peer.problems) for dataset in peer.datasets]
    settings = dict(peer.settings)
    template, template_key = settings.get("template", ("", ""))
    # A template is a name or a file: in the current folder, else next to the configuration.
    if template and template not in TEMPLATE_NAMES and not Path(template).exists():
        adjacent = path.parent / template
        settings["template"] = str(adjacent) if adjacent.is_file() else template, template_key
    if peer.problems:
        raise SettingsError([f"{path}: {problem}" for problem in peer.problems])
    values: dict[str, Any] = {"datasets": datasets}
    if "tokenizer" in settings:
        name, key = settings["tokenizer"]
        tokenizer = ConfigLocation(path).resolve_path(name)
        values["processor_config"] = {"processor_name": tokenizer}
        settings["tokenizer"] = tokenizer, key
    names = tuple(str(dataset.get("name") or f"datasets[{n}]") for n, dataset in enumerate(datasets))
    notes = [*peer.notes, *([f"not taken: {'; '.join(peer.not_taken)}"] if peer.not_taken else [])]
    location = ConfigLocation(
        base,
        has_block=False,
        notes=tuple(f"{path}: {note}." for note in notes),
        entry_names=names,
        settings={name: FileSetting(value, key, str(path)) for name, (value, key) in settings.items()},
        column_keys=peer.column_keys,
        job=path,
    )
    return values, location


def _locate_dataset(dataset: Mapping[str, Any], folder: Path, problems: list[str]) -> dict[str, Any]:
    """Return a data set with a path that a manifest can hold."""
    located = dict(dataset)
    path, repository = str(located["path"]) if "path" in located else "", located.pop("repository", None)
    if repository is not None:
        is_folder = (folder / _resolve_from_current_folder(repository, folder)).is_dir()
        revision = f"@{located.pop('revision')}" if located.get("revision") else ""
        located["path"] = path if is_folder else f"hf://datasets/{repository}{revision}/{path}"
        located.pop("split", None)
        located.pop("config", None)
    if path and not is_url(str(located["path"])) and located.get("data_type") != "hf_dataset":
        located["path"] = _resolve_from_current_folder(str(located["path"]), folder)
        full_path = folder / str(located["path"])
        split = located.get("split")
        # A file has one split, which these libraries call train.
        if split and full_path.exists() and not (full_path / split).is_dir():
            del located["split"]
            if split != "train" and split.isidentifier():
                problems.append(f"{path}: split {split!r} is not 'train', the only split of a file")
    return located


def _resolve_from_current_folder(name: str, folder: Path) -> str:
    """Return the absolute path of a name that exists in the current folder only.

    These libraries begin paths in the current folder, and manifests in their own.
    """
    if os.path.isabs(name) or (folder / name).exists() or not Path(name).exists():  # noqa: PTH117
        return name
    return os.path.abspath(name)  # noqa: PTH100
