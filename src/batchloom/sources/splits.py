"""Splits of data sets in folders and archives: by cards, else by names.

The rules are those of ``datasets``. They apply to each folder that holds a data set, as an input may hold several.
A folder is refused if only some of its files are named as a held-out split.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

from batchloom.core.errors import BatchloomError, InputError, InputMissingError, SettingsError
from batchloom.core.settings import suggest
from batchloom.core.wording import format_count, format_list
from batchloom.core.yaml_reader import parse_yaml
from batchloom.sources.files.archives import detect_archive_by_name

ALL_SPLITS = "all"
SPLIT_PROBLEM = "names no split; write train, all, CONFIG/test, train[:1%] or train[1000:2000]"
TRAIN = "train"
CARD_NAME = "README.md"
_MAX_LISTED = 5
# Key of the files of a configuration whose names define the splits.
_BY_NAMES = ""
# Keywords of a split in names of folders and files, in the order in which they are looked for.
_KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATOR = r"[-._ 0-9]"
_KEYWORD = "|".join(word for words in _KEYWORDS.values() for word in words)
_SPLIT_BY_KEYWORD = {word: split for split, words in _KEYWORDS.items() for word in words}
_IN_FOLDER_NAME = re.compile(rf"(?:^|{_SEPARATOR})({_KEYWORD})(?={_SEPARATOR}|$)")
_IN_FILE_NAME = re.compile(rf"(?:^|{_SEPARATOR})({_KEYWORD})(?={_SEPARATOR})")
# Only in a folder named data, where any name is that of a split.
_SHARD_NAME = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\S*")
_SHARD_FOLDER = "data"
# Cards, licences, and the caches that ``datasets`` writes into the folder of its data.
_METADATA_NAME = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct)(?:[._-][\w-]+)?(?:\.\w+)?"
    r"|dataset_infos?\.json|dataset_dict\.json|dummy_data\.zip|cache-[0-9a-f]{16}\S*\.arrow",
    re.IGNORECASE,
)
# A cheap search in all paths below the input at once, in lower case: without a match, all files are read. The set of
# first letters makes it six times as fast as the words alone.
SPLIT_HINT = re.compile(
    rb"(?=[cdelnrtv])(?:(?:%b)[-._ 0-9/]|readme|licen|copying|notice|citation|changelog|contributing|code_of|dataset_"
    rb"|cache-)" % _KEYWORD.removeprefix("train|training|").encode()
)
_REQUEST = re.compile(
    r"(?:(?P<config>[\w.+-]+)/)?(?P<split>\w+(?:\.\w+)*)"
    r"(?:\[(?P<first>-?\d+)?(?P<first_percent>%)?:(?P<last>-?\d+)?(?P<last_percent>%)?\])?"
)


@dataclass(frozen=True, slots=True)
class RowRange:
    """Range of the rows of a split, with bounds as in a slice of Python.

    Attributes:
        first, last: bounds in rows, or in percent of them; None for the beginning or the end.
        first_percent, last_percent: whether the bound is in percent.
    """

    first: int | None = None
    last: int | None = None
    first_percent: bool = False
    last_percent: bool = False

    def resolve(self, total: int) -> range:
        """Return the rows out of ``total``; percents are rounded as in ``datasets``."""
        bounds = (self.first, self.first_percent), (self.last, self.last_percent)
        return range(total)[slice(*(round(total * n / 100) if percent and n else n for n, percent in bounds))]


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """Split of a data set that is asked for.

    Attributes:
        split: its name, or ``all``.
        config: name of the configuration; empty for the default one.
        rows: rows of it that are read; None for all.
    """

    split: str
    config: str = ""
    rows: RowRange | None = None


def parse_split(text: str) -> SplitRequest:
    """Parse ``[CONFIG/]SPLIT``, where a range of rows may follow: ``train[:1%]``.

    Raises:
        SettingsError: the text has another form.
    """
    match = _REQUEST.fullmatch(text.strip())
    if (
        match is None
        or (match["first_percent"] and not match["first"])
        or (match["last_percent"] and not match["last"])
    ):
        raise SettingsError([f"input_split: {text!r} {SPLIT_PROBLEM}"])
    rows = None
    if "[" in text:
        first, last = (None if match[name] is None else int(match[name]) for name in ("first", "last"))
        rows = RowRange(first, last, bool(match["first_percent"]), bool(match["last_percent"]))
    return SplitRequest(match["split"], match["config"] or "", rows)


@dataclass(eq=False, slots=True)
class DatasetFolder:
    """A folder with files of splits.

    Attributes:
        path: its path below the input, with a slash at its end; empty for the input itself.
        rule: whether a card or names define the splits.
        splits: numbers of the files of each split.
        others: numbers of its other data files.
        metadata: numbers of its card and licences.
    """

    path: str
    rule: Literal["card", "names"]
    splits: dict[str, list[int]]
    others: list[int]
    metadata: set[int]

    @property
    def files(self) -> int:
        """Number of all its files."""
        return sum(map(len, self.splits.values())) + len(self.others) + len(self.metadata)


@dataclass(eq=False, slots=True)
class SplitSelection:
    """Choice of files.

    Attributes:
        left_out: numbers of the files that are not read because of their split.
        metadata: numbers of cards, licences and other files about a data set, which are no data.
        notes: what is read and what is not, in sentences.
        by_split: numbers of the files that are read, by split.
    """

    left_out: set[int] = field(default_factory=set)
    metadata: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    by_split: dict[str, list[int]] = field(default_factory=dict)

    def add(self, folder: DatasetFolder, wanted: str, name: str) -> None:
        """Add the files of a folder's split; empty: of ``train``, or of the only one."""
        splits = dict(folder.splits)
        if folder.rule == "names" and folder.others and TRAIN not in splits and wanted == TRAIN:
            splits[TRAIN] = folder.others
        split = wanted or (TRAIN if TRAIN in splits else "")
        if not split and len(splits) > 1:
            raise InputError(
                f"{name} has the splits {', '.join(splits)}, and none is train: choose one with --input-split, or all."
            )
        split = split or next(iter(splits))
        chosen = splits if split == ALL_SPLITS else {split: splits[split]} if split in splits else {}
        read = {n for numbers in chosen.values() for n in numbers}
        others = set(folder.others) - read
        omitted = {name: numbers for name, numbers in splits.items() if name not in chosen}
        for chosen_split, numbers in chosen.items():
            self.by_split.setdefault(chosen_split, []).extend(numbers)
        # Splits of a card may overlap.
        self.left_out |= others.union(*omitted.values()) - read
        parts = [f"{split} ({format_count(len(numbers), 'file')})" for split, numbers in omitted.items()]
        if others:
            parts.append(format_count(len(others), "file") + " of no split")
        if parts:
            source = "its card" if folder.rule == "card" else "the names of its files"
            what = f"split {' and '.join(chosen)}" if chosen else "no split"
            self.notes.append(
                f"{name}: by {source} {what} is read, and not {format_list(parts, _MAX_LISTED)} (--input-split NAME "
                "reads another, all everything)."
            )


def _list_archive_names(path: str) -> list[str]:
    """Return a path and the archives above it.

    A card names an archive, and a listing its files.
    """
    parts = path.split("/")
    parents = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return [path, *(parent for parent in parents if detect_archive_by_name(parent))]


def _is_metadata(path: str) -> bool:
    return _METADATA_NAME.fullmatch(path.rpartition("/")[2]) is not None


def _find_metadata(paths: Sequence[str], are_records: Sequence[bool]) -> set[int]:
    """Return the numbers of the cards, licences and caches of a data set.

    In a folder with other texts they are documents, as those texts are.
    """
    named = {n for n, path in enumerate(paths) if _is_metadata(path)}
    has_records = any(is_record and n not in named for n, is_record in enumerate(are_records))
    has_texts = any(not is_record and n not in named for n, is_record in enumerate(are_records))
    return named if has_records and not has_texts else set()


def select_split(
    paths: Sequence[str],
    are_records: Sequence[bool],
    request: SplitRequest | None,
    read_card: Callable[[int], str],
    label: str,
) -> SplitSelection:
    """Choose the files of a split.

    Args:
        paths: path of each file below the input.
        are_records: whether each file holds records; others are texts.
        request: the split; None for ``train``, or the only one.
        read_card: returns the text of a card by its number.
        label: name of the input in messages.

    Raises:
        InputError: names of a folder disagree, or it has several splits of which none is ``train``.
        InputMissingError: there is no such split.
    """
    selection = SplitSelection(metadata=_find_metadata(paths, are_records))
    if request is not None and request.split == ALL_SPLITS and not request.config:
        return selection
    tree = _FileTree(paths, are_records, "" if request is None else request.config, read_card)
    folders = list(tree.iter_datasets("", range(len(paths)), at_top=True))
    wanted = "" if request is None else request.split
    if request is not None and request.config and not any(folder.rule == "card" for folder in folders):
        raise InputMissingError(f"{label} has no configuration {request.config!r}: no card names one.")
    held = {n for folder in folders for numbers in (*folder.splits.values(), folder.others) for n in numbers}
    has_train = any(TRAIN in folder.splits or folder.others for folder in folders) or any(
        is_record and n not in held for n, is_record in enumerate(are_records)
    )
    if wanted and wanted != ALL_SPLITS:
        has_others = len(paths) > sum(folder.files for folder in folders)
        _check_presence(folders, wanted, tree.configurations, label, has_others=has_others)
    named_texts: list[str] = []
    for folder in folders:
        name = f"{label}/{folder.path}".rstrip("/")
        if folder.rule == "names" and folder.others and not wanted:
            held_out = next(split for split in folder.splits if split != TRAIN)
            if not all(are_records[n] for split, numbers in folder.splits.items() if split != TRAIN for n in numbers):
                # Any text may have a name such as "the last test.txt".
                named_texts.append(f"{label}/{paths[folder.splits[held_out][0]]}")
                continue
            raise InputError(_describe_conflict(folder, held_out, name, paths))
        selection.metadata |= folder.metadata
        # A folder with held-out splits alone, such as a benchmark, is left out if other folders hold training data.
        is_held_out = (
            has_train
            and TRAIN not in folder.splits
            and all(are_records[n] for numbers in folder.splits.values() for n in numbers)
        )
        selection.add(folder, wanted or (TRAIN if is_held_out else ""), name)
    if named_texts:
        selection.notes.append(
            f"These texts are read, although their names are those of splits: {format_list(named_texts, _MAX_LISTED)}. "
            "--input-split train leaves them out."
        )
    if wanted and wanted not in (TRAIN, ALL_SPLITS):
        # What no data set holds is training data.
        selection.left_out |= set(range(len(paths))) - held
    selection.left_out -= selection.metadata
    return selection


def _check_presence(
    folders: Sequence[DatasetFolder], wanted: str, configurations: AbstractSet[str], label: str, *, has_others: bool
) -> None:
    known = list(dict.fromkeys(split for folder in folders for split in folder.splits))
    if wanted in known or (wanted == TRAIN and (has_others or any(folder.others for folder in folders))):
        return
    fact = f"it has {', '.join(known)}" if known else "no card and no name defines one, so leave --input-split out"
    remedy = suggest(wanted, known)
    if wanted in configurations:
        remedy = f"; the card has a configuration of this name: write --input-split {wanted}/SPLIT"
    raise InputMissingError(f"{label} has no split {wanted!r}: {fact}{remedy}.")


def _describe_conflict(folder: DatasetFolder, held_out: str, name: str, paths: Sequence[str]) -> str:
    beginning = len(folder.path)
    example, other = (paths[numbers[0]][beginning:] for numbers in (folder.splits[held_out], folder.others))
    rest = "" if TRAIN in folder.splits else " with the files of no split"
    return (
        f"{name} holds {example}, which is named as a {held_out} split, beside {other}, which is named as none: "
        f"--input-split train reads the train split{rest}, --input-split all reads everything, and moving the files "
        "of no split elsewhere separates them."
    )


class _FileTree:
    """Files below an input, by folders.

    Attributes:
        configurations: names of those of the cards that were read.
    """

    def __init__(
        self, paths: Sequence[str], are_records: Sequence[bool], config: str, read_card: Callable[[int], str]
    ) -> None:
        self._paths = paths
        self._are_records = are_records
        self._config = config
        self._read_card = read_card
        self.configurations: set[str] = set()

    def iter_datasets(self, prefix: str, numbers: Iterable[int], *, at_top: bool) -> Iterator[DatasetFolder]:
        """Yield the folders below ``prefix`` that hold files of splits.

        Args:
            prefix: path of a folder, with a slash at its end.
            numbers: the files below it.
            at_top: whether the folders above it hold nothing else.
        """
        children: dict[str, list[int]] = {}
        for number in numbers:
            name, slash, _ = self._paths[number][len(prefix) :].partition("/")
            children.setdefault(name + slash, []).append(number)
        split_by_child = {name: split for name in children if (split := _find_split(prefix, name))}
        held_out = [split for split in split_by_child.values() if split != TRAIN]
        if CARD_NAME in children and (at_top or held_out or f"{_SHARD_FOLDER}/" in children):
            card = self._read_card(children[CARD_NAME][0])
            if folder := self._read_splits(prefix, card, [n for below in children.values() for n in below]):
                yield folder
                return
        if not held_out:
            for name, below in children.items():
                if name.endswith("/") and name not in split_by_child:
                    yield from self.iter_datasets(prefix + name, below, at_top=at_top and len(children) == 1)
            return
        splits: dict[str, list[int]] = {}
        others: list[int] = []
        for name, below in children.items():
            split = split_by_child.get(name)
            (others if split is None else splits.setdefault(split, [])).extend(below)
        yield self._make_folder(prefix, "names", splits, others)

    def _make_folder(
        self, prefix: str, rule: Literal["card", "names"], splits: dict[str, list[int]], others: list[int]
    ) -> DatasetFolder:
        metadata = {n for n in others if _is_metadata(self._paths[n])}
        return DatasetFolder(prefix, rule, splits, [n for n in others if n not in metadata], metadata)

    def _read_splits(self, prefix: str, card: str, numbers: Sequence[int]) -> DatasetFolder | None:
        """Return the splits that a card names; None if it names none."""
        name = prefix + CARD_NAME
        entries = _list_configurations(_parse_card(card, name))
        self.configurations |= entries.keys()
        patterns = _find_patterns(entries, self._config, name)
        if not patterns:
            return None
        from fsspec.utils import glob_translate

        splits: dict[str, list[int]] = {}
        for split, globs in patterns.items():
            regex = re.compile("|".join(f"(?:{glob_translate(pattern)})" for pattern in globs))
            splits[split] = [
                n for n in numbers if any(map(regex.match, _list_archive_names(self._paths[n][len(prefix) :])))
            ]
        if files := splits.pop(_BY_NAMES, None):
            folders = list(self.iter_datasets(prefix, files, at_top=False))
            splits = {TRAIN: files}
            if len(folders) == 1 and not folders[0].others:
                splits = folders[0].splits
        if missing := [split for split, found in splits.items() if not found]:
            if len(missing) == len(splits):
                raise InputMissingError(
                    f"{name} names {', '.join(next(iter(patterns.values())))}, and no such file is here: download the "
                    "data set again, or read what is here with --input-split all."
                )
            splits = {split: found for split, found in splits.items() if found}
        named = {n for found in splits.values() for n in found}
        return self._make_folder(prefix, "card", splits, [n for n in numbers if n not in named])


def _find_split(prefix: str, name: str) -> str | None:
    """Return the split that the name of a folder (with a slash) or of a file tells."""
    if name.endswith("/"):
        found = _IN_FOLDER_NAME.findall(name[:-1])
    else:
        if prefix.rpartition(f"{_SHARD_FOLDER}/")[1:] == (f"{_SHARD_FOLDER}/", "") and (
            shard := _SHARD_NAME.fullmatch(name)
        ):
            return shard[1] if _IN_FOLDER_NAME.search(shard[1]) else None
        found = _IN_FILE_NAME.findall(name)
    splits = {_SPLIT_BY_KEYWORD[word] for word in found}
    return next((split for split in _KEYWORDS if split in splits), None)


def _parse_card(card: str, name: str) -> Mapping[str, Any]:
    """Return the metadata of a card; empty if it has none."""
    parts = re.split(r"^---[ \t]*\r?\n", card.removeprefix("\ufeff"), maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3 or parts[0].strip() or "configs" not in parts[1]:
        return {}
    try:
        metadata = parse_yaml(parts[1].encode(), name)
    except BatchloomError as error:
        raise InputError(f"{error} The card says which files are data: mend it, or give --input-split all.") from error
    return metadata if isinstance(metadata, Mapping) else {}


def _list_configurations(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the entry of each configuration, by name."""
    configs = metadata.get("configs")
    entries = [entry for entry in configs if isinstance(entry, Mapping)] if isinstance(configs, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries}


def _find_patterns(by_name: Mapping[str, Mapping[str, Any]], wanted: str, name: str) -> dict[str, list[str]]:
    """Return the patterns of the files of each split of a configuration."""
    if not by_name:
        return {}
    defaults = [key for key, entry in by_name.items() if entry.get("default") is True]
    config = wanted or (defaults[0] if defaults else "default" if len(by_name) > 1 else next(iter(by_name)))
    if config not in by_name:
        fact = f"has no configuration {wanted!r}" if wanted else "names several configurations"
        raise InputMissingError(
            f"{name} {fact}; it has {format_list(list(by_name), _MAX_LISTED)}{suggest(wanted, by_name)}. Name one: "
            f"--input-split {next(iter(by_name))}/train, or all for everything."
        )
    entry = by_name[config]
    folder = str(entry.get("data_dir") or "").removeprefix("./").strip("/")
    prefix = f"{folder}/" if folder else ""
    patterns: dict[str, list[str]] = {}
    for split, globs in _list_data_files(entry.get("data_files")):
        patterns.setdefault(split, []).extend(prefix + pattern.removeprefix("./") for pattern in globs)
    return patterns or ({_BY_NAMES: [f"{prefix}**"]} if prefix else {})


def _list_data_files(value: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield each split and its patterns; files without a split are those of ``train``."""
    if isinstance(value, str):
        yield TRAIN, [value]
    elif isinstance(value, Mapping):
        for split, globs in value.items():
            yield str(split), [globs] if isinstance(globs, str) else [str(pattern) for pattern in globs]
    elif isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        for entry in value:
            globs = entry.get("path", [])
            yield str(entry.get("split", TRAIN)), [globs] if isinstance(globs, str) else list(map(str, globs))
    elif isinstance(value, list):
        yield TRAIN, list(map(str, value))
