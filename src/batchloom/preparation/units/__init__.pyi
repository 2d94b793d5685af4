from .crash_isolation import (
    CrashIsolation as CrashIsolation,
    CrashTracker as CrashTracker,
    RecordExcludedError as RecordExcludedError,
)
from .media_files import MEDIA_NAMES as MEDIA_NAMES
from .part_cuts import (
    FindCutsTask as FindCutsTask,
    find_part_cuts as find_part_cuts,
    make_cuts_tasks as make_cuts_tasks,
    select_unit_cuts as select_unit_cuts,
)
from .quarantine import (
    ReasonCounts as ReasonCounts,
    count_reason as count_reason,
    describe_bad_records as describe_bad_records,
    encode_quarantine_line as encode_quarantine_line,
)
from .shard_cutter import ShardCutter as ShardCutter
from .stopwatch import (
    STAGES as STAGES,
    StageTime as StageTime,
    Stopwatch as Stopwatch,
    add_stage_times as add_stage_times,
)
from .stream_units import (
    STREAM_BATCHES_FOLDER as STREAM_BATCHES_FOLDER,
    AdoptionContext as AdoptionContext,
    StreamBatchWriter as StreamBatchWriter,
    adopt_unit as adopt_unit,
    read_stream_batches as read_stream_batches,
)
from .subset_balance import (
    MoveCandidates as MoveCandidates,
    balance_subsets as balance_subsets,
    describe_missed_shares as describe_missed_shares,
    misses_share as misses_share,
)
from .tasks import (
    CrashMarker as CrashMarker,
    RecordPosition as RecordPosition,
    SegmentKeysTask as SegmentKeysTask,
    UnitProgress as UnitProgress,
    UnitTask as UnitTask,
    UnusableError as UnusableError,
)
from .unit_files import (
    DEDUP_COUNTS_NAME as DEDUP_COUNTS_NAME,
    DROPPED_NAME as DROPPED_NAME,
    FACTS_NAME as FACTS_NAME,
    KEYS_NAME as KEYS_NAME,
    ROW as ROW,
    ROWS_NAME as ROWS_NAME,
    SHARDS_NAME as SHARDS_NAME,
    SIGNATURES_NAME as SIGNATURES_NAME,
    UnitFiles as UnitFiles,
    concatenate_ranges as concatenate_ranges,
    mark_first_of_records as mark_first_of_records,
    split_ranges as split_ranges,
    stored_lengths as stored_lengths,
    tokens_file_name as tokens_file_name,
    trained_file_name as trained_file_name,
)
from .unit_report import (
    MAX_SAMPLES as MAX_SAMPLES,
    DropCounts as DropCounts,
    DropSample as DropSample,
    SourceCounts as SourceCounts,
    StepFlow as StepFlow,
    UnitReport as UnitReport,
    UnitReportMerger as UnitReportMerger,
    UnitStatistics as UnitStatistics,
    format_snippet as format_snippet,
)
from .units import (
    UNIT_BYTES as UNIT_BYTES,
    Unit as Unit,
    combine_part_hashes as combine_part_hashes,
    compute_unit_identity as compute_unit_identity,
    plan_units as plan_units,
)
from .work_folder import (
    DUPLICATES_SUFFIX as DUPLICATES_SUFFIX,
    KEYS_SUFFIX as KEYS_SUFFIX,
    SPOOL_NAME as SPOOL_NAME,
    WORK_VERSION as WORK_VERSION,
    Decision as Decision,
    ExcludedRecords as ExcludedRecords,
    JobIdentity as JobIdentity,
    PartCounts as PartCounts,
    PartDedupCounts as PartDedupCounts,
    TokenizedUnit as TokenizedUnit,
    UnitDedupCounts as UnitDedupCounts,
    UnitFacts as UnitFacts,
    WorkFolder as WorkFolder,
    attempt_folder as attempt_folder,
    has_learned_tokenizer as has_learned_tokenizer,
    move_into_place as move_into_place,
    open_attempt_file as open_attempt_file,
    read_bad_records as read_bad_records,
    read_dedup_counts as read_dedup_counts,
    read_unit_facts as read_unit_facts,
    read_unit_shards as read_unit_shards,
    translate_read_errors as translate_read_errors,
)
from .written_media import read_unit_media as read_unit_media
