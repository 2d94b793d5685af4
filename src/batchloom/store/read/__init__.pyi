from .document_walk import (
    DocumentRange as DocumentRange,
    iter_document_ranges as iter_document_ranges,
    to_int32 as to_int32,
)
from .mapped_shards import (
    MappedShard as MappedShard,
    compute_mapped_limit as compute_mapped_limit,
    map_prefix as map_prefix,
)
from .provenance_lookup import (
    find_provenance as find_provenance,
    find_source_names as find_source_names,
)
from .remote_blocks import MAX_FETCH_ATTEMPTS as MAX_FETCH_ATTEMPTS
from .remote_store import RemoteSubset as RemoteSubset, open_remote_manifest as open_remote_manifest
from .standalone_shard import (
    refuse_media as refuse_media,
    refuse_standalone_shard as refuse_standalone_shard,
)
from .store_opening import open_store as open_store
from .store_reader import Store as Store
from .stored_media import (
    MediaCount as MediaCount,
    has_media as has_media,
    read_processor_state as read_processor_state,
)
from .subset_reader import SubsetReader as SubsetReader
from .synthetic_store import (
    is_synthetic as is_synthetic,
    make_synthetic_manifest as make_synthetic_manifest,
    make_synthetic_tokenizer as make_synthetic_tokenizer,
)
from .text_beginning import decode_beginning as decode_beginning
