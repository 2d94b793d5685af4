from .chat_rules import ChatRules as ChatRules
from .dataset_config import (
    FORM_OF as FORM_OF,
    MULTIMODAL as MULTIMODAL,
    DatasetConfig as DatasetConfig,
    DatasetEntry as DatasetEntry,
    DatasetType as DatasetType,
)
from .dataset_file import MANIFEST_KEYS as MANIFEST_KEYS, Written as Written
from .dedup_recipe import DedupRecipe as DedupRecipe
from .evaluation_sets import (
    refuse_changed as refuse_changed,
    steps_with_index as steps_with_index,
    with_index as with_index,
)
from .fim_recipe import Fim as Fim, fim_of as fim_of, fim_plain as fim_plain
from .media_recipe import (
    MediaRecipe as MediaRecipe,
    fingerprint_of as fingerprint_of,
    media_of as media_of,
    media_settings as media_settings,
)
from .overlong_policy import (
    Overlong as Overlong,
    OverlongError as OverlongError,
    cut as cut,
    fit_turns as fit_turns,
)
from .processor_lookup import processor_folder as processor_folder
from .read_recipe import (
    ReadRecipe as ReadRecipe,
    SourceRecipe as SourceRecipe,
    weights_note as weights_note,
)
from .recipe import (
    SHARD_DOCUMENTS as SHARD_DOCUMENTS,
    ChatRecipe as ChatRecipe,
    Dtype as Dtype,
    Recipe as Recipe,
    allowed_bad as allowed_bad,
    flat_settings as flat_settings,
    is_path as is_path,
    make_inputs as make_inputs,
    recipe_differences as recipe_differences,
    recipe_fingerprint as recipe_fingerprint,
    recipe_plain as recipe_plain,
)
from .recipe_values import (
    SIZE as SIZE,
    dedup_of as dedup_of,
    dedup_plain as dedup_plain,
    parse_names as parse_names,
    size_of as size_of,
    size_text as size_text,
    steps_of as steps_of,
    steps_plain as steps_plain,
    tokens_of as tokens_of,
)
