"""Speed of Unigram and WordPiece tokenizers on one core, against HF tokenizers.

    python bench/word_encoding.py [--mb 20] [--texts FOLDER]

The tokenizers are trained on a part of the texts, those of bench/clean.py. HF tokenizers encodes a fifth of
the texts. Speeds are by processor time, and ids are compared.
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

# Before tokenizers reads it.
os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchloom.tokens.json_tokenizer import JsonTokenizer
from batchloom.tokens.local_tokenizers import TokenizerHints, make_json_tokenizer
from clean import pieces, texts_of

METASPACE = pre_tokenizers.Metaspace(prepend_scheme="always")
FAMILIES = {
    "T5 (Unigram)": (
        models.Unigram,
        normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        METASPACE,
    ),
    "XLM-R (Unigram)": (
        models.Unigram,
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE]),
    ),
    "BERT (WordPiece)": (models.WordPiece, normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
}


def train(family: str, texts: list[str]) -> JsonTokenizer:
    model, normalizer, pre_tokenizer = FAMILIES[family]
    trained = Tokenizer(model(unk_token="<unk>") if model is models.WordPiece else model())
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizer
    common = {"vocab_size": 16_000, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    unigram = model is models.Unigram
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **common) if unigram else trainers.WordPieceTrainer(**common)
    trained.train_from_iterator((line for text in texts for line in text.splitlines()), trainer)
    return make_json_tokenizer(family, json.loads(trained.to_str()), TokenizerHints(), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--texts", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    asked = parser.parse_args()
    paths = [path for path in asked.texts.rglob("*") if path.suffix in (".py", ".txt", ".rst", ".gz")]
    texts = pieces(texts_of(paths, asked.mb))
    for family in FAMILIES:
        tokenizer = train(family, texts[::20])
        size = sum(len(text.encode()) for text in texts) / 1e6
        begin = time.process_time()
        batches = [tokenizer.encode_batch(texts[start : start + 500])[0] for start in range(0, len(texts), 500)]
        fast = size / (time.process_time() - begin)
        sample = texts[: len(texts) // 5]
        size = sum(len(text.encode()) for text in sample) / 1e6
        begin = time.process_time()
        exact, _ = tokenizer.encode_exactly(sample)
        slow = size / (time.process_time() - begin)
        assert np.array_equal(np.concatenate(batches)[: len(exact)], exact)
        print(f"{family:18} {fast:6.1f} MB/s, HF tokenizers {slow:5.2f}, {fast / slow:4.1f}x, equal ids")


if __name__ == "__main__":
    main()
