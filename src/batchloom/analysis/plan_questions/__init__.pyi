from .checkpoint_plan import is_endless as is_endless, read_checkpoint as read_checkpoint
from .data_source_labels import make_data_label as make_data_label
from .plan_lookup import (
    JournalEntry as JournalEntry,
    PlanRequest as PlanRequest,
    make_journal_entry as make_journal_entry,
    read_journal as read_journal,
    resolve_plan as resolve_plan,
)
from .pool_counts import adopt_tables as adopt_tables, write_tables as write_tables
from .rank_rows import assign_step_ranks as assign_step_ranks, sort_by_rank as sort_by_rank
from .source_measure import MixingMeasure as MixingMeasure
from .unserved import explain_unserved as explain_unserved
