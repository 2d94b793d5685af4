from .clean_recipe import (
    clean_steps_to_settings as clean_steps_to_settings,
)
from .dataset_config import DatasetEntry as DatasetEntry, ProcessorConfig as ProcessorConfig
from .media_recipe import (
    parse_media as parse_media,
)
from .read_recipe import (
    SourceRecipe as SourceRecipe,
    describe_unused_weights as describe_unused_weights,
    fim_to_plain as fim_to_plain,
    parse_fim as parse_fim,
)
from .recipe import (
    OverlongPolicy as OverlongPolicy,
    check_option_names as check_option_names,
    count_allowed_bad as count_allowed_bad,
    dedup_to_plain as dedup_to_plain,
    flatten_settings as flatten_settings,
    format_token_count as format_token_count,
    is_valid_path as is_valid_path,
    parse_token_count as parse_token_count,
)
from .run_settings import (
    UNIT_BYTES as UNIT_BYTES,
    make_run_settings as make_run_settings,
)
