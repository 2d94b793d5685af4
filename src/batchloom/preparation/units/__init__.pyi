from .crash_isolation import (
    KeptAsideError as KeptAsideError,
    Losses as Losses,
    Suspects as Suspects,
)
from .media_files import MEDIA_NAMES as MEDIA_NAMES
from .part_cuts import (
    CutsOrder as CutsOrder,
    cuts_of as cuts_of,
    cuts_orders as cuts_orders,
    find_cuts as find_cuts,
)
from .quarantine import (
    Reasons as Reasons,
    bad_advice as bad_advice,
    count_reason as count_reason,
    quarantine_line as quarantine_line,
)
from .shard_cutter import ShardCutter as ShardCutter
from .stopwatch import STAGES as STAGES, Spent as Spent, Stopwatch as Stopwatch, added as added
from .stream_units import (
    STRETCHES as STRETCHES,
    Adoption as Adoption,
    StretchLog as StretchLog,
    adopt_unit as adopt_unit,
    kept_stretches as kept_stretches,
)
from .subset_balance import (
    Candidates as Candidates,
    balance_subsets as balance_subsets,
    misses as misses,
    share_notes as share_notes,
)
from .tasks import (
    At as At,
    Heard as Heard,
    PiecesOrder as PiecesOrder,
    Place as Place,
    UnitOrder as UnitOrder,
    UnusableError as UnusableError,
)
from .unit_files import (
    BANDS_NAME as BANDS_NAME,
    DROPPED_NAME as DROPPED_NAME,
    FACTS_NAME as FACTS_NAME,
    KEPT_NAME as KEPT_NAME,
    KEYS_NAME as KEYS_NAME,
    ROW as ROW,
    ROWS_NAME as ROWS_NAME,
    SHARDS_NAME as SHARDS_NAME,
    UnitFiles as UnitFiles,
    back_to_back as back_to_back,
    first_of_records as first_of_records,
    in_pieces as in_pieces,
    tokens_name as tokens_name,
    trained_name as trained_name,
    written_lengths as written_lengths,
)
from .unit_report import (
    MOST_SAMPLES as MOST_SAMPLES,
    Dropped as Dropped,
    Flow as Flow,
    Merging as Merging,
    Sample as Sample,
    SourceCounts as SourceCounts,
    UnitReport as UnitReport,
    UnitTally as UnitTally,
    first_words as first_words,
)
from .units import (
    UNIT_BYTES as UNIT_BYTES,
    Unit as Unit,
    plan_units as plan_units,
    source_hash as source_hash,
    unit_identity as unit_identity,
)
from .work_folder import (
    FOUND as FOUND,
    KEYS as KEYS,
    SPOOL_NAME as SPOOL_NAME,
    WORK_VERSION as WORK_VERSION,
    Decision as Decision,
    Excluded as Excluded,
    JobFacts as JobFacts,
    Kept as Kept,
    PartCounts as PartCounts,
    UnitFacts as UnitFacts,
    UnitKept as UnitKept,
    UnitWork as UnitWork,
    WorkFolder as WorkFolder,
    attempt_folder as attempt_folder,
    claim as claim,
    claimed_file as claimed_file,
    read_shards as read_shards,
    read_unit as read_unit,
    reading as reading,
)
from .written_media import unit_media as unit_media
