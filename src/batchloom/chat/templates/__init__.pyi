from .chat_template import DEFAULT_DATE as DEFAULT_DATE
from .placeholders import Place as Place, Stand as Stand, write_media as write_media
from .rendering import Rendered as Rendered, Renderer as Renderer
from .trained_spans import (
    TRAIN_ON as TRAIN_ON,
    NothingTrainedError as NothingTrainedError,
    Stretch as Stretch,
    TrainOn as TrainOn,
    trained_stretches as trained_stretches,
)
from .turn_grammar import control_pattern as control_pattern
