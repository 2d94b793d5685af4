from .hf_metrics import FiguresCallback as FiguresCallback
from .hf_parts import TokenLoss as TokenLoss, row_losses as row_losses, token_loss as token_loss
from .trainer_objects import TrainerParts as TrainerParts, trainer_parts as trainer_parts
