"""Inspection of media during preparation: locations, headers and identity hashes."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import final

from batchloom.core.addresses import get_scheme, is_url, redact_url, strip_file_scheme
from batchloom.core.errors import BatchloomError, UnusableRecordError
from batchloom.core.files import describe_os_error
from batchloom.core.medium import Medium, MediumFacts, MediumInfo, MediumKind, parse_tar_location
from batchloom.media.audio import inspect_audio
from batchloom.media.images import inspect_image
from batchloom.media.media_content import BytesContent, FileContent, MediaContent, MediaLimits, hash_edges, read_edges
from batchloom.media.video import FrameSampling, inspect_video
from batchloom.remote import fetch_file

_KNOWN_SCHEMES = ("http", "https", "s3", "s3a", "gs", "gcs", "hf")
# A medium in many records is read once. Failures are not cached.
_MAX_CACHED_HEADERS = 4096


@dataclass(frozen=True, slots=True)
class MediaResolver:
    """Resolver of media locations, with limits on what is read.

    Attributes:
        folder: local folder or URL that relative paths start from; paths that leave it are refused.
        follow_links: whether symbolic links below the folder may lead out of it.
        limits: limits for remote media.
    """

    folder: str
    limits: MediaLimits = field(default_factory=MediaLimits)
    follow_links: bool = True

    @contextmanager
    def open(self, medium: Medium) -> Iterator[MediaContent]:
        """Open the bytes of a medium.

        Raises:
            UnusableRecordError: the medium is missing, unreadable, too slow or too large to fetch, or
                outside the folder.
        """
        if medium.data is not None:
            yield BytesContent(medium.data)
            return
        location = self.resolve(medium.location)
        if is_url(location):
            yield BytesContent(self._fetch(location))
            return
        path, byte_range = parse_tar_location(location)
        try:
            self._check_no_link_escape(path)
            file = FileContent(Path(path), byte_range)
        except FileNotFoundError:
            raise UnusableRecordError(
                f"is missing: {redact_url(location):.300}; paths are relative to {self.folder}: name another folder "
                "(--data-folder of prepare and train, media=MediaOptions(folder=...) of a Loader)"
            ) from None
        except UnusableRecordError:
            raise
        except EOFError:
            raise UnusableRecordError(
                f"is no longer in its tar, which has become shorter: {redact_url(path):.300}"
            ) from None
        except (OSError, ValueError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else f"its name is invalid ({error})"
            raise UnusableRecordError(f"cannot be read: {why}") from error
        with file:
            yield file

    def load_data(self, medium: Medium) -> Medium:
        """Return a medium with its bytes; raises as :meth:`open`."""
        with self.open(medium) as content:
            if content.size > self.limits.file_bytes:
                raise UnusableRecordError(
                    f"has {content.size:,} bytes, more than the {self.limits.file_bytes:,} that are allowed "
                    "(file_bytes)"
                )
            return replace(medium, data=content.read(0, content.size))

    def resolve(self, location: str) -> str:
        """Return the absolute path or URL of a location in a record.

        Raises:
            UnusableRecordError: the location leaves the folder, or is a URL of an unsupported scheme.
        """
        location = strip_file_scheme(location)
        if is_url(location):
            if get_scheme(location) not in _KNOWN_SCHEMES:
                raise UnusableRecordError(
                    f"is a URL with an unsupported scheme ({get_scheme(location)}://); http, https, s3, gs and hf "
                    "are supported"
                )
            return location
        if is_url(self.folder):
            return self._join_url(location)
        folder = os.path.abspath(self.folder)
        absolute_path = os.path.normpath(os.path.join(folder, location))
        if absolute_path != folder and not absolute_path.startswith(folder.rstrip("/") + "/"):
            raise UnusableRecordError(
                f"is outside {self.folder}, and media must be inside it; if this is intended, name a folder above it "
                "with --data-folder"
            )
        return absolute_path

    def _check_no_link_escape(self, path: str) -> None:
        """Refuse a path that leaves the folder through a symbolic link."""
        if self.follow_links:
            return
        real = os.path.realpath(path)
        folder = os.path.realpath(self.folder)
        if not real.startswith(folder.rstrip("/") + "/"):
            raise UnusableRecordError(
                f"is outside {self.folder}, through a symbolic link to {redact_url(real):.300}; if this is intended, "
                "follow it with --follow-links"
            )

    def _join_url(self, location: str) -> str:
        base = self.folder.rstrip("/")
        path = os.path.normpath(location)
        if path.startswith(("/", "..")):
            raise UnusableRecordError(f"is outside {redact_url(base)}, and media must be inside it")
        return f"{base}/{path}"

    def _fetch(self, url: str) -> bytes:
        limits = self.limits
        try:
            return fetch_file(url, max_bytes=limits.file_bytes, seconds=limits.fetch_seconds)
        except FileNotFoundError:
            raise UnusableRecordError(f"is missing: {redact_url(url)}") from None
        except BatchloomError as error:
            raise UnusableRecordError(
                f"cannot be fetched: {error} Quarantined records are read again with --restart."
            ) from error


@final
class MediaInspector:
    """Inspector of the media of one source.

    Args:
        resolver: resolver of media locations.
        kinds: kinds that the processor accepts.
        sampling: selection of video frames.
        embed: whether to load the bytes of media, too.
    """

    def __init__(
        self,
        resolver: MediaResolver,
        kinds: Collection[MediumKind],
        sampling: FrameSampling,
        *,
        embed: bool,
    ) -> None:
        self._resolver = resolver
        self._kinds = frozenset(kinds)
        self._embed = embed
        self._sampling = sampling
        self._cached_headers = lru_cache(_MAX_CACHED_HEADERS)(self._read_headers)

    def __call__(self, media: list[Medium]) -> list[list[Medium]]:
        """Return each medium of a record with its facts, or the image frames of a video."""
        return [self._inspect(medium, number) for number, medium in enumerate(media, 1)]

    def _inspect(self, medium: Medium, number: int) -> list[Medium]:
        try:
            self._check_kind(medium.kind)
            if self._embed and medium.data is None:
                medium = self._resolver.load_data(medium)
            read_headers = self._read_headers if medium.data is not None else self._cached_headers
            kind: MediumKind = "image" if medium.kind == "video" else medium.kind
            return [replace(medium, kind=kind, info=info) for info in read_headers(medium)]
        except UnusableRecordError as error:
            location = redact_url(medium.location) if medium.location else "in the record"
            raise UnusableRecordError(f"{medium.kind} {number} ({location}) {error.reason}") from error

    def _check_kind(self, kind: MediumKind) -> None:
        if ("image" if kind == "video" else kind) not in self._kinds:
            supported_kinds = " and ".join(sorted(self._kinds))
            raise UnusableRecordError(f"is {kind}, but the processor takes only {supported_kinds}")

    def _read_headers(self, medium: Medium) -> list[MediumInfo]:
        with self._resolver.open(medium) as content:
            header_facts = inspect_medium(medium.kind, content, self._resolver.limits, self._sampling)
            digest = hash_edges(content.size, *read_edges(content))
            return [MediumInfo(facts, digest, content.size) for facts in header_facts]


def inspect_medium(
    kind: MediumKind, content: MediaContent, limits: MediaLimits, sampling: FrameSampling
) -> Sequence[MediumFacts]:
    """Read the header of a medium; of a video, return facts of each sampled frame."""
    if kind == "image":
        return [inspect_image(content, limits)]
    if kind == "audio":
        return [inspect_audio(content, limits)]
    return inspect_video(content, limits, sampling)
