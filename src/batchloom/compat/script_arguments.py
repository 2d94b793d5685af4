"""Arguments that the classes of scripts share: tokenizer and output."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from batchloom.batches.assembly import require_torch, to_torch
from batchloom.core.errors import TokenizerError
from batchloom.core.settings import quote_value, raise_problems, suggest
from batchloom.tokens import Tokenizer, resolve_tokenizer

OUTPUTS = ("torch", "numpy")


def check_output(output: str) -> None:
    """Raise SettingsError for an unknown output, MissingDependencyError without torch."""
    if output not in OUTPUTS:
        hint = suggest(str(output), OUTPUTS)
        raise_problems([f"output: {quote_value(output)} is not one of {', '.join(OUTPUTS)}{hint}"])
    if output == "torch":
        require_torch()


def as_asked(arrays: dict[str, Any], output: str) -> dict[str, Any]:
    """Return int64 arrays and float32 weights, as tensors if ``output`` is ``torch``."""
    plain = {
        name: np.asarray(values, np.float32 if name == "loss_weights" else np.int64) for name, values in arrays.items()
    }
    return to_torch(plain) if output == "torch" else plain


def tokenizer_of(script_tokenizer: Any) -> Tokenizer:
    """Return the batchloom tokenizer of a script's tokenizer.

    Args:
        script_tokenizer: a name or a path as ``batchloom prepare --tokenizer`` takes it; a fast tokenizer of
            transformers (with a tokenizer.json), of tokenizers or of tiktoken; or one
            of batchloom, such as ``store.tokenizer``.

    Raises:
        TokenizerError: the type is unknown, or the tokenizer cannot be read or trusted.
    """
    if isinstance(script_tokenizer, str | os.PathLike):
        return resolve_tokenizer(os.fspath(script_tokenizer))
    if hasattr(script_tokenizer, "encode_batch") and hasattr(script_tokenizer, "fingerprint"):
        tokenizer: Tokenizer = script_tokenizer
        return tokenizer
    if type(script_tokenizer).__module__.startswith("tiktoken"):
        return _resolve_encoding(script_tokenizer)
    name = Path(str(getattr(script_tokenizer, "name_or_path", ""))).name or "tokenizer"
    with tempfile.TemporaryDirectory(prefix="batchloom-") as folder:
        home = Path(folder) / name
        home.mkdir()
        if hasattr(script_tokenizer, "save_pretrained"):
            script_tokenizer.save_pretrained(home)
        elif hasattr(script_tokenizer, "to_str"):
            (home / "tokenizer.json").write_text(script_tokenizer.to_str(), "utf-8")
        else:
            raise TokenizerError(
                f"tokenizer {quote_value(script_tokenizer)} is unknown: give a name or a path as for batchloom "
                "prepare --tokenizer, or a tokenizer of transformers, tokenizers or tiktoken"
            )
        return resolve_tokenizer(str(home))


def _resolve_encoding(encoding: Any) -> Tokenizer:
    spec = encoding.name if encoding.name == "gpt2" else f"tiktoken:{encoding.name}"
    tokenizer = resolve_tokenizer(spec)
    if tokenizer.vocab_size != encoding.n_vocab:
        raise TokenizerError(
            f"the given encoding {encoding.name!r} has {encoding.n_vocab:,} ids, and {spec} has "
            f"{tokenizer.vocab_size:,}: they differ; save yours as a tokenizer.json, and give the path"
        )
    return tokenizer
