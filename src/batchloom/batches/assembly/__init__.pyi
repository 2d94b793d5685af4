from .augment import (
    Augment as Augment,
    Augmentation as Augmentation,
    TokenizerSource as TokenizerSource,
    add_augment_state as add_augment_state,
    make_augmentation as make_augmentation,
    remove_augment_state as remove_augment_state,
)
from .augmentation import augment_batch as augment_batch
from .batch_assembly import (
    IGNORE_INDEX as IGNORE_INDEX,
    Batch as Batch,
    BatchLayout as BatchLayout,
    Ids as Ids,
    MediaOffsets as MediaOffsets,
    MediaOffsetsByName as MediaOffsetsByName,
    TokenReader as TokenReader,
    assemble_rows as assemble_rows,
    assemble_varlen as assemble_varlen,
)
from .batch_spec import (
    DEFAULT_BATCH_OPTIONS as DEFAULT_BATCH_OPTIONS,
    DEFAULT_MEDIA_SPEC as DEFAULT_MEDIA_SPEC,
    BatchOptions as BatchOptions,
    BatchSpec as BatchSpec,
    Form as Form,
    Labels as Labels,
    MediaOptions as MediaOptions,
    Output as Output,
)
from .device import (
    StagedBatch as StagedBatch,
    make_stager as make_stager,
    require_torch as require_torch,
    to_torch as to_torch,
)
