"""Images and audio of the documents of a stream: which they hold, and where these lie until their batch is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, NamedTuple, final

from batchloom.core.errors import StoreError
from batchloom.media import MediaLimits
from batchloom.preparation.documents import PlacedMedium
from batchloom.store import wrap_write_errors
from batchloom.store.format import StoredMedium, get_facts_kind, read_blob
from batchloom.store.write import make_folder


class DocumentMedia(NamedTuple):
    """What a document holds.

    Attributes:
        media: in the order of their tokens.
        folder: where their paths begin.
        line: the file and the line of the document, for people.
    """

    media: tuple[StoredMedium, ...]
    folder: str
    line: str


@final
@dataclass(frozen=True, slots=True)
class PoolMedia:
    """The media of the documents of a pool.

    Attributes:
        documents: those that hold some, by their numbers in the pool.
        limits: what is refused for its size.
        spill_files: files of bytes that no later pool of the lane needs.
    """

    documents: Mapping[int, DocumentMedia]
    limits: MediaLimits
    spill_files: tuple[Path, ...]

    @property
    def remedy(self) -> str:
        """What may be done where a medium cannot be read."""
        return (
            "Bring it back, or leave the record out. Of a store (batchloom prepare) a run can serve padding for "
            "documents whose media are gone."
        )

    def read_bytes(self, medium: StoredMedium) -> bytes:
        """The bytes of a medium that stood in its record.

        Raises:
            StoreError: they cannot be read.
        """
        if medium.blob is None:
            raise AssertionError(f"a medium of {self.describe_document(medium.document)} is named only")
        path, begin = medium.blob
        if not path.exists():
            raise StoreError(
                f"the file is gone in which it was laid aside ({path}): go on from the last state, and do not clear "
                "the folder for temporary files under a run."
            )
        return read_blob(path, begin, medium.size)

    def folder_of(self, document: int) -> str:
        """Where paths of media begin that a document names."""
        return self.documents[document].folder

    def describe_document(self, document: int) -> str:
        """What a document is called in a sentence."""
        return f"The document at {self.documents[document].line}"

    def of(self, document: int) -> tuple[StoredMedium, ...]:
        """The media of a document."""
        document_media = self.documents.get(document)
        return () if document_media is None else document_media.media

    def forget(self) -> None:
        """Delete what no later pool needs."""
        for path in self.spill_files:
            path.unlink(missing_ok=True)


@final
class MediaSpill:
    """Lays the bytes of media that stand in records aside, so that no pool has them in memory.

    Args:
        folder: of files; it is made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_media(
        self, media: Sequence[Sequence[PlacedMedium]]
    ) -> tuple[list[tuple[StoredMedium, ...]], Path | None]:
        """The media of documents as they are read for batches, and the file of their bytes; None where none is held.

        Raises:
            OutputError: it cannot be written.
        """
        has_data = any(placed_medium.medium.data is not None for some in media for placed_medium in some)
        if not has_data:
            return [tuple(_make_stored_medium(placed_medium, None) for placed_medium in some) for some in media], None
        make_folder(self._folder)
        with (
            wrap_write_errors(self._folder),
            NamedTemporaryFile(dir=self._folder, suffix=".media", delete=False) as file,
        ):
            path = Path(file.name)
            try:
                return [tuple(_write_media_bytes(some, path, file)) for some in media], path
            except OSError:
                path.unlink()
                raise


def _write_media_bytes(media: Sequence[PlacedMedium], path: Path, file: IO[bytes]) -> list[StoredMedium]:
    stored_media: list[StoredMedium] = []
    last: tuple[bytes, int] | None = None
    for placed_medium in media:
        data = placed_medium.medium.data
        if data is None:
            stored_media.append(_make_stored_medium(placed_medium, None))
            continue
        if last is None or last[0] is not data:  # the frames of a video are of the same bytes
            last = data, file.tell()
            file.write(data)
        stored_media.append(_make_stored_medium(placed_medium, (path, last[1])))
    return stored_media


def _make_stored_medium(placed_medium: PlacedMedium, blob: tuple[Path, int] | None) -> StoredMedium:
    info = placed_medium.medium.info
    if info is None:
        raise AssertionError("media are looked at before they are encoded")
    kind, location = get_facts_kind(info.facts), placed_medium.medium.location
    return StoredMedium(
        *(
            0,
            kind,
            placed_medium.start,
            placed_medium.tokens,
            placed_medium.grid,
            info.facts,
            location,
            info.size,
        ),
        *(info.digest, blob),
    )
