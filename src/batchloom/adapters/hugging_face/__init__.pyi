from .trainer_objects import (
    MetricsCallback as MetricsCallback,
    TokenLoss as TokenLoss,
    TrainerParts as TrainerParts,
    compute_row_losses as compute_row_losses,
    compute_token_loss as compute_token_loss,
    make_trainer_parts as make_trainer_parts,
)
