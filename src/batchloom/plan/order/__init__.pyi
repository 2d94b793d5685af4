from .assumed_lengths import AssumedStore as AssumedStore
from .edits import refuse_past_end as refuse_past_end
from .lane_plan import (
    FIRST_POOL as FIRST_POOL,
    LANES_VERSION as LANES_VERSION,
    check_lane_world as check_lane_world,
    check_lanes as check_lanes,
    choose_default_lanes as choose_default_lanes,
    compute_lane_pool_size as compute_lane_pool_size,
    describe_all_too_long as describe_all_too_long,
    list_rank_lanes as list_rank_lanes,
    make_no_sequence_error as make_no_sequence_error,
    pack_lane_pool as pack_lane_pool,
    refuse_lane_order as refuse_lane_order,
)
from .plan_states import check_state as check_state, list_differences as list_differences
from .rank_slices import (
    DATA_PARALLEL as DATA_PARALLEL,
    Costs as Costs,
    Imbalance as Imbalance,
    RankPlacement as RankPlacement,
    RowPart as RowPart,
    UnevenPolicy as UnevenPolicy,
    count_rank_rows as count_rank_rows,
    deal_in_order as deal_in_order,
    find_lane_part as find_lane_part,
    list_divisors as list_divisors,
    sort_by_cost as sort_by_cost,
)
from .source_order import SourceCut as SourceCut, SourceOrder as SourceOrder
from .source_orders import SourceOrders as SourceOrders
from .source_shares import SOURCE as SOURCE
