from .permutation import Permutation as Permutation
from .plan_spec import (
    GROUPED as GROUPED,
    MOST_POOL_SIZE as MOST_POOL_SIZE,
    ORDER_VERSION as ORDER_VERSION,
    POOL_SIZE as POOL_SIZE,
    Last as Last,
    Overlong as Overlong,
    PackingOptions as PackingOptions,
    PlanSpec as PlanSpec,
    inside_window as inside_window,
    large_window as large_window,
)
from .pools import LeftOut as LeftOut, Lengths as Lengths, Pools as Pools
from .row_order import fitted as fitted, packed_rows as packed_rows, repacked_rows as repacked_rows
from .rows import (
    Rows as Rows,
    aligned as aligned,
    join_rows as join_rows,
    named as named,
    reorder_rows as reorder_rows,
    slice_rows as slice_rows,
)
from .strategies import packing_from_identity as packing_from_identity
