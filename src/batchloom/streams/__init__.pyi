from .feed import Feed as Feed, Share as Share
from .state import merge_states as merge_states
from .stream import Order as Order, Stream as Stream, StreamSettings as StreamSettings
