from .rank_feed import Feed as Feed, Share as Share
from .raw_stream import (
    Order as Order,
    Stream as Stream,
    StreamSettings as StreamSettings,
    stream as stream,
)
from .stream_state import merge_states as merge_states
