from .engine_conformance import (
    apply_engine as apply_engine,
    verify_control_tokens as verify_control_tokens,
    verify_engine as verify_engine,
)
from .json_tokenizer import parse_train_spec as parse_train_spec, train_tokenizer as train_tokenizer
from .local_tokenizers import (
    END_BY_CONFIG as END_BY_CONFIG,
    encode_state as encode_state,
    read_sidecar_hints as read_sidecar_hints,
    restore_tokenizer as restore_tokenizer,
)
from .tokenizer import (
    END_OF_TEXT as END_OF_TEXT,
    EncodingEngine as EncodingEngine,
    Tokenizer as Tokenizer,
    UnknownTokenizer as UnknownTokenizer,
)
from .tokenizer_lookup import (
    HUB_ID_PATTERN as HUB_ID_PATTERN,
    RepositoryFiles as RepositoryFiles,
    fetch_hub_folder as fetch_hub_folder,
    resolve_tokenizer as resolve_tokenizer,
)
