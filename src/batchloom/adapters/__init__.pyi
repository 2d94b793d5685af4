from .agreement import find_disagreement as find_disagreement, require_agreement as require_agreement
from .checkpoints import find_newest_checkpoint as find_newest_checkpoint, writing_checkpoint as writing_checkpoint
from .fsdp2.fsdp2_arguments import FSDP2Arguments as FSDP2Arguments
from .fsdp2.fsdp2_trainer import FSDP2SFTTrainer as FSDP2SFTTrainer
from .hugging_face.trainer_objects import (
    MetricsCallback as MetricsCallback,
    TokenLoss as TokenLoss,
    compute_row_losses as compute_row_losses,
    compute_token_loss as compute_token_loss,
)
from .isolation_check import check_no_leak as check_no_leak
from .weighted_loss import (
    apply_loss_weights as apply_loss_weights,
    compute_loss as compute_loss,
    sum_next_token_losses as sum_next_token_losses,
    sum_token_losses as sum_token_losses,
)
