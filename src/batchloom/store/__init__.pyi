from .export_targets import (
    EXPORT_TARGETS as EXPORT_TARGETS,
    ExportTarget as ExportTarget,
    export_store as export_store,
)
from .format.block_checksums import compute_block_checksums as compute_block_checksums
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
    encode_manifest as encode_manifest,
    read_manifest as read_manifest,
)
from .format.media_index import (
    MEDIA_ROW_DTYPE as MEDIA_ROW_DTYPE,
    NOT_STORED as NOT_STORED,
    MediaRows as MediaRows,
    ShardMedia as ShardMedia,
    map_media as map_media,
)
from .format.megatron_index import map_file as map_file
from .format.objectives import (
    BAD as BAD,
    CHOSEN as CHOSEN,
    GOOD as GOOD,
    PROMPT as PROMPT,
    REJECTED as REJECTED,
)
from .format.shard_sidecars import (
    map_provenance as map_provenance,
    map_signature_file as map_signature_file,
)
from .format.store_lengths import StoreLengths as StoreLengths
from .maintain.generations import (
    add_generation as add_generation,
    extend_manifest as extend_manifest,
    iter_shard_documents as iter_shard_documents,
    list_generation_files as list_generation_files,
    lock_store as lock_store,
    read_log as read_log,
)
from .maintain.removal import (
    compact_store as compact_store,
    find_listed_documents as find_listed_documents,
    remove_documents as remove_documents,
)
from .maintain.verification import verify_prefix as verify_prefix, verify_store as verify_store
from .read.document_walk import (
    find_documents as find_documents,
    iter_document_ranges as iter_document_ranges,
)
from .read.objective_readers import (
    LabelledAnswers as LabelledAnswers,
    PreferencePairs as PreferencePairs,
    StoredPrompts as StoredPrompts,
)
from .read.store_opening import open_store as open_store
from .read.store_reader import Store as Store, decode_beginning as decode_beginning
from .read.stored_media import StoreMedia as StoreMedia
from .write.store_writer import (
    AtomicFile as AtomicFile,
    wrap_write_errors as wrap_write_errors,
    write_file as write_file,
)
