from .block_checksums import (
    COUNTED_ENTRY_BYTES as COUNTED_ENTRY_BYTES,
    PLAIN_ENTRY_BYTES as PLAIN_ENTRY_BYTES,
    BlockChecksums as BlockChecksums,
    ChecksumFile as ChecksumFile,
    compute_block_checksums as compute_block_checksums,
    compute_file_checksums as compute_file_checksums,
    count_entries as count_entries,
    count_header_bytes as count_header_bytes,
    map_checksum_file as map_checksum_file,
    parse_root_checksums as parse_root_checksums,
)
from .file_header import (
    CHECK_REMEDY as CHECK_REMEDY,
    HEADER as HEADER,
    map_file_with_header as map_file_with_header,
)
from .generation_history import (
    GenerationEntry as GenerationEntry,
    GenerationKind as GenerationKind,
    LayerEntry as LayerEntry,
    RemovedEntry as RemovedEntry,
)
from .layout import (
    FORMAT_VERSION as FORMAT_VERSION,
    GENERATIONS_NAME as GENERATIONS_NAME,
    LENGTHS_CHECKSUMS_NAME as LENGTHS_CHECKSUMS_NAME,
    LENGTHS_NAME as LENGTHS_NAME,
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
    choose_token_dtype as choose_token_dtype,
    compute_checksum as compute_checksum,
    format_generation_file_name as format_generation_file_name,
    format_generation_name as format_generation_name,
    format_removed_name as format_removed_name,
    format_shard_name as format_shard_name,
)
from .loss_mask import (
    LossMask as LossMask,
    MaskBuilder as MaskBuilder,
    iter_mask_chunks as iter_mask_chunks,
    map_mask as map_mask,
    parse_mask as parse_mask,
)
from .manifest import (
    Manifest as Manifest,
    PartEntry as PartEntry,
    ProcessorEntry as ProcessorEntry,
    ShardEntry as ShardEntry,
    SourceEntry as SourceEntry,
    StoreCounts as StoreCounts,
    SubsetEntry as SubsetEntry,
    TokenizerEntry as TokenizerEntry,
    compute_content_checksum as compute_content_checksum,
    compute_filtered_fingerprint as compute_filtered_fingerprint,
    compute_subset_fingerprint as compute_subset_fingerprint,
    decode_manifest as decode_manifest,
    encode_manifest as encode_manifest,
    find_generation as find_generation,
    make_generation_entry as make_generation_entry,
    make_tokenizer_entry as make_tokenizer_entry,
    read_generation_manifest as read_generation_manifest,
    read_manifest as read_manifest,
    read_recorded_weights as read_recorded_weights,
    seal_manifest as seal_manifest,
    split_checksum as split_checksum,
)
from .media_index import (
    NOT_STORED as NOT_STORED,
    MediaRows as MediaRows,
    ShardMedia as ShardMedia,
    StoredMedium as StoredMedium,
    encode_facts as encode_facts,
    find_blobs_fault as find_blobs_fault,
    get_facts_kind as get_facts_kind,
    iter_blob_chunks as iter_blob_chunks,
    make_stored_media as make_stored_media,
    map_media as map_media,
    parse_media as parse_media,
    read_blob as read_blob,
)
from .megatron_index import (
    MegatronIndex as MegatronIndex,
    encode_index as encode_index,
    iter_index_chunks as iter_index_chunks,
    map_file as map_file,
    map_index as map_index,
)
from .minhash_signatures import (
    Banding as Banding,
    MinHashSignatures as MinHashSignatures,
    map_signature_file as map_signature_file,
)
from .missing_store import (
    describe_partial_store as describe_partial_store,
    make_missing_store_error as make_missing_store_error,
    resolve_store_folder as resolve_store_folder,
)
from .pair_index import (
    CHOSEN as CHOSEN,
    GOOD as GOOD,
    PAIR_ROW_BYTES as PAIR_ROW_BYTES,
    SIDE_NAMES as SIDE_NAMES,
    PairIndex as PairIndex,
    PreferenceKind as PreferenceKind,
    compute_pair_numbers as compute_pair_numbers,
    map_pair_index as map_pair_index,
    parse_pair_index as parse_pair_index,
)
from .provenance import (
    PROVENANCE_ROW_BYTES as PROVENANCE_ROW_BYTES,
    DocumentProvenance as DocumentProvenance,
    ProvenanceTable as ProvenanceTable,
    check_known_parts as check_known_parts,
    iter_provenance_chunks as iter_provenance_chunks,
    locate_provenance_columns as locate_provenance_columns,
    make_part_table as make_part_table,
    map_provenance as map_provenance,
    parse_provenance as parse_provenance,
)
from .removed_documents import (
    encode_removed as encode_removed,
    map_removed as map_removed,
    mask_removed as mask_removed,
    parse_removed as parse_removed,
)
from .store_lengths import (
    StoreLengths as StoreLengths,
    make_span_error as make_span_error,
    map_lengths as map_lengths,
)
