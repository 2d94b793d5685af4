from .duplicate_search import (
    DUPLICATE as DUPLICATE,
    DuplicateCounter as DuplicateCounter,
    read_unit_duplicates as read_unit_duplicates,
    search_duplicates as search_duplicates,
)
from .line_dedup import LineDeduplicator as LineDeduplicator, hash_segments as hash_segments
from .near_duplicates import (
    NO_KEY as NO_KEY,
    choose_banding as choose_banding,
    compute_signatures as compute_signatures,
    find_components as find_components,
    map_signatures as map_signatures,
    match_probability as match_probability,
    write_signature_keys as write_signature_keys,
)
from .sorted_keys import (
    SIGNATURE_KEY as SIGNATURE_KEY,
    count_keys as count_keys,
    count_partitions as count_partitions,
    make_key_records as make_key_records,
    open_key_writer as open_key_writer,
    write_keys as write_keys,
)
