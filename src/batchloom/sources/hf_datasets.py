"""Datasets of Hugging Face: on the Hub, and saved by ``save_to_disk``.

``datasets`` decides which files belong to a configuration and a split; our own readers read them.
Loading scripts never run. Error messages of the libraries are not repeated, as they may contain a
token.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from batchloom.core.addresses import is_url
from batchloom.core.errors import (
    AccessError,
    DownloadError,
    InputError,
    InputMissingError,
    MissingDependencyError,
    SettingsError,
)
from batchloom.core.files import read_json_object
from batchloom.core.settings import suggest
from batchloom.core.synthetic_data import DISTRIBUTED_DUMMY, DUMMY, SYNTHETIC, SYNTHETIC_NAMES
from batchloom.core.wording import format_list
from batchloom.remote import MAX_CONNECT_ATTEMPTS, RemoteFault, check_hub_endpoint, make_stat_result, retry_transient
from batchloom.sources.files.archives import detect_archive_by_name
from batchloom.sources.files.file_opening import get_pinned_revision, split_pinned_url
from batchloom.sources.formats.format_registry import detect_kind_by_name
from batchloom.sources.splits import ALL_SPLITS, TRAIN, SplitRequest

# Larger datasets are streamed by default; others are downloaded once.
STREAMING_MIN_BYTES = 10 * 10**9
T = TypeVar("T")
# Path or URL of a file, its name relative to the inputs, and its status.
ListedFile = tuple[str, str, os.stat_result]

_WORD_PATTERN = r"[A-Za-z0-9_][\w.+-]*"
_NAME_PATTERN = re.compile(
    rf"(?P<repo>{_WORD_PATTERN}/{_WORD_PATTERN})(?::(?P<config>{_WORD_PATTERN}))?(?:/(?P<split>\w+))?(?:@(?P<revision>[^\s@:]+))?"
)
_REPOSITORY_URL_PATTERN = re.compile(rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN}?)(?:@([^/@]+|refs/[^@]+))?/?")
_PATHS_PER_REQUEST = 500
_MAX_LISTED = 12
_DATASET_NAME = "dataset_info.json"
_STATE_NAME = "state.json"
_SPLITS_NAME = "dataset_dict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPreset:
    """A Hub dataset with a short name, or synthetic data without a repository.

    Attributes:
        name: short name.
        description: content, in one sentence.
        repository: name of the repository on the Hub.
        config: name of the configuration.
        split: name of the split.
        text_field: field that holds the text.
        tokenizer: usual tokenizer; ``prepare`` takes any.
        bytes: approximate size of its files.
    """

    name: str
    description: str
    repository: str
    config: str = "default"
    split: str = "train"
    text_field: str = "text"
    tokenizer: str = "gpt2"
    bytes: int

    @property
    def location(self) -> str:
        """Input that the name refers to."""
        return f"{self.repository}:{self.config}/{self.split}" if self.repository else self.name


# Sizes are those of the split's files, as listed in the repositories.
_PRESETS = (
    DatasetPreset(
        name="fineweb",
        description="Cleaned English web text: a random sample of 10 billion GPT-2 tokens out of about 15 trillion "
        "(the complete set is HuggingFaceFW/fineweb:default/train).",
        repository="HuggingFaceFW/fineweb",
        config="sample-10BT",
        bytes=27_600_000_000,
    ),
    DatasetPreset(
        name="fineweb-edu",
        description="Educational English web text: a random sample of 10 billion GPT-2 tokens out of 1.3 trillion "
        "(the complete set is HuggingFaceFW/fineweb-edu:default/train).",
        repository="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        bytes=28_500_000_000,
    ),
    DatasetPreset(
        name="pile",
        description="The Pile without its copyrighted parts: papers, code, web pages, books, dialogue; mostly English.",
        repository="monology/pile-uncopyrighted",
        bytes=335_000_000_000,
    ),
    DatasetPreset(
        name="shakespeare",
        description="The First Folio: 36 plays of Shakespeare, one play per document; 30 of them for training.",
        repository="gvlassis/shakespearefirstfolio",
        bytes=2_600_000,
    ),
    DatasetPreset(
        name="tiny_shakespeare",
        description="40,000 lines of Shakespeare as one text, the classic data of character models.",
        repository="karpathy/tiny_shakespeare",
        bytes=634_000,
    ),
)


_SYNTHETIC_PRESETS = tuple(
    DatasetPreset(
        name=name,
        description=f"Synthetic documents for throughput tests; {share}.",
        repository="",
        config="",
        text_field="",
        tokenizer="none",
        bytes=0,
    )
    for name, share in (
        (DISTRIBUTED_DUMMY, "each rank reads its own share"),
        (DUMMY, "every rank reads the same share"),
    )
)


def find_preset(name: str) -> DatasetPreset | None:
    """Return the dataset of a short name, or None."""
    return next((preset for preset in _PRESETS if preset.name == name), None)


def list_preset_names() -> list[str]:
    """Return all short names."""
    return [*SYNTHETIC_NAMES, *(preset.name for preset in _PRESETS)]


def list_datasets() -> list[dict[str, Any]]:
    """List the datasets with a short name as dictionaries of plain values.

    Keys: ``name``, ``description``, ``repository``, ``config``, ``split``, ``text_field``,
    ``tokenizer``, ``bytes`` (approximate), ``size`` (the same, formatted), ``streaming`` (whether
    ``prepare`` reads it remotely by default), ``input`` (the input that the name refers to),
    ``source``: ``real``, or ``synthetic`` for generated data of any size without a repository.
    """
    return [
        {
            **asdict(preset),
            "size": _format_preset_size(preset.bytes) if preset.repository else "any",
            "streaming": preset.bytes > STREAMING_MIN_BYTES,
            "input": preset.location,
            "source": "real" if preset.repository else SYNTHETIC,
        }
        for preset in (*_SYNTHETIC_PRESETS, *_PRESETS)
    ]


def _format_preset_size(size: int) -> str:
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{size / unit:.1f} {name}"


@dataclass(frozen=True, slots=True)
class HubDatasetName:
    """``org/name[:config][/split][@revision]``; missing parts are empty."""

    repo: str
    config: str = ""
    split: str = ""
    revision: str = ""


def parse_hub_name(location: str) -> HubDatasetName | None:
    """Parse a Hub dataset name; None if the location cannot be one.

    A preset name is one, and ``org/name`` with its additions, unless it ends like a data file. The
    caller checks whether a file or folder has that name.
    """
    preset = find_preset(location)
    if preset is not None:
        return HubDatasetName(preset.repository, preset.config, preset.split)
    url_match = _REPOSITORY_URL_PATTERN.fullmatch(location)
    if url_match:
        return HubDatasetName(url_match[1], revision=url_match[2] or "")
    match = _NAME_PATTERN.fullmatch(location)
    if match is None:
        return None
    plain = location.partition("@")[0]
    if detect_kind_by_name(plain) is not None or detect_archive_by_name(plain) is not None:
        return None
    groups = match.groupdict()
    return HubDatasetName(*(groups[part] or "" for part in ("repo", "config", "split", "revision")))


def find_hub_name(location: str, folder: str = "") -> HubDatasetName | None:
    """Return the Hub dataset that a location names; None for a local path.

    A file or folder of that name takes precedence. ``data/train`` next to a folder ``data`` is also a
    path, though mistyped, and no Hub dataset.

    Args:
        location: location as given.
        folder: base of relative paths; the working folder by default.
    """
    name = parse_hub_name(location)
    if name is None or is_url(location):
        return name
    first, slash, _ = location.partition("/")
    path_exists = os.path.lexists(os.path.join(folder, location))
    parent_exists = os.path.isdir(os.path.join(folder, first))
    is_plain = bool(slash) and ":" not in location and "@" not in location
    return None if path_exists or (parent_exists and is_plain) else name


def strip_revision(url: str) -> str:
    """Return a Hub URL without the commit, which names the file at any commit."""
    return re.sub(r"^(hf://[^@]+)@[0-9a-f]{40}", r"\1", url)


def pin_revision(url: str) -> str:
    """Return a Hub URL with its revision as a commit; other locations are unchanged.

    Raises:
        InputMissingError: the repository or revision does not exist.
        AccessError: access is denied.
        DownloadError: the Hub cannot be reached.
    """
    if get_pinned_revision(url) or not url.startswith("hf://datasets/"):
        return url
    match = re.fullmatch(
        rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN})(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?/(.+)",
        url,
    )
    if match is None:
        return url
    repo, revision, inside = match.groups()
    commit = _resolve_commit(HubDatasetName(repo, revision=(revision or "").replace("%2F", "/")))
    return f"hf://datasets/{repo}@{commit}/{inside}"


def choose_hub_split(name: HubDatasetName, request: SplitRequest) -> HubDatasetName:
    """Return a name with the split and configuration that are asked for.

    Raises:
        SettingsError: the name says another split or configuration, or all are asked for.
    """
    for word, wanted, given in (("split", request.split, name.split), ("config", request.config, name.config)):
        if wanted and given and wanted != given:
            raise SettingsError([f"input_split: {wanted!r} and the {word} {given!r} of {name.repo!r} differ; give one"])
    if request.split == ALL_SPLITS:
        raise SettingsError([f"input_split: name each split of a data set of the Hub: {name.repo}:CONFIG/SPLIT"])
    return replace(name, split=request.split, config=request.config or name.config)


def list_hub_files(name: HubDatasetName) -> tuple[list[ListedFile], str]:
    """Return the data files of a dataset in the order of ``datasets``, and a note.

    A file has its URL at the commit, and a status with its size and blob id. The note states the chosen configuration,
    split and commit.
    """
    commit = _resolve_commit(name)
    config, splits = _find_data_files(name, commit)
    split = name.split or ("train" if "train" in splits else "")
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        fact = f"has no split {split!r}" if split else "has several splits, but no train split"
        raise InputMissingError(
            f"Dataset {name.repo!r} {fact}; it has {', '.join(splits)}{suggest(split, splits)}. "
            f"{name.repo}:{config}/{next(iter(splits))}."
        )
    files = _describe_files(name, commit, splits[split])
    size = sum(status.st_size for _, _, status in files)
    other_splits = [split_name for split_name in splits if split_name != split]
    omitted_note = f" (not {', '.join(other_splits)})" if other_splits else ""
    return files, (
        f"{name.repo}: configuration {config}, split {split}{omitted_note}, {len(files):,} files, {size / 1e6:,.1f} "
        f"MB, commit {commit}; to read the same version again, add @{commit[:12]}."
    )


def download_to_cache(files: Sequence[ListedFile], *, streaming: bool | None) -> str:
    """Download files into the local Hub cache, from which they are then opened.

    Files that fail are read remotely, in blocks small enough for an unstable connection:
    ``huggingface_hub`` restarts a chunk of 10 MB after every failure.
    """
    size = sum(status.st_size for _, _, status in files)
    if streaming or (streaming is None and size > STREAMING_MIN_BYTES):
        return ""
    from huggingface_hub import hf_hub_download

    for url, name, _ in files:
        repo, commit, inside = split_pinned_url(url)
        work = partial(hf_hub_download, repo, inside, repo_type="dataset", revision=commit)
        try:
            _query_hub(HubDatasetName(repo), work, retry=False)
        except DownloadError:
            return f"{name} could not be downloaded; the remaining files are read remotely."
    return ""


def _resolve_commit(name: HubDatasetName) -> str:
    """Return the current commit of the name."""
    check_hub_endpoint()
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise _make_missing_library_error(name) from None
    info = _query_hub(name, lambda: HfApi().dataset_info(name.repo, revision=name.revision or None))
    return str(info.sha)


def _find_data_files(name: HubDatasetName, commit: str) -> tuple[str, dict[str, list[str]]]:
    """Return the configuration name, and the URLs of its data files by split."""
    try:
        import datasets
    except ImportError:
        raise _make_missing_library_error(name) from None

    def build() -> Any:
        try:
            return datasets.load_dataset_builder(name.repo, name.config or None, revision=commit)
        except RuntimeError:
            raise InputError(
                f"Dataset {name.repo!r} needs a loading script, and loading scripts are never run here; try the "
                "Parquet copy that the Hub makes of many data sets "
                f"({name.repo}@refs/convert/parquet), or name its data files as URLs (hf://datasets/{name.repo}/...)."
            ) from None
        except ValueError as error:
            if isinstance(error, OSError):
                raise
            return None

    builder = _query_hub(name, build)
    if builder is None:
        _raise_config_error(
            name,
            _query_hub(name, lambda: datasets.get_dataset_config_names(name.repo, revision=commit)),
        )
    files = builder.config.data_files or {}
    return builder.config.name, {str(split): list(urls) for split, urls in files.items()}


def _raise_config_error(name: HubDatasetName, configs: list[str]) -> NoReturn:
    if name.config in configs or (not name.config and len(configs) < 2):
        raise InputError(
            f"Dataset {name.repo!r} has a dataset card that the datasets library cannot read; name its data files as "
            f"URLs (hf://datasets/{name.repo}/...)."
        ) from None
    fact = f"has no configuration {name.config!r}" if name.config else "has several configurations"
    raise InputMissingError(
        f"Dataset {name.repo!r} {fact}; it has {format_list(configs, _MAX_LISTED)}"
        f"{suggest(name.config, configs)}. Name one as {name.repo}:{configs[0] if configs else 'CONFIGURATION'}."
    ) from None


def _describe_files(name: HubDatasetName, commit: str, urls: list[str]) -> list[ListedFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    repo_paths = [split_pinned_url(url)[2] for url in urls]
    facts = {}
    for start in range(0, len(repo_paths), _PATHS_PER_REQUEST):
        path_batch = repo_paths[start : start + _PATHS_PER_REQUEST]
        fetch_infos = partial(HfApi().get_paths_info, name.repo, path_batch, revision=commit, repo_type="dataset")
        facts.update(
            {
                repo_file.path: repo_file
                for repo_file in _query_hub(name, fetch_infos)
                if isinstance(repo_file, RepoFile)
            }
        )
    files = []
    for url, path in zip(urls, repo_paths, strict=True):
        info = {"size": facts[path].size, "blob_id": facts[path].blob_id}
        files.append((url, f"{name.repo}/{path}", make_stat_result(url, info)))
    return files


def _query_hub(name: HubDatasetName, work: Callable[[], T], *, retry: bool = True) -> T:
    """Return the result of ``work``; Hub errors become batchloom errors."""
    from huggingface_hub import errors

    repo = name.repo

    def query() -> T:
        try:
            return work()
        except errors.GatedRepoError:
            raise AccessError(
                f"Dataset {repo!r} asks for permission: accept its terms at https://huggingface.co/datasets/{repo}, "
                "then run `hf auth login` or set HF_TOKEN."
            ) from None
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise InputMissingError(
                f"Dataset {repo!r} not found: there is no file or folder of that name, and the Hub has no such data "
                "set (or it is private: run `hf auth login`); check the name."
            ) from None
        except errors.RevisionNotFoundError:
            raise InputMissingError(
                f"Dataset {repo!r} not found at revision {name.revision!r}: check the branch, tag or commit after "
                "the @."
            ) from None

    result = retry_transient(query, MAX_CONNECT_ATTEMPTS if retry else 1)
    if not isinstance(result, RemoteFault):
        return result
    if result.kind == "missing":
        raise InputMissingError(
            f"Dataset {repo!r} holds no supported data files (JSON Lines, Parquet, CSV, text, ...); look at "
            f"https://huggingface.co/datasets/{repo}, or name files as URLs (hf://datasets/{repo}/...)."
        )
    raise DownloadError(
        f"Failed to download dataset {repo!r}: {result.description}. There is no file or folder of that name either; "
        f"go online, or download it on a machine with a network (hf download --repo-type dataset {repo} --local-dir "
        "DIR) and name that folder."
    )


def _make_missing_library_error(name: HubDatasetName) -> MissingDependencyError:
    return MissingDependencyError(
        f"There is no file or folder {name.repo}. To read it as a data set of the Hub, install datasets and "
        "huggingface_hub: pip install 'batchloom[hf]' (or: pip install datasets transformers)."
    )


def find_saved_split(folder: str, wanted: str = "") -> tuple[list[str], str] | None:
    """Return the split folders to read and a note; None if no saved DatasetDict.

    Args:
        folder: path of the folder.
        wanted: the split, or ``all``; empty for ``train``, or the only one.
    """
    if not os.path.exists(f"{folder}/{_SPLITS_NAME}"):
        return None
    splits = _read_json(f"{folder}/{_SPLITS_NAME}").get("splits")
    if not isinstance(splits, list) or not all(_is_plain_name(name) for name in splits) or not splits:
        raise InputError(f"{folder}/{_SPLITS_NAME} names no splits; save the dataset again.")
    if wanted == ALL_SPLITS:
        return [f"{folder}/{name}" for name in splits], f"All splits of the saved dataset {folder} are read."
    if wanted and wanted not in splits:
        raise InputMissingError(
            f"{folder} has no split {wanted!r}; it has {', '.join(splits)}{suggest(wanted, splits)}."
        )
    if not wanted and TRAIN not in splits and len(splits) > 1:
        raise InputError(f"{folder} holds the splits {', '.join(splits)}; name one, for example {folder}/{splits[0]}")
    split = wanted or (TRAIN if TRAIN in splits else splits[0])
    others = [name for name in splits if name != split]
    note = f"Split {split} of the saved dataset {folder} is read"
    return [f"{folder}/{split}"], note + (
        f", and not {', '.join(others)} (--input-split NAME reads another, all everything)." if others else "."
    )


def list_saved_files(folder: str) -> list[str] | None:
    """Return the data files of a saved dataset in order; None for another folder."""
    required = (_STATE_NAME, _DATASET_NAME)
    if not all(os.path.exists(f"{folder}/{name}") for name in required):
        return None
    state = _read_json(f"{folder}/{_STATE_NAME}")
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder} is a saved dataset that selects its rows by an index; save it again after flatten_indices()."
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not isinstance(entries, list) or len(names) != len(entries) or not all(map(_is_plain_name, names)):
        raise InputError(f"{folder}/{_STATE_NAME} does not name its data files; save the dataset again.")
    return [f"{folder}/{name}" for name in names]


def is_saved_dataset(paths: Collection[str]) -> bool:
    """Return whether relative file paths show that a folder holds a saved dataset."""
    folders = {path.rpartition("/")[0] for path in paths if PurePosixPath(path).name == _STATE_NAME}
    return any(f"{folder}/{_DATASET_NAME}".lstrip("/") in paths for folder in folders)


def _is_plain_name(name: Any) -> bool:
    """Return whether a name stays inside its folder."""
    return isinstance(name, str) and PurePosixPath(name).name == name and name not in ("", "..")


def _read_json(path: str) -> dict[str, Any]:
    try:
        return read_json_object(Path(path), 16 << 20)
    except ValueError as error:
        raise InputError(f"{path} {error}; save the dataset again.") from error
