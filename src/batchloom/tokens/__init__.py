"""Tokenizers: text to ids and back, whoever made them, with a fingerprint of what decides ids."""

from batchloom.tokens.conformance import (
    EngineChoice,
    engine_choice,
    on_engine,
    verify_control,
    verify_engine,
)
from batchloom.tokens.no_text import NoTokenizer
from batchloom.tokens.resolve import resolve_tokenizer
from batchloom.tokens.seam import Engine, Tokenizer
from batchloom.tokens.state import tokenizer_from_state
from batchloom.tokens.training import parse_train_spec, train_tokenizer

__all__ = [
    "Engine",
    "EngineChoice",
    "NoTokenizer",
    "Tokenizer",
    "engine_choice",
    "on_engine",
    "parse_train_spec",
    "resolve_tokenizer",
    "tokenizer_from_state",
    "train_tokenizer",
    "verify_control",
    "verify_engine",
]
