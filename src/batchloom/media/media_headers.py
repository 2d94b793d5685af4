"""Looking at media at preparation: their headers, and what tells them from others."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import final

from batchloom.core.addresses import shown
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import Facts, Kind, Medium, Seen
from batchloom.media.audio import look_at_sound
from batchloom.media.frame_sampling import Sampling
from batchloom.media.images import look_at_image
from batchloom.media.media_content import Content, edge_hash, edges
from batchloom.media.media_limits import MediaLimits
from batchloom.media.media_locations import Places
from batchloom.media.video import look_at_video

# Of one medium in many records the header is read once; what fails is looked at again.
_REMEMBERED = 4096


@final
class Looker:
    """Looks at media of one source.

    Args:
        places: where they lie.
        kinds: those that the processor takes.
        sampling: which frames of videos are seen.
        held: whether their bytes are taken, too.
    """

    def __init__(
        self, places: Places, kinds: Collection[Kind], sampling: Sampling, *, held: bool
    ) -> None:
        self._places, self._kinds, self._held = places, frozenset(kinds), held
        self._sampling = sampling
        self._named = lru_cache(_REMEMBERED)(self._look)

    def __call__(self, media: list[Medium]) -> list[list[Medium]]:
        """What each of the media of one record is seen as: itself, or the frames of a video, which are images.

        Raises:
            UnusableRecordError: one of them cannot be used; says which.
        """
        return [self._seen(medium, number) for number, medium in enumerate(media, 1)]

    def _seen(self, medium: Medium, number: int) -> list[Medium]:
        try:
            self._refuse_other(medium.kind)
            if self._held and medium.data is None:
                medium = self._places.held(medium)
            look = self._look if medium.data is not None else self._named
            kind: Kind = "image" if medium.kind == "video" else medium.kind
            return [replace(medium, kind=kind, seen=seen) for seen in look(medium)]
        except UnusableRecordError as error:
            place = shown(medium.place) if medium.place else "in the record"
            raise UnusableRecordError(f"{medium.kind} {number} ({place}) {error.reason}") from error

    def _refuse_other(self, kind: Kind) -> None:
        if ("image" if kind == "video" else kind) not in self._kinds:
            taken = " and ".join(sorted(self._kinds))
            raise UnusableRecordError(f"is {kind}, and the processor takes {taken} alone")

    def _look(self, medium: Medium) -> list[Seen]:
        with self._places.open(medium) as content:
            found = look_at(medium.kind, content, self._places.limits, self._sampling)
            digest = edge_hash(content.size, *edges(content))
            return [Seen(facts, digest, content.size) for facts in found]


def look_at(
    kind: Kind, content: Content, limits: MediaLimits, sampling: Sampling
) -> Sequence[Facts]:
    """What the header of a medium says; of a video, of each frame that is seen.

    Raises:
        UnusableRecordError: it is none of its kind, damaged, cut short, or too large.
        MissingDependencyError: what reads such media is not installed.
    """
    if kind == "image":
        return [look_at_image(content, limits)]
    if kind == "audio":
        return [look_at_sound(content, limits)]
    return look_at_video(content, limits, sampling)
