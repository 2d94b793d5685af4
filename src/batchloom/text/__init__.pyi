from .decontamination import (
    DecontaminationSettings as DecontaminationSettings,
    OverlapIndex as OverlapIndex,
    build_index as build_index,
    make_decontamination_step as make_decontamination_step,
)
from .english_words import count_sentences as count_sentences, iter_words as iter_words
from .html import HtmlSettings as HtmlSettings, make_html_step as make_html_step
from .language import detect_language as detect_language
from .normalization import normalize as normalize
from .quality.c4 import C4 as C4
from .quality.fineweb import FineWeb as FineWeb
from .quality.gopher import Gopher as Gopher
from .quality.repetition import Repetition as Repetition
from .registry import (
    KNOWN_STEPS as KNOWN_STEPS,
    StepCounts as StepCounts,
    TextCleaner as TextCleaner,
    fill_step_defaults as fill_step_defaults,
    find_clean_problems as find_clean_problems,
    get_step_packages as get_step_packages,
    make_clean_function as make_clean_function,
    parse_step_settings as parse_step_settings,
)
from .steps import CleanFunction as CleanFunction, CleanStep as CleanStep, DroppedText as DroppedText
