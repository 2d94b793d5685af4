from .assembly.augment import Augment as Augment, with_augment as with_augment
from .assembly.batch_assembly import (
    IGNORE as IGNORE,
    Batch as Batch,
    assemble_rows as assemble_rows,
    assemble_varlen as assemble_varlen,
)
from .assembly.batch_spec import (
    BatchOptions as BatchOptions,
    BatchSpec as BatchSpec,
    MediaOptions as MediaOptions,
)
from .forms import flattened as flattened, megatron_arrays as megatron_arrays, padded as padded
from .isolation import (
    leakage as leakage,
    leakage_of_rows as leakage_of_rows,
    leaks as leaks,
    probes as probes,
    takes as takes,
    token_losses as token_losses,
    unknown_id as unknown_id,
)
from .loading.document_rows import Chosen as Chosen
from .loading.loader import Loader as Loader
from .loading.loader_options import PlanOptions as PlanOptions
from .loading.media_rules import text_alone as text_alone
from .loading.rank_share import rank_rows as rank_rows, share_of as share_of
from .loading.row_costs import RowCosts as RowCosts
from .loading.world import find_world as find_world
from .masks import (
    block_mask as block_mask,
    dense_mask as dense_mask,
    image_masks as image_masks,
    own_masks as own_masks,
    sliding_window_of as sliding_window_of,
)
from .metrics import Cost as Cost, Meter as Meter, transformer_cost as transformer_cost
from .mixture_file import mixture_from as mixture_from
