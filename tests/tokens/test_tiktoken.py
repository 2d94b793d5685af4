"""Agreement of OpenAI's encodings with tiktoken's ``encode_ordinary``."""

import hashlib
import itertools
import random

import numpy as np
import pytest
import tiktoken
import tiktoken_ext.openai_public as published

from batchloom import TokenizerError
from batchloom.tokens import resolve_tokenizer, verify_engine
from batchloom.tokens.engine_conformance import make_conformance_texts
from batchloom.tokens.local_tokenizers import TokenizerHints, make_json_tokenizer
from batchloom.tokens.tokenizer_lookup import TIKTOKEN_ENCODINGS, convert_ranks_to_json
from tiers import examples

from .conftest import encode_text

URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


@pytest.fixture(scope="module")
def ranks_tokenizer(r50k_file, tmp_path_factory):
    """Tokenizer of r50k's ranks, whose lines end as on Windows."""
    path = tmp_path_factory.mktemp("windows") / r50k_file.name
    path.write_bytes(r50k_file.read_bytes().replace(b"\n", b"\r\n"))
    return resolve_tokenizer(f"tiktoken:{path}")


def make_hard_texts(ranks):
    """Make the conformance set and texts that merge in many ways."""
    rng = random.Random(7)
    tokens = list(ranks)
    byte_strings = [b"".join(rng.choices(tokens, k=rng.randrange(1, 12))) for _ in range(examples(3000))]
    letters = ["".join(rng.choices("abcde", k=rng.randrange(1, 40))) for _ in range(examples(1000))]
    spaces = ["".join(rng.choices(" \n\r\t\u3000a/1'", k=rng.randrange(1, 12))) for _ in range(examples(3000))]
    texts = [text.decode(errors="ignore") for text in byte_strings]
    return [*make_conformance_texts(["<|endoftext|>"]), *texts, *letters, *spaces]


def find_differing_texts(tokenizer, oracle, texts):
    ids, offsets = tokenizer.encode_batch(texts)
    ranges = itertools.pairwise(offsets)
    return [
        text
        for text, (start, stop) in zip(texts, ranges, strict=True)
        if ids[start:stop].tolist() != oracle.encode_ordinary(text)
    ]


def test_a_ranks_file(ranks_tokenizer, gpt2):
    assert (ranks_tokenizer.name, ranks_tokenizer.vocab_size, ranks_tokenizer.end_id) == (
        "tiktoken:r50k_base",
        50257,
        50256,
    )
    assert encode_text(ranks_tokenizer, "Hello world") == [15496, 995]
    assert ranks_tokenizer.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    assert ranks_tokenizer.vocabulary_hash == gpt2.vocabulary_hash


@pytest.mark.slow
def test_merges_are_the_published_ones(ranks_tokenizer, gpt2):
    merges = ranks_tokenizer.state()["tokenizer"]["model"]["merges"]
    assert merges == gpt2.state()["tokenizer"]["model"]["merges"]


# r50k's first ranks replace those of each encoding, and its control tokens follow them: the test compares patterns and
# control tokens.
@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_ids_are_tiktoken_s(first_ranks, name, monkeypatch):
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_args, **_kwargs: first_ranks)
    encoding = getattr(published, name)()
    encoding.pop("explicit_n_vocab", None)
    encoding_definition = TIKTOKEN_ENCODINGS[name]
    assert dict(encoding_definition.control) == encoding["special_tokens"]
    control = {token: len(first_ranks) + number for number, token in enumerate(encoding["special_tokens"])}
    oracle = tiktoken.Encoding(**encoding | {"special_tokens": control})
    raw = convert_ranks_to_json(first_ranks, encoding_definition.pattern, control)
    tokenizer = verify_engine(make_json_tokenizer(name, raw, TokenizerHints(), None), [])
    assert tokenizer.vocab_size == oracle.n_vocab
    assert tokenizer.engine.name == "fastokens"
    assert find_differing_texts(tokenizer, oracle, make_hard_texts(first_ranks)) == []


def test_gaps_between_ids_are_never_produced(first_ranks):
    encoding_definition = TIKTOKEN_ENCODINGS["cl100k_base"]
    assert encoding_definition.control["<|endoftext|>"] == 100257
    # As far apart as in cl100k, and nearer to the ranks.
    control = {token: number - 97000 for token, number in encoding_definition.control.items()}
    raw = convert_ranks_to_json(first_ranks, encoding_definition.pattern, control)
    tokenizer = make_json_tokenizer("x", raw, TokenizerHints(), None)
    assert tokenizer.end_id == 3257
    assert tokenizer.bos_id is None
    ids = encode_text(tokenizer, "<|endofprompt|> unused 3000 <|fim_prefix|>")
    assert max(ids) < len(first_ranks)
    assert tokenizer.decode([3000]) == " unused 3000"
    assert tokenizer.decode([3276]) == "<|endofprompt|>"


def test_a_name_comes_from_tiktoken_s_cache(r50k_file, tmp_path, monkeypatch, no_network, ranks_tokenizer):
    (tmp_path / hashlib.sha1(URL.encode()).hexdigest()).write_bytes(r50k_file.read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    tokenizer = resolve_tokenizer("tiktoken:gpt2")
    assert tokenizer.fingerprint == ranks_tokenizer.fingerprint
    assert tokenizer.name == "tiktoken:gpt2"


def test_offline_and_not_cached(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(TokenizerError) as caught:
        resolve_tokenizer("tiktoken:cl100k_base")
    assert "not in tiktoken's cache and cannot be downloaded" in str(caught.value)
    assert "TIKTOKEN_CACHE_DIR" in str(caught.value)
    assert "tiktoken:path/to/cl100k_base.tiktoken" in str(caught.value)


def test_a_file_that_is_not_the_published_one_is_refused(r50k_file, tmp_path):
    lines = r50k_file.read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "r50k_base.tiktoken"
    damaged.write_bytes(b"".join(lines[:-10]))
    with pytest.raises(TokenizerError, match="has 50246 tokens instead of 50256"):
        resolve_tokenizer(f"tiktoken:{damaged}")
    damaged.write_bytes(b"".join([*lines[:100], b"not a rank\n"]))
    with pytest.raises(
        TokenizerError,
        match=r"r50k_base.tiktoken, line 101: b'not a rank' is not a token in base64",
    ):
        resolve_tokenizer(f"tiktoken:{damaged}")
    renamed = tmp_path / "cl100k_base.tiktoken"
    renamed.write_bytes(b"".join(lines))
    with pytest.raises(TokenizerError, match="does not hold the published ranks of cl100k_base"):
        resolve_tokenizer(f"tiktoken:{renamed}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        resolve_tokenizer(f"tiktoken:{tmp_path}/p50k_base.tiktoken")
    with pytest.raises(TokenizerError, match="'mine' is not an encoding"):
        resolve_tokenizer(f"tiktoken:{tmp_path}/mine.tiktoken")


def test_decoding_gives_the_text_back(ranks_tokenizer):
    texts = make_conformance_texts()
    ids, offsets = ranks_tokenizer.encode_batch(texts)
    assert [ranks_tokenizer.decode(ids[a:b]) for a, b in itertools.pairwise(offsets)] == texts
    assert ids.dtype == np.uint32
