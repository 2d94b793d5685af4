"""Whatever a script calls its tokenizer, as a tokenizer of ours."""

import os
import tempfile
from pathlib import Path
from typing import Any

from batchloom.core.errors import TokenizerError
from batchloom.core.settings import quote_value
from batchloom.tokens import Tokenizer, resolve_tokenizer


def tokenizer_of(given: Any) -> Tokenizer:
    """The tokenizer that a script means.

    Args:
        given: a name or a path as ``batchloom prepare --tokenizer`` takes it; a tokenizer of
            transformers (a fast one: it has a tokenizer.json), of tokenizers or of tiktoken; or one
            of ours, such as ``store.tokenizer``.

    Raises:
        TokenizerError: it is none of these, or cannot be read or trusted.
    """
    if isinstance(given, str | os.PathLike):
        return resolve_tokenizer(os.fspath(given))
    if hasattr(given, "encode_batch") and hasattr(given, "fingerprint"):
        tokenizer: Tokenizer = given
        return tokenizer
    if type(given).__module__.startswith("tiktoken"):
        return _named_encoding(given)
    name = Path(str(getattr(given, "name_or_path", ""))).name or "tokenizer"
    with tempfile.TemporaryDirectory(prefix="batchloom-") as folder:
        home = Path(folder) / name
        home.mkdir()
        if hasattr(given, "save_pretrained"):
            given.save_pretrained(home)
        elif hasattr(given, "to_str"):
            (home / "tokenizer.json").write_text(given.to_str(), "utf-8")
        else:
            raise TokenizerError(
                f"tokenizer {quote_value(given)} is none that is known: give a name or a path as batchloom prepare "
                "--tokenizer takes it, or a tokenizer of transformers, tokenizers or tiktoken"
            )
        return resolve_tokenizer(str(home))


def _named_encoding(given: Any) -> Tokenizer:
    """The encoding of tiktoken's of the name that the given one has."""
    spec = given.name if given.name == "gpt2" else f"tiktoken:{given.name}"
    tokenizer = resolve_tokenizer(spec)
    if tokenizer.vocab_size != given.n_vocab:
        raise TokenizerError(
            f"the encoding {given.name!r} that was given has {given.n_vocab:,} ids, and {spec} has "
            f"{tokenizer.vocab_size:,}: it is another one; save it as a tokenizer.json, and give the path"
        )
    return tokenizer
