from .rank_feed import FeedSettings as FeedSettings, RankFeed as RankFeed
from .raw_stream import (
    Stream as Stream,
    StreamSettings as StreamSettings,
    merge_states as merge_states,
    stream as stream,
)
