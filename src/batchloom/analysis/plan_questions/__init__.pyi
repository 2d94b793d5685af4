from .checkpoint_plan import is_endless as is_endless, read_checkpoint as read_checkpoint
from .data_source_labels import make_data_label as make_data_label
from .plan_lookup import (
    JournalEntry as JournalEntry,
    PlanRequest as PlanRequest,
    make_journal_entry as make_journal_entry,
    read_journal as read_journal,
    resolve_plan as resolve_plan,
)
from .pool_counts import (
    adopt_tables as adopt_tables,
    ensure_tables as ensure_tables,
    ensure_tables_for as ensure_tables_for,
    write_tables as write_tables,
)
from .rank_rows import (
    assign_step_ranks as assign_step_ranks,
    get_plan as get_plan,
    resolve_world as resolve_world,
    sort_by_rank as sort_by_rank,
)
from .source_measure import (
    MixingMeasure as MixingMeasure,
    SourceEpochStatistics as SourceEpochStatistics,
    measure_mixing as measure_mixing,
    measure_pools as measure_pools,
)
from .unserved import explain_unserved as explain_unserved
