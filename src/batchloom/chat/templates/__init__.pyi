from .chat_template import DEFAULT_DATE as DEFAULT_DATE
from .placeholders import PlaceholderFormat as PlaceholderFormat, PlaceholderSpan as PlaceholderSpan
from .rendering import (
    ConversationRenderer as ConversationRenderer,
    ConversationText as ConversationText,
    expand_placeholders as expand_placeholders,
)
from .trained_spans import (
    CharacterSpan as CharacterSpan,
    NothingTrainedError as NothingTrainedError,
    TrainOn as TrainOn,
    compute_trained_spans as compute_trained_spans,
)
from .turn_positions import make_control_pattern as make_control_pattern
