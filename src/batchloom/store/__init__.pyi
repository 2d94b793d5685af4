from .export.export_targets import TARGETS as TARGETS, export_store as export_store
from .format.block_checksums import block_sums as block_sums
from .format.layout import (
    MANIFEST_NAME as MANIFEST_NAME,
    PAGE_NAME as PAGE_NAME,
    REPORT_NAME as REPORT_NAME,
    WORK_NAME as WORK_NAME,
)
from .format.manifest import (
    Manifest as Manifest,
    PartEntry as PartEntry,
    ShardEntry as ShardEntry,
    manifest_bytes as manifest_bytes,
    read_manifest as read_manifest,
)
from .format.media_index import (
    NOT_HELD as NOT_HELD,
    ROW as ROW,
    MediaRows as MediaRows,
    ShardMedia as ShardMedia,
    map_media as map_media,
)
from .format.megatron_index import map_file as map_file
from .format.minhash_signatures import map_bands as map_bands
from .format.pair_index import BAD as BAD, CHOSEN as CHOSEN, GOOD as GOOD, REJECTED as REJECTED
from .format.provenance import map_origins as map_origins
from .format.store_lengths import StoreLengths as StoreLengths
from .maintain.compaction import compact_store as compact_store
from .maintain.generation_log import read_log as read_log
from .maintain.generations import (
    add_generation as add_generation,
    changing as changing,
    extended as extended,
    stored_documents as stored_documents,
)
from .maintain.missing_media import read_gone as read_gone
from .maintain.removal import remove_documents as remove_documents
from .maintain.verification import verify_prefix as verify_prefix, verify_store as verify_store
from .read.document_walk import walk as walk
from .read.preference_reader import Labels as Labels, Pairs as Pairs
from .read.provenance_lookup import documents_of as documents_of
from .read.store_opening import open_store as open_store
from .read.store_reader import Store as Store
from .read.stored_media import StoreMedia as StoreMedia
from .read.text_beginning import beginning as beginning
from .write.store_writer import AsideFile as AsideFile, write_file as write_file, writing as writing
from .write.stream_ranges import read_stretches as read_stretches
