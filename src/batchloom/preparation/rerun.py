"""Repeated runs of a job: finished stores, unfinished work, folders of other jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import xxhash

from batchloom.core.addresses import is_url, redact_url
from batchloom.core.errors import StoreConflictError
from batchloom.core.files import decode_file_name, make_absolute
from batchloom.preparation.identity.recipe_identity import (
    compute_recipe_fingerprint,
    list_recipe_differences,
    recipe_to_plain,
)
from batchloom.preparation.report.report import PrepareReport, ReportedSource
from batchloom.preparation.settings.recipe import Recipe
from batchloom.preparation.units.units import choose_unit_bytes, combine_part_hashes
from batchloom.preparation.units.work_folder import WORK_VERSION, JobIdentity, WorkFolder, has_learned_tokenizer
from batchloom.sources import DetectedFile, PartStream, SourceListing
from batchloom.sources.files import CompactSequence, Source
from batchloom.store import MANIFEST_NAME, Manifest, read_manifest, wrap_write_errors
from batchloom.store.format import SourceEntry
from batchloom.tokens import parse_train_spec, resolve_tokenizer

_MAX_LISTED = 3


@final
@dataclass(frozen=True, slots=True)
class RequestedJob:
    """A job to compare with the one that made a finished store.

    Attributes:
        recipe: its recipe.
        listing: its inputs.
        tokenizer_state: state of its tokenizer, if the recipe alone does not determine it.
        hashed: whether inputs are compared by content alone.
    """

    recipe: Recipe
    listing: SourceListing
    tokenizer_state: Mapping[str, Any] | None = None
    hashed: bool = False

    def find_finished_store(self, out: Path, report: PrepareReport | None) -> Manifest | None:
        """Return the manifest of the store that this job made; None without a store.

        Args:
            out: folder of the store.
            report: report of the store, if it has one.

        Raises:
            StoreConflictError: the store has another recipe or other inputs.
            StoreError: the store is damaged.
        """
        with wrap_write_errors(out):
            if not (out / MANIFEST_NAME).exists():
                return None
        manifest = read_manifest(out)
        # The first command may be given again after the store has grown.
        first = next((entry for entry in manifest.all_history if entry.has_inputs), manifest.all_history[0])
        first_sources = manifest.list_sources_of(first)
        first_manifest = msgspec.structs.replace(manifest, recipe=first.recipe, sources=first_sources)
        self.check_same_finished_job(f"{out}", first_manifest, report)
        return manifest

    def check_same_finished_job(self, location: str, manifest: Manifest, report: PrepareReport | None) -> None:
        """Refuse a finished store that another job has written."""
        if differences := self._list_differences(manifest, report):
            raise StoreConflictError(
                f"{location} holds a finished store of another job ({_format_differences(differences)}); choose "
                "another --out, or delete that folder; to add new inputs to it, give --append."
            )

    def _list_differences(self, manifest: Manifest, report: PrepareReport | None) -> list[str]:
        """List the differences between this job and that of a manifest."""
        sources = self.listing.sources
        differences = list_recipe_differences(manifest.recipe, recipe_to_plain(self.recipe))
        differences += _list_tokenizer_differences(self.recipe, manifest.tokenizer.fingerprint, self.tokenizer_state)
        # Names may differ.
        has_same_files = report is not None and _identify_files(report.sources) == _identify_files(
            make_report_sources(sources)
        )
        if not has_same_files:
            differences += _describe_list_changes(
                [(source.name, source.bytes) for source in manifest.sources],
                [(source.name, source.size) for source in sources],
            )
        if not differences and (self.hashed or not has_same_files):
            differences = _list_content_differences(manifest, report, sources, hashed=self.hashed)
        return differences or _list_kind_differences(
            [source_entry.kind for source_entry in manifest.sources],
            [source.kind for source in sources],
            [source.name for source in sources],
        )


def _identify_files(sources: Sequence[ReportedSource]) -> list[tuple[str, int, int]]:
    return [(source.path, source.bytes, source.mtime_ns) for source in sources]


def previous_detections(report: PrepareReport | None, recipe: Recipe) -> dict[str, DetectedFile]:
    """Return the detected formats of inputs by absolute path, from a report.

    Empty if the report is of another recipe. With it, 100,000 files are listed in a second, without
    opening any.
    """
    if report is None or report.recipe_fingerprint != compute_recipe_fingerprint(recipe):
        return {}
    if any(source.data_type for source in recipe.sources):
        # A declared format decides how files are detected.
        return {}
    return {
        source.path: DetectedFile(source.bytes, source.mtime_ns, source.kind, source.compression or None)
        for source in report.sources
        # Invalid UTF-8 was replaced, so this path may be that of another file.
        if source.kind and "\ufffd" not in source.path
    }


def begin_or_resume(
    work: WorkFolder,
    recipe: Recipe,
    job: JobIdentity,
    tokenizer_state: Mapping[str, Any] | None = None,
    *,
    restart: bool = False,
) -> None:
    """Begin the job in its work folder, or check that the work there is its own.

    With ``restart``, work of another job is replaced, except for equal units. A tokenizer that another
    job has learned and not used yet is always replaced.

    Raises:
        StoreConflictError: the folder holds work of another recipe, other inputs or another
            version.
    """
    previous_job = work.job()
    has_results = work.has_results()
    if previous_job is None or not (has_results or has_learned_tokenizer(work)):
        work.clear()
        work.begin(job)
        return
    previous_state = work.tokenizer_state()
    fingerprint = None if previous_state is None else str(previous_state.get("fingerprint"))
    differences = _describe_job_differences(previous_job, job, recipe, fingerprint, tokenizer_state)
    if differences and has_results and not restart:
        raise StoreConflictError(
            f"{work.out} holds unfinished work of another job ({differences}); give --restart to start over "
            "(unchanged units are reused), or choose another --out."
        )
    if differences:
        work.clear(keep_units=True)
        work.begin(job)


def make_job_identity(
    recipe: Recipe, listing: SourceListing, constants: list[int], content: list[str], base: int = 0
) -> JobIdentity:
    """Return the identity of an unfinished job.

    Args:
        recipe: recipe of the job.
        listing: its inputs.
        constants: sizes that decide documents and units.
        content: hashes of its sources; empty if they are compared by mtime.
        base: generation that it appends to; 0 for none.
    """
    return JobIdentity(
        work_version=WORK_VERSION,
        recipe=recipe_to_plain(recipe),
        constants=constants,
        sources=_SourceIdentities(listing.sources, has_content=bool(content)),
        content=content,
        kinds=[source.kind for source in listing.sources],
        base=base,
    )


def find_unit_bytes(work: WorkFolder, listing: SourceListing) -> int:
    """Return the unit size of unfinished work on these inputs, or for the listing.

    A stream, whose units have a fixed size, may have cached their batches.
    """
    job = work.job()
    if (
        job
        and len(job.sources) == len(listing.sources)
        and all(
            known_source[:2] == (source.name, source.size)
            for known_source, source in zip(job.sources, listing.sources, strict=True)
        )
    ):
        return job.constants[-1]
    return choose_unit_bytes(listing.bytes)


@final
class _SourceIdentities(CompactSequence[tuple[str, int, int]]):
    """Name, bytes and time of each source; time 0 if contents identify them."""

    def __init__(self, sources: Sequence[Source], *, has_content: bool) -> None:
        self._sources = sources
        self._has_content = has_content

    def __len__(self) -> int:
        return len(self._sources)

    def make_element(self, number: int) -> tuple[str, int, int]:
        source = self._sources[number]
        return source.name, source.size, 0 if self._has_content else source.mtime_ns


def _describe_job_differences(
    previous_job: JobIdentity,
    job: JobIdentity,
    recipe: Recipe,
    tokenizer: str | None,
    tokenizer_state: Mapping[str, Any] | None = None,
) -> str:
    """Describe how an unfinished job differs from this one; empty if they are equal.

    ``tokenizer`` is the fingerprint of the unfinished job's tokenizer; None if it has none yet.
    """
    differences = list_recipe_differences(previous_job.recipe, job.recipe)
    if tokenizer is not None:
        differences += _list_tokenizer_differences(recipe, tokenizer, tokenizer_state)
    if bool(previous_job.content) != bool(job.content):
        hash_change = "is given now, but was not before" if job.content else "was given before, but is not now"
        differences.append(f"--hash-inputs {hash_change}: contents cannot be compared")
        return _format_differences(differences)
    if previous_job.sources == job.sources and previous_job.content != job.content:
        pairs = zip(previous_job.content, job.content, job.sources, strict=False)
        changed = [name for old, new, (name, _, _) in pairs if old != new]
        differences.append(f"inputs: {changed[0] if changed else 'one'} has other content")
    if previous_job.sources != job.sources:
        sizes = [[(name, size) for name, size, _ in sources] for sources in (previous_job.sources, job.sources)]
        rewritten = [a[0] for a, b in zip(previous_job.sources, job.sources, strict=False) if a != b]
        differences += _describe_list_changes(*sizes) or [f"inputs: {rewritten[0]} was rewritten"]
    elif previous_job.work_version == job.work_version:
        differences += _list_kind_differences(previous_job.kinds, job.kinds, [source[0] for source in job.sources])
    if (previous_job.work_version, previous_job.constants[:-1]) != (job.work_version, job.constants[:-1]):
        differences.append("it was started by another version of batchloom")
    elif previous_job.constants != job.constants:
        differences.append("it cuts the inputs into other units, as prepare and streams do")
    if previous_job.base != job.base:
        differences.append(
            f"it appends to generation {previous_job.base}" if previous_job.base else "it makes a new store"
        )
    return _format_differences(differences)


def make_report_sources(sources: Sequence[Source]) -> list[ReportedSource]:
    """Return the inputs as the report holds them."""
    return [
        ReportedSource(
            source.name,
            _get_original_path(source),
            source.size,
            source.mtime_ns,
            source.kind,
            source.compression or "",
            source.encoding,
        )
        for source in sources
    ]


def _get_original_path(source: Source) -> str:
    """Return the original path or URL of a source, without the read wrapper."""
    if is_url(source.file):
        return decode_file_name(redact_url(source.file) + source.path[len(source.file) :])
    return decode_file_name(make_absolute(source.path))


def _fingerprint_tokenizer_file(recipe: Recipe) -> str | None:
    """Return the fingerprint of a tokenizer file, which may change; None for others."""
    spec = recipe.tokenizer
    if spec in ("bytes", "gpt2") or parse_train_spec(spec) or not Path(spec).expanduser().exists():
        return None
    return resolve_tokenizer(spec, end_token=recipe.end_token).fingerprint


def _list_tokenizer_differences(
    recipe: Recipe, fingerprint: str, tokenizer_state: Mapping[str, Any] | None
) -> list[str]:
    if tokenizer_state is not None:
        is_same = tokenizer_state.get("fingerprint") == fingerprint
        return [] if is_same else [f"tokenizer: {recipe.tokenizer} has changed"]
    if _fingerprint_tokenizer_file(recipe) in (None, fingerprint):
        return []
    return [f"tokenizer: {recipe.tokenizer} has changed"]


def _list_kind_differences(
    previous_kinds: Sequence[str], current_kinds: Sequence[str], names: Sequence[str]
) -> list[str]:
    return [
        f"inputs: {name} was read as {old} and would be read as {new}"
        for old, new, name in zip(previous_kinds, current_kinds, names, strict=True)
        if old != new
    ]


def _describe_list_changes(previous: list[tuple[str, int]], current: list[tuple[str, int]]) -> list[str]:
    """List the differences between two lists of (name, bytes), in a few words each."""
    if previous == current:
        return []
    old = dict(previous)
    new = dict(current)
    differences = [f"inputs: {name} is new" for name in new if name not in old]
    differences += [f"inputs: {name} is missing" for name in old if name not in new]
    differences += [
        f"inputs: {name} has {new[name]:,} bytes, had {size:,}"
        for name, size in old.items()
        if name in new and new[name] != size
    ]
    return differences or ["inputs: their order differs"]


def _list_content_differences(
    manifest: Manifest, report: PrepareReport | None, sources: Sequence[Source], *, hashed: bool
) -> list[str]:
    """List files whose bytes differ, among those with another time, or all if hashed."""
    times = {source.name: source.mtime_ns for source in report.sources} if report else {}

    def differs(source: Source, entry: SourceEntry) -> bool:
        has_other_time = times.get(source.name, source.mtime_ns) != source.mtime_ns
        # A damaged file has no hash.
        if entry.damage:
            return has_other_time
        return (hashed or has_other_time) and hash_recorded_parts(source, entry) != entry.hash

    return [
        f"inputs: {source.name} has other content"
        for source, entry in zip(sources, manifest.sources, strict=True)
        if differs(source, entry)
    ]


def hash_sources(sources: Sequence[Source]) -> dict[str, str]:
    """Return the XXH3-128 of the decompressed bytes of each source, by path."""
    hashes = {}
    for source in sources:
        digest = xxhash.xxh3_128()
        with PartStream(source) as stream:
            while data := stream.read(1 << 20):
                digest.update(data)
        hashes[source.path] = digest.hexdigest()
    return hashes


def hash_recorded_parts(source: Source, entry: SourceEntry) -> str:
    """Return the hash of a source as it is now, over the recorded parts."""
    digests = []
    with PartStream(source) as stream:
        for part in entry.parts:
            digest = xxhash.xxh3_128()
            remaining_bytes = part.stop - part.start
            while remaining_bytes and (data := stream.read(min(remaining_bytes, 1 << 20))):
                digest.update(data)
                remaining_bytes -= len(data)
            digests.append(digest.hexdigest())
        # Bytes after the last part must change the hash.
        if stream.read(1):
            digests.append("00")
    return combine_part_hashes(digests)


def _format_differences(differences: list[str]) -> str:
    more = f"; and {len(differences) - _MAX_LISTED} more" if len(differences) > _MAX_LISTED else ""
    return "; ".join(differences[:_MAX_LISTED]) + more
