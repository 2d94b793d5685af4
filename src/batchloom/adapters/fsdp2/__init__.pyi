from .fsdp2_arguments import FSDP2Arguments as FSDP2Arguments
from .fsdp2_state import (
    begin_save as begin_save,
    load as load,
    load_newest as load_newest,
    save as save,
    shard as shard,
)
from .fsdp2_trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
