"""What ms-swift makes of records."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers.cases import Case

PACKAGE = "ms-swift"
_UNTRAINED = -100


def run_case(case: Case, tokenizer_folder: Path) -> list[dict[str, Any]]:
    """Return the rows that its template makes of the records of a case."""
    options = dict(case.peer)
    mode = options.pop("mode", "train")
    template = _make_template(tokenizer_folder, options)
    template.set_mode("transformers" if case.objective == "prompts" else mode)
    rows = []
    for record in _preprocess(case.records):
        encoded = template.encode({name: value for name, value in record.items() if value is not None})
        rows.append(_make_row(encoded, case.objective))
    return rows


def _make_template(tokenizer_folder: Path, options: dict[str, Any]) -> Any:
    from swift.template.register import get_template
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    template = options.pop("template")
    # What it knows of the model that the tokenizer belongs to.
    tokenizer.model_info = SimpleNamespace(
        model_dir=str(tokenizer_folder),
        torch_dtype=None,
        max_model_len=4096,
        task_type="causal_lm",
        num_labels=None,
        config=SimpleNamespace(),
    )
    tokenizer.model_meta = SimpleNamespace(
        template=template, is_multimodal=False, additional_saved_files=[], model_type="any", is_reranker=False
    )
    return get_template(tokenizer, template_type=template, **options)


def _preprocess(records: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from swift.dataset.preprocessor.core import AutoPreprocessor

    dataset = Dataset.from_list(records, on_mixed_types="use_json")
    return AutoPreprocessor()(dataset, strict=True, enable_auto_mapping=True, load_from_cache_file=False)


def _make_row(encoded: dict[str, Any], objective: str) -> dict[str, Any]:
    if objective == "pairs":
        good, bad = _split_answer(encoded, "chosen_"), _split_answer(encoded, "rejected_")
        return {
            "prompt_ids": good["prompt_ids"],
            "chosen_ids": good["completion_ids"],
            "rejected_ids": bad["completion_ids"],
        }
    if objective == "labels":
        return {**_split_answer(encoded, "chosen_"), "label": encoded["label"]}
    if objective == "prompts":
        return {"prompt_ids": encoded["input_ids"]}
    row = {name: encoded[name] for name in ("input_ids", "labels")}
    return {**row, "loss_weights": encoded["loss_scale"]} if objective == "weighted" else row


def _split_answer(encoded: dict[str, Any], prefix: str) -> dict[str, list[int]]:
    ids, labels = encoded[f"{prefix}input_ids"], encoded[f"{prefix}labels"]
    start = next(number for number, label in enumerate(labels) if label != _UNTRAINED)
    return {"prompt_ids": ids[:start], "completion_ids": ids[start:]}
