from .lane_order import (
    FIRST_POOL as FIRST_POOL,
    LANES_VERSION as LANES_VERSION,
    check_lane_world as check_lane_world,
    check_lanes as check_lanes,
    choose_default_lanes as choose_default_lanes,
    choose_lane_pool_size as choose_lane_pool_size,
    compute_lane_pool_size as compute_lane_pool_size,
    describe_all_too_long as describe_all_too_long,
    list_rank_lanes as list_rank_lanes,
    make_no_sequence_error as make_no_sequence_error,
    order_lane_ranges as order_lane_ranges,
    pack_lane_pool as pack_lane_pool,
)
from .rank_feed import FeedSettings as FeedSettings, RankFeed as RankFeed
from .raw_stream import (
    Stream as Stream,
    StreamSettings as StreamSettings,
    merge_states as merge_states,
    stream as stream,
)
