from .plan_spec import (
    MAX_POOL_SIZE as MAX_POOL_SIZE,
    MAX_STEPS as MAX_STEPS,
    POOL_SIZE as POOL_SIZE,
    OverlongMode as OverlongMode,
    format_near_multiples as format_near_multiples,
    list_choice_problems as list_choice_problems,
)
from .pools import ExcludedDocuments as ExcludedDocuments
from .rows import (
    Rows as Rows,
    align_lengths as align_lengths,
    fit_lengths as fit_lengths,
    join_rows as join_rows,
    pack_rows as pack_rows,
    reorder_rows as reorder_rows,
    slice_rows as slice_rows,
)
from .strategies import CUTTING_STRATEGIES as CUTTING_STRATEGIES
