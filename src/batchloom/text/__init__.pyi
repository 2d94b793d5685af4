from .cleaner import Cleaner as Cleaner, StepCounts as StepCounts
from .decontamination.overlap import Decontaminate as Decontaminate
from .english_words import sentences as sentences, words as words
from .language import language_of as language_of
from .normalization import normalize as normalize
from .quality.c4 import C4 as C4
from .quality.fineweb import FineWeb as FineWeb
from .quality.gopher import Gopher as Gopher
from .quality.repetition import Repetition as Repetition
from .registry import (
    STEPS as STEPS,
    clean_problems as clean_problems,
    filled as filled,
    make_clean as make_clean,
    packages as packages,
    parse_steps as parse_steps,
    settings_of as settings_of,
)
from .steps import CleanStep as CleanStep, Drop as Drop
