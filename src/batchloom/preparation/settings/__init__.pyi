from .evaluation_sets import build_overlap_index as build_overlap_index, build_step_indexes as build_step_indexes
from .fim_recipe import fim_to_plain as fim_to_plain, parse_fim as parse_fim
from .keyword_options import (
    DocumentOptions as DocumentOptions,
    PrepareOptions as PrepareOptions,
    StreamedOptions as StreamedOptions,
    check_option_names as check_option_names,
)
from .media_recipe import parse_media as parse_media
from .overlong_policy import OverlongPolicy as OverlongPolicy, count_fitting_tokens as count_fitting_tokens
from .read_recipe import SourceRecipe as SourceRecipe, describe_unused_weights as describe_unused_weights
from .recipe import (
    count_allowed_bad as count_allowed_bad,
    is_valid_path as is_valid_path,
    list_recipe_differences as list_recipe_differences,
)
from .recipe_values import (
    SIZE_HINT as SIZE_HINT,
    clean_steps_to_settings as clean_steps_to_settings,
    dedup_to_plain as dedup_to_plain,
    format_token_count as format_token_count,
    parse_names as parse_names,
    parse_token_count as parse_token_count,
)
