from .conversion.row_conversion import convert as convert
from .documents.chat_encoding import ChatEncoder as ChatEncoder
from .documents.conversation_encoder import encode_conversations as encode_conversations
from .documents.preference_encoder import (
    encode_labels as encode_labels,
    encode_pairs as encode_pairs,
    encode_text_pairs as encode_text_pairs,
)
from .documents.text_sample import sample_texts as sample_texts
from .imports.token_import import import_tokens as import_tokens
from .prepare_job import prepare as prepare, run_chosen as run_chosen, run_recipe as run_recipe
from .report.progress import Note as Note, Progress as Progress
from .report.report import Content as Content, ReportFacts as ReportFacts, read_facts as read_facts
from .request.recipe_choice import choose_recipe as choose_recipe, read_recipe as read_recipe
from .rerun import (
    begin_or_go_on as begin_or_go_on,
    check_apart as check_apart,
    check_folder as check_folder,
    finished_store as finished_store,
    job_facts as job_facts,
)
from .settings.chat_rules import ChatRules as ChatRules
from .settings.dataset_config import DatasetConfig as DatasetConfig
from .settings.dedup_recipe import DedupRecipe as DedupRecipe
from .settings.fim_recipe import Fim as Fim
from .settings.media_recipe import MediaRecipe as MediaRecipe
from .settings.overlong_policy import OverlongError as OverlongError
from .settings.read_recipe import ReadRecipe as ReadRecipe
from .settings.recipe import (
    ChatRecipe as ChatRecipe,
    Recipe as Recipe,
    recipe_fingerprint as recipe_fingerprint,
    recipe_plain as recipe_plain,
)
from .settings.recipe_values import dedup_of as dedup_of, steps_of as steps_of
from .synthetic_run import synthetic_input as synthetic_input
from .units.stopwatch import Spent as Spent
from .units.stream_units import STRETCHES as STRETCHES
from .units.subset_balance import (
    DocumentGroup as DocumentGroup,
    balance_subsets as balance_subsets,
    share_notes as share_notes,
)
from .units.work_folder import WorkFolder as WorkFolder
from .workers.executors import Execution as Execution
from .workers.run_settings import RunSettings as RunSettings
