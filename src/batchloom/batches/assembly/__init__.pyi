from .array_filling import find_kernel as find_kernel, get_kernel as get_kernel
from .augment import remove_augment_state as remove_augment_state
from .batch_assembly import (
    BATCH_KEYS as BATCH_KEYS,
    ArrayName as ArrayName,
    BatchLayout as BatchLayout,
    MediaOffsets as MediaOffsets,
    assemble_varlen as assemble_varlen,
)
from .batch_spec import (
    DEFAULT_MEDIA_SPEC as DEFAULT_MEDIA_SPEC,
    Labels as Labels,
)
from .device import require_torch as require_torch, to_torch as to_torch
