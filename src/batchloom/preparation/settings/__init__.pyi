from .chat_rules import ChatRules as ChatRules
from .dataset_config import (
    FORM_BY_FORMAT as FORM_BY_FORMAT,
    MULTIMODAL_TYPES as MULTIMODAL_TYPES,
    DatasetConfig as DatasetConfig,
    DatasetEntry as DatasetEntry,
    DatasetType as DatasetType,
)
from .dataset_file import MANIFEST_KEYS as MANIFEST_KEYS, ConfigLocation as ConfigLocation
from .dedup_recipe import DedupRecipe as DedupRecipe
from .evaluation_sets import (
    build_overlap_index as build_overlap_index,
    build_step_indexes as build_step_indexes,
    check_files_unchanged as check_files_unchanged,
)
from .fim_recipe import FimRecipe as FimRecipe, fim_to_plain as fim_to_plain, parse_fim as parse_fim
from .keyword_options import (
    DocumentOptions as DocumentOptions,
    PrepareOptions as PrepareOptions,
    StreamedOptions as StreamedOptions,
    check_option_names as check_option_names,
)
from .media_recipe import (
    MediaRecipe as MediaRecipe,
    compute_processor_fingerprint as compute_processor_fingerprint,
    media_to_settings as media_to_settings,
    parse_media as parse_media,
)
from .overlong_policy import (
    OverlongError as OverlongError,
    OverlongPolicy as OverlongPolicy,
    count_fitting_tokens as count_fitting_tokens,
    split_at_limit as split_at_limit,
)
from .processor_lookup import find_processor_folder as find_processor_folder
from .read_recipe import (
    ReadRecipe as ReadRecipe,
    SourceRecipe as SourceRecipe,
    describe_unused_weights as describe_unused_weights,
)
from .recipe import (
    SHARD_DOCUMENTS as SHARD_DOCUMENTS,
    ChatRecipe as ChatRecipe,
    Dtype as Dtype,
    Recipe as Recipe,
    as_recipe_inputs as as_recipe_inputs,
    compute_recipe_fingerprint as compute_recipe_fingerprint,
    count_allowed_bad as count_allowed_bad,
    flatten_settings as flatten_settings,
    is_valid_path as is_valid_path,
    list_recipe_differences as list_recipe_differences,
    recipe_to_plain as recipe_to_plain,
)
from .recipe_values import (
    SIZE_HINT as SIZE_HINT,
    clean_steps_to_settings as clean_steps_to_settings,
    coerce_token_count as coerce_token_count,
    dedup_to_plain as dedup_to_plain,
    format_token_count as format_token_count,
    parse_clean_steps as parse_clean_steps,
    parse_dedup as parse_dedup,
    parse_names as parse_names,
    parse_token_count as parse_token_count,
)
