from .assumed_lengths import AssumedStore as AssumedStore
from .edits import refuse_past_end as refuse_past_end
from .plan_states import check_state as check_state, list_differences as list_differences
from .rank_slices import (
    DATA_PARALLEL as DATA_PARALLEL,
    Costs as Costs,
    Imbalance as Imbalance,
    RankPlacement as RankPlacement,
    RowPart as RowPart,
    UnevenPolicy as UnevenPolicy,
    check_rank as check_rank,
    count_rank_rows as count_rank_rows,
    deal_in_order as deal_in_order,
    find_lane_part as find_lane_part,
    format_near_divisors as format_near_divisors,
    list_divisors as list_divisors,
    sort_by_cost as sort_by_cost,
)
from .source_order import SourceCut as SourceCut, SourceOrder as SourceOrder
from .source_orders import SourceOrders as SourceOrders
from .source_shares import SOURCE as SOURCE
