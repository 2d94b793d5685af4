from .hf_metrics import MetricsCallback as MetricsCallback
from .hf_parts import (
    TokenLoss as TokenLoss,
    compute_row_losses as compute_row_losses,
    compute_token_loss as compute_token_loss,
)
from .trainer_objects import TrainerParts as TrainerParts, make_trainer_parts as make_trainer_parts
