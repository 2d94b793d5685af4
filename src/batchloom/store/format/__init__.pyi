from .block_checksums import (
    COUNTED as COUNTED,
    PLAIN as PLAIN,
    BlockSums as BlockSums,
    Sums as Sums,
    block_sums as block_sums,
    entries_of as entries_of,
    head_bytes as head_bytes,
    map_sums as map_sums,
    roots_of as roots_of,
    sums_of_file as sums_of_file,
)
from .file_header import CHECK as CHECK, HEADER as HEADER, map_headed as map_headed
from .generation_history import (
    GenerationEntry as GenerationEntry,
    LayerEntry as LayerEntry,
    Made as Made,
    RemovedEntry as RemovedEntry,
)
from .layout import (
    FORMAT_VERSION as FORMAT_VERSION,
    GENERATIONS_NAME as GENERATIONS_NAME,
    LENGTHS_NAME as LENGTHS_NAME,
    LENGTHS_SUMS_NAME as LENGTHS_SUMS_NAME,
    LOCK_NAME as LOCK_NAME,
    MANIFEST_NAME as MANIFEST_NAME,
    PAGE_NAME as PAGE_NAME,
    PROCESSOR_NAME as PROCESSOR_NAME,
    QUARANTINE_NAME as QUARANTINE_NAME,
    REPORT_NAME as REPORT_NAME,
    SHARD_NAME as SHARD_NAME,
    SMALL_FILE_LIMIT as SMALL_FILE_LIMIT,
    SUBSETS as SUBSETS,
    TOKEN_DTYPES as TOKEN_DTYPES,
    TOKENIZER_NAME as TOKENIZER_NAME,
    UINT16_IDS as UINT16_IDS,
    WORK_NAME as WORK_NAME,
    checksum as checksum,
    generation_name as generation_name,
    of_generation as of_generation,
    removed_name as removed_name,
    shard_name as shard_name,
    token_dtype as token_dtype,
)
from .loss_mask import (
    Mask as Mask,
    MaskBits as MaskBits,
    map_mask as map_mask,
    mask_of as mask_of,
    mask_pieces as mask_pieces,
)
from .manifest import (
    Counts as Counts,
    Manifest as Manifest,
    PartEntry as PartEntry,
    ProcessorEntry as ProcessorEntry,
    ShardEntry as ShardEntry,
    SourceEntry as SourceEntry,
    SubsetEntry as SubsetEntry,
    TokenizerEntry as TokenizerEntry,
    chosen_fingerprint as chosen_fingerprint,
    content_checksum as content_checksum,
    decode_manifest as decode_manifest,
    generation_entry as generation_entry,
    generation_with as generation_with,
    manifest_bytes as manifest_bytes,
    manifest_of_generation as manifest_of_generation,
    read_manifest as read_manifest,
    recorded_weights as recorded_weights,
    seal as seal,
    split_checksum as split_checksum,
    subset_fingerprint as subset_fingerprint,
    tokenizer_entry as tokenizer_entry,
)
from .media_index import (
    NOT_HELD as NOT_HELD,
    MediaRows as MediaRows,
    ShardMedia as ShardMedia,
    StoredMedium as StoredMedium,
    blob_pieces as blob_pieces,
    blobs_fault as blobs_fault,
    kind_of as kind_of,
    map_media as map_media,
    media_of as media_of,
    numbers_of as numbers_of,
    read_blob as read_blob,
    stored_media as stored_media,
)
from .megatron_index import (
    Index as Index,
    index_bytes as index_bytes,
    index_pieces as index_pieces,
    map_file as map_file,
    map_index as map_index,
)
from .minhash_signatures import Banding as Banding, Bands as Bands, map_bands as map_bands
from .missing_store import (
    half_a_store as half_a_store,
    no_store as no_store,
    store_folder as store_folder,
)
from .pair_index import (
    CHOSEN as CHOSEN,
    GOOD as GOOD,
    PAIR_ROW_BYTES as PAIR_ROW_BYTES,
    SIDE_NAMES as SIDE_NAMES,
    Preferences as Preferences,
    Sides as Sides,
    map_sides as map_sides,
    pair_numbers as pair_numbers,
    sides_of as sides_of,
)
from .provenance import (
    PROVENANCE_ROW_BYTES as PROVENANCE_ROW_BYTES,
    Origin as Origin,
    Origins as Origins,
    known_parts as known_parts,
    map_origins as map_origins,
    origin_columns as origin_columns,
    origins_of as origins_of,
    origins_pieces as origins_pieces,
    places_of as places_of,
)
from .removed_documents import (
    are_removed as are_removed,
    map_removed as map_removed,
    removed_bytes as removed_bytes,
    removed_of as removed_of,
)
from .store_lengths import (
    StoreLengths as StoreLengths,
    beyond as beyond,
    map_lengths as map_lengths,
)
