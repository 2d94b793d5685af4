from .assumed_lengths import AssumedStore as AssumedStore
from .lane_plan import refuse_lanes as refuse_lanes
from .lanes import (
    FIRST_POOL as FIRST_POOL,
    LANES_VERSION as LANES_VERSION,
    all_too_long as all_too_long,
    check_lane_world as check_lane_world,
    check_lanes as check_lanes,
    default_lanes as default_lanes,
    lane_pool_size as lane_pool_size,
    lane_rows as lane_rows,
    no_sequence as no_sequence,
    rank_lanes as rank_lanes,
)
from .plan_checks import refuse_past_end as refuse_past_end
from .plan_state import differences as differences
from .rank_slices import (
    DATA_PARALLEL as DATA_PARALLEL,
    Place as Place,
    Uneven as Uneven,
    divisors as divisors,
    rows_of_rank as rows_of_rank,
)
from .row_dealing import Costs as Costs, Imbalance as Imbalance, costliest_first as costliest_first
from .source_cuts import Cut as Cut
from .source_order import SourceOrder as SourceOrder, quotas as quotas
from .source_orders import SOURCE as SOURCE, SourceOrders as SourceOrders
