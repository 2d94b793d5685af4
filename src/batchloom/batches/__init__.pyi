from .assembly.array_filling import IGNORE_INDEX as IGNORE_INDEX
from .assembly.augment import Augment as Augment, add_augment_state as add_augment_state
from .assembly.batch_assembly import (
    BATCH_KEYS as BATCH_KEYS,
    TOKEN_KEYS as TOKEN_KEYS,
    Batch as Batch,
    assemble_rows as assemble_rows,
    assemble_varlen as assemble_varlen,
)
from .assembly.batch_spec import BatchSpec as BatchSpec, MediaOptions as MediaOptions
from .forms import make_megatron_arrays as make_megatron_arrays, to_padded as to_padded, to_varlen as to_varlen
from .isolation import (
    ScoreFunction as ScoreFunction,
    accepts_argument as accepts_argument,
    compute_token_losses as compute_token_losses,
    find_unknown_id as find_unknown_id,
    is_leaking as is_leaking,
    measure_batch_leakage as measure_batch_leakage,
    measure_leakage as measure_leakage,
)
from .loading.combined_store import get_token_reader as get_token_reader
from .loading.document_rows import DocumentRows as DocumentRows
from .loading.loader import Loader as Loader, check_text_only as check_text_only
from .loading.rank_share import (
    RowCosts as RowCosts,
    find_world as find_world,
    make_rank_share as make_rank_share,
    select_rank_rows as select_rank_rows,
)
from .masks import (
    add_block_mask as add_block_mask,
    add_dense_mask as add_dense_mask,
    add_image_masks as add_image_masks,
    add_model_masks as add_model_masks,
    get_sliding_window as get_sliding_window,
)
from .media.media_stores import PairMediaCollator as PairMediaCollator
from .metrics import METRICS as METRICS, Meter as Meter, ModelCost as ModelCost, transformer_cost as transformer_cost
from .mixture_file import (
    STORE_OPTIONS as STORE_OPTIONS,
    open_recorded_data as open_recorded_data,
    read_mixture as read_mixture,
    rebuild_mixture as rebuild_mixture,
)
from .model_calls import allow_model_calls as allow_model_calls
from .probe_documents import select_probe_documents as select_probe_documents
from .shifted_labels import are_next_tokens as are_next_tokens
