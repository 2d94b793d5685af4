from .bpe_training import parse_train_spec as parse_train_spec, train_tokenizer as train_tokenizer
from .engine_conformance import (
    EngineChoice as EngineChoice,
    engine_choice as engine_choice,
    on_engine as on_engine,
    verify_control as verify_control,
    verify_engine as verify_engine,
)
from .hub_tokenizers import Wanted as Wanted, hub_folder as hub_folder
from .local_tokenizers import read_beside as read_beside
from .tokenizer import Engine as Engine, Tokenizer as Tokenizer
from .tokenizer_lookup import HUB_ID as HUB_ID, resolve_tokenizer as resolve_tokenizer
from .tokenizer_state import tokenizer_from_state as tokenizer_from_state
from .unknown_tokenizer import NoTokenizer as NoTokenizer
