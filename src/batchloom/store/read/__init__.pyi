from .document_walk import (
    find_provenance as find_provenance,
    find_source_names as find_source_names,
)
from .mapped_shards import (
    MappedShard as MappedShard,
    MappedSpans as MappedSpans,
    ShardAddresses as ShardAddresses,
    collect_addresses as collect_addresses,
    compute_mapped_limit as compute_mapped_limit,
    make_mapped_shard as make_mapped_shard,
    map_prefix as map_prefix,
)
from .remote_store import RemoteSubset as RemoteSubset, open_remote_manifest as open_remote_manifest
from .store_opening import refuse_media as refuse_media, refuse_standalone_shard as refuse_standalone_shard
from .stored_media import (
    MediaCount as MediaCount,
    choose_default_overlong as choose_default_overlong,
    has_media as has_media,
)
from .synthetic_store import (
    make_synthetic_manifest as make_synthetic_manifest,
    make_synthetic_tokenizer as make_synthetic_tokenizer,
)
