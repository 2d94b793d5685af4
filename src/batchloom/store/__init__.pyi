from .bands import map_bands as map_bands
from .beginning import beginning as beginning
from .compact import compact_store as compact_store
from .export import TARGETS as TARGETS, export_store as export_store
from .format import (
    MANIFEST_NAME as MANIFEST_NAME,
    PAGE_NAME as PAGE_NAME,
    REPORT_NAME as REPORT_NAME,
    WORK_NAME as WORK_NAME,
)
from .generations import (
    add_generation as add_generation,
    changing as changing,
    extended as extended,
    stored_documents as stored_documents,
)
from .gone import read_gone as read_gone
from .index import map_file as map_file
from .lengths import StoreLengths as StoreLengths
from .log import read_log as read_log
from .manifest import (
    Manifest as Manifest,
    PartEntry as PartEntry,
    ShardEntry as ShardEntry,
    manifest_bytes as manifest_bytes,
    read_manifest as read_manifest,
)
from .media import (
    NOT_HELD as NOT_HELD,
    ROW as ROW,
    MediaRows as MediaRows,
    ShardMedia as ShardMedia,
    map_media as map_media,
)
from .opening import open_store as open_store
from .origins import map_origins as map_origins
from .pairs import BAD as BAD, CHOSEN as CHOSEN, GOOD as GOOD, REJECTED as REJECTED
from .preferences import Labels as Labels, Pairs as Pairs
from .reader import Store as Store
from .remove import remove_documents as remove_documents
from .stored_media import StoreMedia as StoreMedia
from .stretches import read_stretches as read_stretches
from .sums import block_sums as block_sums
from .verify import verify_prefix as verify_prefix, verify_store as verify_store
from .walk import walk as walk
from .whence import documents_of as documents_of
from .writer import AsideFile as AsideFile, write_file as write_file, writing as writing
