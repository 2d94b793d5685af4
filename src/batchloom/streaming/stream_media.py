"""Media of stream documents, with temporary storage until their batch is made."""

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
    media: tuple[StoredMedium, ...]
    folder: str  # Base folder of their paths
    line: str  # File and line of the document, for messages


@final
@dataclass(frozen=True, slots=True)
class PoolMedia:
    documents: Mapping[int, DocumentMedia]  # Documents with media, by their number in the pool
    limits: MediaLimits
    spill_files: tuple[Path, ...]  # Files of bytes that no later pool of the lane needs

    @property
    def remedy(self) -> str:
        return (
            "Restore it, or remove the record. From a store (batchloom prepare) a run can serve padding for "
            "documents with missing media."
        )

    def read_bytes(self, medium: StoredMedium) -> bytes:
        if medium.blob is None:
            raise AssertionError(f"a medium of {self.describe_document(medium.document)} has only a name, no bytes")
        path, begin = medium.blob
        if not path.exists():
            raise StoreError(
                f"its temporary file {path} is missing. Resume from the last state, and do not clear the folder for "
                "temporary files during a run."
            )
        return read_blob(path, begin, medium.size)

    def folder_of(self, document: int) -> str:
        return self.documents[document].folder

    def describe_document(self, document: int) -> str:
        return f"The document at {self.documents[document].line}"

    def of(self, document: int) -> tuple[StoredMedium, ...]:
        document_media = self.documents.get(document)
        return () if document_media is None else document_media.media

    def forget(self) -> None:
        """Delete spill files that no later pool needs."""
        for path in self.spill_files:
            path.unlink(missing_ok=True)


@final
class MediaSpill:
    """Writer of media bytes from records to files, so that pools do not hold them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_media(
        self, media: Sequence[Sequence[PlacedMedium]]
    ) -> tuple[list[tuple[StoredMedium, ...]], Path | None]:
        """Return the stored media of documents, and their spill file; None without bytes."""
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
        if last is None or last[0] is not data:  # frames of a video share one bytes object
            last = data, file.tell()
            file.write(data)
        stored_media.append(_make_stored_medium(placed_medium, (path, last[1])))
    return stored_media


def _make_stored_medium(placed_medium: PlacedMedium, blob: tuple[Path, int] | None) -> StoredMedium:
    info = placed_medium.medium.info
    if info is None:
        raise AssertionError("media must be inspected before they are encoded")
    return StoredMedium(
        document=0,
        kind=get_facts_kind(info.facts),
        start=placed_medium.start,
        tokens=placed_medium.tokens,
        grid=placed_medium.grid,
        facts=info.facts,
        location=placed_medium.medium.location,
        size=info.size,
        digest=info.digest,
        blob=blob,
    )
