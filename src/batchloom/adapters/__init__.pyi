from .agreement import disagreement as disagreement, require_agreement as require_agreement
from .checkpoints import newest as newest, written_aside as written_aside
from .fsdp2.fsdp2_arguments import FSDP2Arguments as FSDP2Arguments
from .fsdp2.fsdp2_trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
from .hugging_face.hf_metrics import FiguresCallback as FiguresCallback
from .hugging_face.hf_parts import (
    TokenLoss as TokenLoss,
    row_losses as row_losses,
    token_loss as token_loss,
)
from .isolation_check import refuse_leak as refuse_leak
