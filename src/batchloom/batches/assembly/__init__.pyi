from .augment import (
    Augment as Augment,
    Augmentation as Augmentation,
    Vocabulary as Vocabulary,
    make_augmentation as make_augmentation,
    with_augment as with_augment,
    without_augment as without_augment,
)
from .augmentation import augment_batch as augment_batch
from .batch_assembly import (
    IGNORE as IGNORE,
    Batch as Batch,
    BatchCuts as BatchCuts,
    Ids as Ids,
    MediaCut as MediaCut,
    MediaCuts as MediaCuts,
    Reader as Reader,
    assemble_rows as assemble_rows,
    assemble_varlen as assemble_varlen,
)
from .batch_spec import (
    DEFAULT_BATCH_OPTIONS as DEFAULT_BATCH_OPTIONS,
    READ_AS_USUAL as READ_AS_USUAL,
    BatchOptions as BatchOptions,
    BatchSpec as BatchSpec,
    Form as Form,
    Labels as Labels,
    MediaOptions as MediaOptions,
    Output as Output,
)
from .device import (
    Staged as Staged,
    require_torch as require_torch,
    stage_of as stage_of,
    to_torch as to_torch,
)
