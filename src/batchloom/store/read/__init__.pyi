from .document_walk import Stretch as Stretch, int32_ids as int32_ids, walk as walk
from .mapped_shards import Shard as Shard, map_prefix as map_prefix, mapped_limit as mapped_limit
from .provenance_lookup import origins_of as origins_of, source_named as source_named
from .remote_blocks import TRIES as TRIES
from .remote_store import FarSubset as FarSubset, read_far_manifest as read_far_manifest
from .standalone_shard import refuse_lone_shard as refuse_lone_shard, refuse_media as refuse_media
from .store_opening import open_store as open_store
from .store_reader import Store as Store
from .stored_media import (
    MediaCount as MediaCount,
    holds_media as holds_media,
    read_processor_state as read_processor_state,
)
from .subset_reader import SubsetReader as SubsetReader
from .synthetic_store import (
    is_synthetic as is_synthetic,
    synthetic_manifest as synthetic_manifest,
    synthetic_tokenizer as synthetic_tokenizer,
)
from .text_beginning import beginning as beginning
