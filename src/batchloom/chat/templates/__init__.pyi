from .chat_template import DEFAULT_DATE as DEFAULT_DATE
from .conversation_text import (
    CharacterSpan as CharacterSpan,
    ConversationText as ConversationText,
    expand_placeholders as expand_placeholders,
)
from .marked_checks import OMITTED_REASONING as OMITTED_REASONING
from .media_placeholders import (
    TEXT_PLACEHOLDERS as TEXT_PLACEHOLDERS,
    PlaceholderFormat as PlaceholderFormat,
    PlaceholderSpan as PlaceholderSpan,
)
from .reasoning import (
    ReasoningPolicy as ReasoningPolicy,
    drop_reasoning as drop_reasoning,
    find_thoughts as find_thoughts,
    split_answers as split_answers,
)
from .rendering import (
    ConversationRenderer as ConversationRenderer,
    TextJoiner as TextJoiner,
)
from .template_arguments import (
    TemplateArguments as TemplateArguments,
    find_argument_problems as find_argument_problems,
    format_template_argument as format_template_argument,
    parse_template_arguments as parse_template_arguments,
)
from .tool_arguments import (
    ToolArguments as ToolArguments,
    convert_arguments as convert_arguments,
)
from .tool_formats import (
    write_tools as write_tools,
)
from .trained_spans import (
    NothingTrainedError as NothingTrainedError,
    TrainOnEos as TrainOnEos,
    WeightedSpan as WeightedSpan,
    compute_trained_spans as compute_trained_spans,
    compute_weighted_spans as compute_weighted_spans,
    find_train_on_problem as find_train_on_problem,
    subtract_spans as subtract_spans,
)
from .turn_positions import (
    CONTROL_LIKE as CONTROL_LIKE,
    make_control_pattern as make_control_pattern,
)
