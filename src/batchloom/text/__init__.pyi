from .c4 import C4 as C4
from .cleaner import Cleaner as Cleaner, StepCounts as StepCounts
from .fineweb import FineWeb as FineWeb
from .gopher import Gopher as Gopher
from .language import language_of as language_of
from .normalize import normalize as normalize
from .overlap import Decontaminate as Decontaminate
from .registry import (
    STEPS as STEPS,
    clean_problems as clean_problems,
    make_clean as make_clean,
    parse_steps as parse_steps,
)
from .repetition import Repetition as Repetition
from .steps import CleanStep as CleanStep, Drop as Drop
from .words import sentences as sentences, words as words
