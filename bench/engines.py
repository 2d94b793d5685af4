"""Speed of the fast engine of a tokenizer against HF tokenizers, in one process and on one core.

    python bench/engines.py [TOKENIZER ...] [--end-token TOKEN] [--mb 20] [--texts FOLDER | --corpus]

A TOKENIZER is what `batchloom prepare --tokenizer` accepts. Without one, a Unigram and a WordPiece are trained on a part
of the texts. These are the files of a folder, or with --corpus those of bench/real_corpus.py. Speeds are by processor time, the engines take turns at batches, and
all ids are compared. Memory is that of the process, before and after the fast engine is loaded and has encoded.
"""

import argparse
import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path

# Before tokenizers reads it.
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
import psutil
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchloom.tokens import resolve_tokenizer
from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.local_tokenizers import TokenizerHints, make_json_tokenizer
from clean import pieces, texts_of
from real_corpus import cache_folder, write_corpus

METASPACE = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
# Documents per batch, about as many as `prepare` encodes at once.
BATCH = 128


def train(name: str, texts: list[str]) -> JsonTokenizer:
    common = {"vocab_size": 16_000, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    if name == "Unigram":
        trained, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **common)
        trained.normalizer, trained.pre_tokenizer = normalizers.NFKC(), METASPACE
    else:
        trained, trainer = Tokenizer(models.WordPiece(unk_token="<unk>")), trainers.WordPieceTrainer(**common)
        trained.normalizer, trained.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trained.train_from_iterator((line for text in texts for line in text.splitlines()), trainer)
    return make_json_tokenizer(name, json.loads(trained.to_str()), TokenizerHints(), None)


def read_corpus(megabytes: float) -> list[str]:
    """Return documents of 2,000 characters, as bench/chain.py prepares them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        write_corpus(path, megabytes, 2000, cache_folder())
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]


def read_memory() -> float:
    return psutil.Process().memory_info().rss / (1 << 20)


def compare(tokenizer: JsonTokenizer, texts: list[str]) -> None:
    before = read_memory()
    engine = tokenizer.engine
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    tokenizer.encode_batch(batches[0])
    loaded = read_memory()
    seconds, differing = [0.0, 0.0], 0
    for batch in batches:
        times = [time.process_time()]
        fast_ids, fast_offsets = tokenizer.encode_batch(batch)
        times.append(time.process_time())
        ids, offsets = tokenizer.encode_exactly(batch)
        times.append(time.process_time())
        seconds = [total + stop - start for total, start, stop in zip(seconds, times, times[1:], strict=False)]
        differing += not (np.array_equal(ids, fast_ids) and np.array_equal(offsets, fast_offsets))
    size = sum(len(text.encode()) for text in texts) / 1e6
    fast, exact = (size / total for total in seconds)
    print(
        f"{tokenizer.name:18} {size:6.1f} MB  {engine.name} {fast:6.1f} MB/s, tokenizers {exact:5.2f}, "
        f"{fast / exact:4.1f}x, {differing} of {len(batches)} batches differ, "
        f"memory {before:.0f} MiB, {loaded:.0f} with the engine"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizers", nargs="*")
    parser.add_argument("--end-token")
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--texts", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--corpus", action="store_true")
    asked = parser.parse_args()
    if asked.corpus:
        texts = read_corpus(asked.mb)
    else:
        paths = [path for path in asked.texts.rglob("*") if path.suffix in (".py", ".txt", ".rst", ".gz")]
        texts = pieces(texts_of(paths, asked.mb))
    if not asked.tokenizers:
        for name in ("Unigram", "WordPiece"):
            compare(train(name, texts[::20]), texts)
    for spec in asked.tokenizers:
        tokenizer = resolve_tokenizer(spec, end_token=asked.end_token)
        assert isinstance(tokenizer, JsonTokenizer), spec
        compare(tokenizer, texts)


if __name__ == "__main__":
    main()
