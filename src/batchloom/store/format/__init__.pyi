from .block_checksums import (
    COUNTED_ENTRY_BYTES as COUNTED_ENTRY_BYTES,
    PLAIN_ENTRY_BYTES as PLAIN_ENTRY_BYTES,
    BlockChecksums as BlockChecksums,
    compute_file_checksums as compute_file_checksums,
    count_entries as count_entries,
    map_checksum_file as map_checksum_file,
)
from .dropped_duplicates import (
    DROPPED_ROW as DROPPED_ROW,
    EQUAL as EQUAL,
    DroppedDuplicates as DroppedDuplicates,
    map_dropped_duplicates as map_dropped_duplicates,
    write_dropped_duplicates as write_dropped_duplicates,
)
from .layout import (
    DUPLICATES_NAME as DUPLICATES_NAME,
    FORMAT_VERSION as FORMAT_VERSION,
    GENERATIONS_NAME as GENERATIONS_NAME,
    LENGTHS_CHECKSUMS_NAME as LENGTHS_CHECKSUMS_NAME,
    LENGTHS_NAME as LENGTHS_NAME,
    LOCK_NAME as LOCK_NAME,
    PROCESSOR_NAME as PROCESSOR_NAME,
    QUARANTINE_NAME as QUARANTINE_NAME,
    SHARD_NAME as SHARD_NAME,
    SMALL_FILE_LIMIT as SMALL_FILE_LIMIT,
    SUBSETS as SUBSETS,
    TOKEN_DTYPES as TOKEN_DTYPES,
    TOKENIZER_NAME as TOKENIZER_NAME,
    UINT16_IDS as UINT16_IDS,
    choose_token_dtype as choose_token_dtype,
    compute_checksum as compute_checksum,
    describe_partial_store as describe_partial_store,
    format_generation_file_name as format_generation_file_name,
    format_generation_name as format_generation_name,
    format_shard_name as format_shard_name,
    make_missing_store_error as make_missing_store_error,
)
from .manifest import (
    GenerationEntry as GenerationEntry,
    ProcessorEntry as ProcessorEntry,
    SourceEntry as SourceEntry,
    StoreCounts as StoreCounts,
    SubsetEntry as SubsetEntry,
    decode_manifest as decode_manifest,
    find_generation as find_generation,
    make_tokenizer_entry as make_tokenizer_entry,
    seal_manifest as seal_manifest,
    split_checksum as split_checksum,
)
from .media_index import (
    StoredMedium as StoredMedium,
    encode_facts as encode_facts,
    get_facts_kind as get_facts_kind,
    make_stored_media as make_stored_media,
    read_blob as read_blob,
)
from .megatron_index import encode_index as encode_index, iter_index_chunks as iter_index_chunks, map_index as map_index
from .objectives import OBJECTIVES as OBJECTIVES, SIDE_NAMES as SIDE_NAMES, ObjectiveName as ObjectiveName
from .provenance import (
    DocumentProvenance as DocumentProvenance,
    ProvenanceTable as ProvenanceTable,
    iter_provenance_chunks as iter_provenance_chunks,
    make_part_table as make_part_table,
)
from .shard_sidecars import (
    CHECK_REMEDY as CHECK_REMEDY,
    HEADER as HEADER,
    NO_FLAGS as NO_FLAGS,
    Banding as Banding,
    DocumentFields as DocumentFields,
    LossMask as LossMask,
    LossWeights as LossWeights,
    MaskBuilder as MaskBuilder,
    MinHashSignatures as MinHashSignatures,
    PairIndex as PairIndex,
    compute_pair_numbers as compute_pair_numbers,
    get_address as get_address,
    map_mask as map_mask,
    map_pair_index as map_pair_index,
    map_weights as map_weights,
    split_pair_numbers as split_pair_numbers,
)
from .store_lengths import map_removed as map_removed, mask_removed as mask_removed
