from .assemble import (
    IGNORE as IGNORE,
    Batch as Batch,
    assemble_rows as assemble_rows,
    assemble_varlen as assemble_varlen,
)
from .augment import Augment as Augment, with_augment as with_augment
from .chosen import Chosen as Chosen
from .costs import RowCosts as RowCosts
from .forms import flattened as flattened, padded as padded
from .inspect import inspect as inspect
from .isolation import leakage as leakage, leaks as leaks, takes as takes
from .loader import Loader as Loader
from .masks import block_mask as block_mask, dense_mask as dense_mask, image_masks as image_masks
from .media_rules import text_alone as text_alone
from .metrics import Cost as Cost, Meter as Meter, transformer_cost as transformer_cost
from .mixture_file import mixture_from as mixture_from
from .share import rank_rows as rank_rows, share_of as share_of
from .spec import BatchSpec as BatchSpec, MediaSpec as MediaSpec
from .world import find_world as find_world
