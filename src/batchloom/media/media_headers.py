"""Inspection of media during preparation: headers and identity hashes."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import final

from batchloom.core.addresses import redact_url
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Medium, MediumFacts, MediumInfo, MediumKind
from batchloom.media.audio import inspect_audio
from batchloom.media.frame_sampling import FrameSampling
from batchloom.media.images import inspect_image
from batchloom.media.media_content import MediaContent, hash_edges, read_edges
from batchloom.media.media_limits import MediaLimits
from batchloom.media.media_locations import MediaResolver
from batchloom.media.video import inspect_video

# A medium in many records is read once. Failures are not cached.
_MAX_CACHED_HEADERS = 4096


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
        self._resolver, self._kinds, self._embed = resolver, frozenset(kinds), embed
        self._sampling = sampling
        self._cached_headers = lru_cache(_MAX_CACHED_HEADERS)(self._read_headers)

    def __call__(self, media: list[Medium]) -> list[list[Medium]]:
        """Return each medium of a record with its facts, or the image frames of a video.

        Raises:
            UnusableRecordError: a medium cannot be used; the message says which.
        """
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
    """Read the header of a medium; of a video, return facts of each sampled frame.

    Raises:
        UnusableRecordError: the medium is of another kind, damaged, truncated, or too large.
        MissingDependencyError: the reader of this kind is not installed.
    """
    if kind == "image":
        return [inspect_image(content, limits)]
    if kind == "audio":
        return [inspect_audio(content, limits)]
    return inspect_video(content, limits, sampling)
