from .chat_template import DEFAULT_DATE as DEFAULT_DATE
from .placeholders import PlaceholderFormat as PlaceholderFormat, PlaceholderSpan as PlaceholderSpan
from .rendering import (
    CharacterSpan as CharacterSpan,
    ConversationRenderer as ConversationRenderer,
    ConversationText as ConversationText,
    expand_placeholders as expand_placeholders,
)
from .trained_spans import (
    NothingTrainedError as NothingTrainedError,
    TrainOnEos as TrainOnEos,
    WeightedSpan as WeightedSpan,
    compute_trained_spans as compute_trained_spans,
    compute_weighted_spans as compute_weighted_spans,
    find_train_on_problem as find_train_on_problem,
)
from .turn_positions import make_control_pattern as make_control_pattern
