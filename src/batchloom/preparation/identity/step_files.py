"""Files that cleaning steps read, and the index of evaluation sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import InputError
from batchloom.core.fingerprint import fingerprint
from batchloom.core.settings import to_plain
from batchloom.sources import (
    DeclaredInput,
    PartReader,
    PartStream,
    ReadLimits,
    ReadRules,
    SourcePart,
    list_sources,
    make_bad_record_error,
)
from batchloom.sources.files import Source
from batchloom.store.write import write_chunks
from batchloom.text import (
    CleanStep,
    DecontaminationSettings,
    OverlapIndex,
    TextCleaner,
    build_index,
    fill_step_defaults,
    parse_step_settings,
)
from batchloom.text.quality import read_bad_words

DECONTAMINATE = "decontaminate"
BAD_WORDS = "bad_words"
_MAX_DEPTH = 32
# A skipped record of a set would be trained on unseen.
_FOLLOW_LINKS = DeclaredInput(follow_links=True)
# For each file of a set, in order: its format, and the XXH3-128 of its decompressed bytes.
_SetContents = list[tuple[str, str]]


def build_overlap_index(
    settings: DecontaminationSettings, folder: Path, notify: Callable[[str], None] | None = None
) -> DecontaminationSettings:
    """Return the settings with the index of their sets, built or reused in ``folder``.

    Raises:
        InputError: a file of a set cannot be read or changes meanwhile, a record is unusable,
            or no field of a set has ``min_words`` words.
    """
    index_fingerprint = _fingerprint_index(
        settings, {name: _hash_contents(set_path) for name, set_path in settings.sets.items()}
    )
    path = folder / f"evaluation_sets.{index_fingerprint}.arrow"
    if not path.exists():
        contents: dict[str, _SetContents] = {name: [] for name in settings.sets}
        index = _index_sets(settings, contents)
        if _fingerprint_index(settings, contents) != index_fingerprint:
            raise InputError(_describe_changed(settings.sets.values()))
        write_chunks(path, [index.serialize()])
        if notify:
            notify(_describe_index(settings, index))
    # The index may be large: workers read it from the file by name.
    return replace(settings, index=str(path))


def build_step_indexes(
    steps: Sequence[CleanStep], folder: Path, notify: Callable[[str], None]
) -> tuple[CleanStep, ...]:
    """Return the steps for workers: decontamination steps get their index."""
    ready = []
    for step in steps:
        if step.name == DECONTAMINATE:
            settings = build_overlap_index(parse_step_settings(step), folder, notify)
            step = CleanStep(step.name, to_plain(settings))  # noqa: PLW2901 - the step is replaced
        ready.append(step)
    return tuple(ready)


def make_cleaner(steps: Sequence[CleanStep], folder: Path, notify: Callable[[str], None]) -> TextCleaner | None:
    """Return the cleaner of steps, with indexes in ``folder``; None without steps."""
    return TextCleaner(build_step_indexes(steps, folder, notify)) if steps else None


def clean_steps_to_plain(steps: Sequence[CleanStep]) -> tuple[CleanStep, ...]:
    """Return the steps for a manifest: all settings, absolute paths by last name only."""
    plain = []
    for step in fill_step_defaults(steps):
        settings = {name: value for name, value in step.settings.items() if name != "index"}
        if step.name == DECONTAMINATE:
            settings["sets"] = {name: _set_label(set_path) for name, set_path in settings["sets"].items()}
        if settings.get(BAD_WORDS):
            settings[BAD_WORDS] = _set_label(settings[BAD_WORDS])
        plain.append(CleanStep(step.name, settings))
    return tuple(plain)


def fingerprint_step_files(steps: Sequence[CleanStep]) -> str | None:
    """Return a fingerprint of all files that the steps read; None if they read none.

    Only bytes are read; building an index checks whether the files are usable.
    """
    file_fingerprints: list[Any] = []
    for step in steps:
        settings = parse_step_settings(step)
        if isinstance(settings, DecontaminationSettings):
            contents = {name: _hash_contents(set_path) for name, set_path in settings.sets.items()}
            file_fingerprints.append(_fingerprint_index(settings, contents))
        elif words := getattr(settings, BAD_WORDS, None):
            file_fingerprints.append(sorted(read_bad_words(words)))
    return fingerprint(file_fingerprints) if file_fingerprints else None


def check_files_unchanged(steps: Sequence[CleanStep], expected_fingerprint: str | None) -> None:
    """Check that the files of these steps are still those that identify a job."""
    if fingerprint_step_files(steps) == expected_fingerprint:
        return
    paths: list[str] = []
    for settings in map(parse_step_settings, steps):
        paths += settings.sets.values() if isinstance(settings, DecontaminationSettings) else ()
        paths += filter(None, [getattr(settings, BAD_WORDS, None)])
    raise InputError(_describe_changed(paths))


def _set_label(set_path: str) -> str:
    return PurePath(set_path).name if PurePath(set_path).is_absolute() else set_path


def _iter_records(set_path: str, set_contents: _SetContents) -> Iterator[tuple[str, ...]]:
    """Yield the records of a set; at the end, set ``set_contents`` to what was read."""
    rules = ReadRules(None, "line", ReadLimits())
    for source in list_sources([set_path], declared_inputs=[_FOLLOW_LINKS]).sources:
        with PartReader(SourcePart(source, 0, source.size), rules) as reader:
            before = 0
            for batch in reader:
                if batch.bad:
                    raise make_bad_record_error(source, rules, before, batch.bad[0])
                before += batch.records_read
                for value in batch.values:
                    yield tuple(_iter_nested_texts(value, 0))
            set_contents.append((source.kind, reader.finish().hex()))


def _index_sets(settings: DecontaminationSettings, contents: Mapping[str, _SetContents]) -> OverlapIndex:
    """Build the index, and record the contents of each set in ``contents``."""
    records = {name: _iter_records(set_path, contents[name]) for name, set_path in settings.sets.items()}
    return build_index(records, words=settings.words, min_words=settings.min_words)


def _fingerprint_index(settings: DecontaminationSettings, contents: Mapping[str, _SetContents]) -> str:
    """Fingerprint an index; the order of sets matters, as a match names the first."""
    sets = [[name, contents[name]] for name in settings.sets]
    return fingerprint([sets, settings.words, settings.min_words])


def _hash_contents(set_path: str) -> _SetContents:
    """Hash the bytes of an evaluation set."""
    return [
        (source.kind, _hash_file(source))
        for source in list_sources([set_path], declared_inputs=[_FOLLOW_LINKS]).sources
    ]


def _hash_file(source: Source) -> str:
    """Return the XXH3-128 of a file's bytes; a URL is read once."""
    return _hash_url(source) if is_url(source.path) else _compute_hash(source)


@lru_cache(maxsize=4096)
def _hash_url(source: Source) -> str:
    return _compute_hash(source)


def _compute_hash(source: Source) -> str:
    with PartStream(source) as stream:
        return stream.finish().hex()


def _iter_nested_texts(value: Any, depth: int) -> Iterator[str]:
    """Yield every text in a value, including those in lists and objects."""
    if isinstance(value, str):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_nested_texts(item, depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        for item in value:
            yield from _iter_nested_texts(item, depth + 1)


def _describe_index(settings: DecontaminationSettings, index: OverlapIndex) -> str:
    names = ", ".join(settings.sets)
    return f"Documents that share {settings.words} words with {names} are dropped: {len(index.hashes):,} n-grams."


def _describe_changed(paths: Iterable[str]) -> str:
    return (
        f"What cleaning looks into ({', '.join(map(redact_url, paths))}) was changed while it was used; let its "
        "writer finish, then give the command again with --restart."
    )
