from .processors import get_processor_state as get_processor_state, open_job_processor as open_job_processor
from .recipe_identity import list_recipe_differences as list_recipe_differences
from .step_files import (
    build_overlap_index as build_overlap_index,
    build_step_indexes as build_step_indexes,
    make_cleaner as make_cleaner,
)
