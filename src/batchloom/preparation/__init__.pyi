from .conversion.conversion_run import ConversionResult as ConversionResult
from .conversion.row_conversion import convert as convert
from .conversion.row_mapping import coerce_row as coerce_row
from .documents.encode_answers import (
    encode_labelled_answers as encode_labelled_answers,
    encode_preference_pairs as encode_preference_pairs,
    encode_text_pairs as encode_text_pairs,
)
from .documents.encode_chat import ChatEncoder as ChatEncoder, encode_conversations as encode_conversations
from .documents.encoded_batch import OverlongError as OverlongError
from .documents.subsets import (
    DocumentGroup as DocumentGroup,
    balance_subsets as balance_subsets,
    describe_missed_shares as describe_missed_shares,
)
from .documents.tokenizer_choice import sample_texts as sample_texts
from .identity.recipe_identity import (
    compute_recipe_fingerprint as compute_recipe_fingerprint,
    recipe_to_plain as recipe_to_plain,
)
from .imports.import_spec import ImportSpec as ImportSpec, LinkMode as LinkMode
from .imports.token_files import list_import_options as list_import_options
from .imports.token_import import import_tokens as import_tokens, run_import as run_import
from .keywords import (
    DocumentOptions as DocumentOptions,
    PrepareOptions as PrepareOptions,
    StreamedOptions as StreamedOptions,
)
from .output_checks import check_output_folder as check_output_folder, check_separate as check_separate
from .prepare_job import prepare as prepare
from .report.progress import Note as Note, Progress as Progress
from .report.report import (
    PrepareReport as PrepareReport,
    ReportContent as ReportContent,
    ReportedSource as ReportedSource,
    read_report as read_report,
)
from .report.source_texts import read_source_texts as read_source_texts
from .request.recipe_choice import make_request as make_request, read_recipe as read_recipe
from .request_run import run_recipe as run_recipe, run_request as run_request
from .rerun import (
    RequestedJob as RequestedJob,
    begin_or_resume as begin_or_resume,
    make_job_identity as make_job_identity,
)
from .separate_stores import (
    MixtureResult as MixtureResult,
    prepare_mixture as prepare_mixture,
    run_separately as run_separately,
)
from .settings.clean_recipe import parse_clean_steps as parse_clean_steps
from .settings.dataset_config import DatasetConfig as DatasetConfig
from .settings.media_recipe import MediaRecipe as MediaRecipe
from .settings.read_recipe import FimRecipe as FimRecipe, ReadRecipe as ReadRecipe
from .settings.recipe import (
    ChatRecipe as ChatRecipe,
    DedupRecipe as DedupRecipe,
    Recipe as Recipe,
    parse_dedup as parse_dedup,
)
from .settings.run_settings import (
    UNIT_BYTES as UNIT_BYTES,
    ExecutionSettings as ExecutionSettings,
    RunSettings as RunSettings,
)
from .store_upload import UploadResult as UploadResult, upload_store as upload_store
from .synthetic_request import parse_synthetic_input as parse_synthetic_input
from .units.stream_batches import STREAM_BATCHES_FOLDER as STREAM_BATCHES_FOLDER
from .units.unit_report import StageTime as StageTime
from .units.work_folder import WorkFolder as WorkFolder
