from .fsdp2_arguments import FSDP2Arguments as FSDP2Arguments
from .fsdp2_state import (
    begin_async_save as begin_async_save,
    load_fsdp2 as load_fsdp2,
    load_newest_fsdp2 as load_newest_fsdp2,
    save_fsdp2 as save_fsdp2,
    shard_model as shard_model,
)
from .fsdp2_trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
