from .permutation import Permutation as Permutation
from .plan_spec import (
    DEFAULT_GROUPED_STEPS as DEFAULT_GROUPED_STEPS,
    MAX_POOL_SIZE as MAX_POOL_SIZE,
    MAX_STEPS as MAX_STEPS,
    ORDER_VERSION as ORDER_VERSION,
    POOL_SIZE as POOL_SIZE,
    LastStepPolicy as LastStepPolicy,
    OverlongMode as OverlongMode,
    PackingOptions as PackingOptions,
    PlanSpec as PlanSpec,
    describe_window_conflict as describe_window_conflict,
    list_window_problems as list_window_problems,
)
from .pools import (
    DocumentLengths as DocumentLengths,
    ExcludedDocuments as ExcludedDocuments,
    Pools as Pools,
)
from .row_order import (
    fit_lengths as fit_lengths,
    pack_rows as pack_rows,
    repack_rows as repack_rows,
)
from .rows import (
    Rows as Rows,
    align_lengths as align_lengths,
    join_rows as join_rows,
    reorder_rows as reorder_rows,
    set_source as set_source,
    slice_rows as slice_rows,
)
from .strategies import strategy_from_identity as strategy_from_identity
