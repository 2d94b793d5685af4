"""Datasets of the Hugging Face Hub: the data files of a name, at one commit.

``datasets`` decides which files belong to a configuration and a split; our own readers read them.
Loading scripts never run. Error messages of the libraries are not repeated, as they may contain a
token.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from batchloom.core.addresses import is_url
from batchloom.core.errors import (
    AccessError,
    DownloadError,
    InputError,
    InputMissingError,
    MissingDependencyError,
)
from batchloom.core.settings import suggest
from batchloom.remote import (
    MAX_CONNECT_ATTEMPTS,
    check_hub_endpoint,
    classify_error,
    compute_backoff,
    list_library_errors,
    make_stat_result,
)
from batchloom.sources.files.dataset_names import STREAMING_MIN_BYTES, find_preset
from batchloom.sources.files.file_kinds import detect_archive_by_name, detect_kind_by_name

T = TypeVar("T")

_WORD_PATTERN = r"[A-Za-z0-9_][\w.+-]*"
_NAME_PATTERN = re.compile(
    rf"(?P<repo>{_WORD_PATTERN}/{_WORD_PATTERN})(?::(?P<config>{_WORD_PATTERN}))?(?:/(?P<split>\w+))?(?:@(?P<revision>[^\s@:]+))?"
)
_REPOSITORY_URL_PATTERN = re.compile(rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN}?)(?:@([^/@]+|refs/[^@]+))?/?")
_PINNED_URL_PATTERN = re.compile(rf"hf://datasets/({_WORD_PATTERN}/{_WORD_PATTERN})@([0-9a-f]{{40}})/(.+)")
_PATHS_PER_REQUEST = 500
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class HubDatasetName:
    """``org/name[:config][/split][@revision]``; missing parts are empty."""

    repo: str
    config: str = ""
    split: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One data file: its URL at the commit, its name, and its size and blob id."""

    url: str
    name: str
    status: os.stat_result


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
    path_exists = os.path.lexists(os.path.join(folder, location))  # noqa: PTH118 - paths remain strings
    parent_exists = os.path.isdir(os.path.join(folder, first))  # noqa: PTH112, PTH118
    is_plain = bool(slash) and ":" not in location and "@" not in location
    return None if path_exists or (parent_exists and is_plain) else name


def get_pinned_revision(url: str) -> str:
    """Return the commit to which a Hub URL is pinned, or "" if it is not pinned."""
    # Most locations are paths, for which the cheap test suffices.
    match = _PINNED_URL_PATTERN.fullmatch(url) if "://" in url else None
    return match[2] if match else ""


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


def list_hub_files(name: HubDatasetName) -> tuple[list[HubFile], str]:
    """Return the data files of a dataset in the order of ``datasets``, and a note.

    The note states the chosen configuration, split and commit.

    Raises:
        MissingDependencyError: datasets or huggingface_hub is not installed.
        InputMissingError: the dataset, revision, configuration, split or data file does not exist.
        InputError: it needs a loading script.
        AccessError: its terms must be accepted first.
        DownloadError: the Hub cannot be reached.
    """
    commit = _resolve_commit(name)
    config, splits = _find_data_files(name, commit)
    split = name.split or ("train" if "train" in splits else "")
    if not split and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        fact = f"has no split {split!r}" if split else "has several splits, but no train split"
        raise InputMissingError(
            f"Dataset {name.repo!r} {fact}; it has {', '.join(splits)}{suggest(split, splits)}. Name one as "
            f"{name.repo}:{config}/{next(iter(splits))}."
        )
    files = _describe_files(name, commit, splits[split])
    size = sum(file.status.st_size for file in files)
    other_splits = [split_name for split_name in splits if split_name != split]
    omitted_note = f" (not {', '.join(other_splits)})" if other_splits else ""
    return files, (
        f"{name.repo}: configuration {config}, split {split}{omitted_note}, {len(files):,} files, {size / 1e6:,.1f} "
        f"MB, commit {commit}; to read the same version again, add @{commit[:12]}."
    )


def download_to_cache(files: Sequence[HubFile], *, streaming: bool | None) -> str:
    """Download files into the local Hub cache, from which they are then opened.

    Files that fail are read remotely, in blocks small enough for an unstable connection:
    ``huggingface_hub`` restarts a chunk of 10 MB after every failure.

    Args:
        files: files of :func:`list_hub_files`.
        streaming: whether they stay remote; None: only if they exceed 10 GB together.

    Returns:
        A note if a download failed, else an empty string.
    """
    size = sum(file.status.st_size for file in files)
    if streaming or (streaming is None and size > STREAMING_MIN_BYTES):
        return ""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - optional

    for file in files:
        repo, commit, inside = _split_pinned_url(file.url)
        work = partial(hf_hub_download, repo, inside, repo_type="dataset", revision=commit)
        try:
            _query_hub(HubDatasetName(repo), work, MAX_CONNECT_ATTEMPTS)
        except DownloadError:
            return f"{file.name} could not be downloaded; the remaining files are read remotely."
    return ""


def find_cached_copy(url: str, size: int) -> str | None:
    """Return the path of the downloaded copy of a pinned file, or None."""
    if not get_pinned_revision(url):
        return None
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional

    repo, commit, inside = _split_pinned_url(url)
    cached_path = try_to_load_from_cache(repo, inside, repo_type="dataset", revision=commit)
    if not isinstance(cached_path, str):
        return None
    with contextlib.suppress(OSError):
        if os.stat(cached_path).st_size == size:  # noqa: PTH116 - paths remain strings
            return cached_path
    return None


def _split_pinned_url(url: str) -> tuple[str, str, str]:
    match = _PINNED_URL_PATTERN.fullmatch(url)
    if match is None:
        raise AssertionError("only files that are pinned to a commit are downloaded")
    return match[1], match[2], match[3]


def _resolve_commit(name: HubDatasetName) -> str:
    """Return the current commit of the name."""
    check_hub_endpoint()
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415 - optional
    except ImportError:
        raise _make_missing_library_error(name) from None
    info = _query_hub(name, lambda: HfApi().dataset_info(name.repo, revision=name.revision or None))
    return str(info.sha)


def _find_data_files(name: HubDatasetName, commit: str) -> tuple[str, dict[str, list[str]]]:
    """Return the configuration name, and the URLs of its data files by split."""
    try:
        import datasets  # noqa: PLC0415 - optional
    except ImportError:
        raise _make_missing_library_error(name) from None

    def build() -> Any:
        return datasets.load_dataset_builder(name.repo, name.config or None, revision=commit)

    try:
        builder = _query_hub(name, build)
    except RuntimeError:
        raise InputError(
            f"Dataset {name.repo!r} needs a loading script, and loading scripts are never run here; try the Parquet "
            f"copy that the Hub makes of many data sets ({name.repo}@refs/convert/parquet), or name its data files "
            f"as URLs (hf://datasets/{name.repo}/...)."
        ) from None
    except ValueError:
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
    config_list = ", ".join(configs[:_MAX_LISTED]) + (
        f" and {len(configs) - _MAX_LISTED} more" if len(configs) > _MAX_LISTED else ""
    )
    fact = f"has no configuration {name.config!r}" if name.config else "has several configurations"
    raise InputMissingError(
        f"Dataset {name.repo!r} {fact}; it has {config_list}{suggest(name.config, configs)}. Name one as "
        f"{name.repo}:{configs[0] if configs else 'CONFIGURATION'}."
    ) from None


def _describe_files(name: HubDatasetName, commit: str, urls: list[str]) -> list[HubFile]:
    from huggingface_hub import HfApi  # noqa: PLC0415 - optional
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

    repo_paths = [_split_pinned_url(url)[2] for url in urls]
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
        files.append(HubFile(url, f"{name.repo}/{path}", make_stat_result(url, info)))
    return files


def _query_hub(name: HubDatasetName, work: Callable[[], T], tries: int = 1) -> T:
    """Return the result of ``work``; Hub errors become batchloom errors."""
    from huggingface_hub import errors  # noqa: PLC0415 - optional

    repo = name.repo
    try:
        return work()
    except errors.GatedRepoError:
        raise AccessError(
            f"Dataset {repo!r} asks for permission: accept its terms at https://huggingface.co/datasets/{repo}, then "
            "run `hf auth login` or set HF_TOKEN."
        ) from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise InputMissingError(
            f"Dataset {repo!r} not found: there is no file or folder of that name, and the Hub has no such data set "
            "(or it is private: run `hf auth login`); check the name."
        ) from None
    except errors.RevisionNotFoundError:
        raise InputMissingError(
            f"Dataset {repo!r} not found at revision {name.revision!r}: check the branch, tag or commit after the @."
        ) from None
    except list_library_errors() as error:
        fault = classify_error(error)
    if fault.kind == "passing" and tries < MAX_CONNECT_ATTEMPTS:
        time.sleep(compute_backoff(tries))
        return _query_hub(name, work, tries + 1)
    if fault.kind == "missing":
        raise InputMissingError(
            f"Dataset {repo!r} holds no supported data files (JSON Lines, Parquet, CSV, text, ...); look at "
            f"https://huggingface.co/datasets/{repo}, or name files as URLs (hf://datasets/{repo}/...)."
        ) from None
    raise DownloadError(
        f"Failed to download dataset {repo!r}: {fault.description}. There is no file or folder of that name either; go "
        f"online, or download it on a machine with a network (hf download --repo-type dataset {repo} --local-dir DIR) "
        "and name that folder."
    ) from None


def _make_missing_library_error(name: HubDatasetName) -> MissingDependencyError:
    return MissingDependencyError(
        f"There is no file or folder {name.repo}. To read it as a data set of the Hub, install datasets and "
        "huggingface_hub: pip install 'batchloom[hf]' (or: pip install datasets transformers)."
    )
