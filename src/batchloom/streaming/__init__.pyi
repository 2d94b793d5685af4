from .rank_feed import FeedSettings as FeedSettings, RankFeed as RankFeed
from .raw_stream import (
    Stream as Stream,
    StreamSettings as StreamSettings,
    stream as stream,
)
from .stream_state import merge_states as merge_states
