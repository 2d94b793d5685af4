"""What LLaMA-Factory makes of records."""

import os
from pathlib import Path
from typing import Any

from peers.cases import Case

PACKAGE = "llamafactory"
_UNTRAINED = -100


def run_case(case: Case, tokenizer_folder: Path) -> list[dict[str, Any]]:
    """Return the rows that its processors make of the records of a case."""
    from transformers import AutoTokenizer

    # It wants other versions of libraries than those that are installed.
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    stage = case.peer.get("stage", "sft")
    if stage == "v1":
        return [_render_v1(record, tokenizer) for record in case.records]
    columns = _process(case, tokenizer, stage)
    if stage == "rm":
        sides = zip(
            *(columns[f"{side}_{kind}"] for side in ("chosen", "rejected") for kind in ("input_ids", "labels")),
            strict=True,
        )
        return [_make_pair(*side) for side in sides]
    rows = zip(columns["input_ids"], columns.get("labels", columns["input_ids"]), strict=True)
    if stage == "kto":
        answers = zip(rows, columns["kto_tags"], strict=True)
        return [{**_split_answer(ids, labels), "label": bool(good)} for (ids, labels), good in answers]
    return [{"input_ids": ids, "labels": labels} for ids, labels in rows]


def _process(case: Case, tokenizer: Any, stage: str) -> dict[str, list[Any]]:
    from llamafactory.data import processor
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import get_dataset_list
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    options = {name: value for name, value in case.peer.items() if name not in ("info", "stage")}
    arguments = DataArguments(cutoff_len=4096, **options)
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    (attributes,) = get_dataset_list(["case"], {"case": {"file_name": "case.json", **case.peer["info"]}})
    convert = get_dataset_converter(attributes.formatting, attributes, arguments)
    columns: dict[str, list[Any]] = {}
    for record in case.records:
        # A table has every column of the entry.
        for name, value in convert({"instruction": None, "input": None, "output": None, **record}).items():
            columns.setdefault(name, []).append(value)
    processor_class = {
        "sft": processor.SupervisedDatasetProcessor,
        "rm": processor.PairwiseDatasetProcessor,
        "kto": processor.FeedbackDatasetProcessor,
        "pt": processor.PretrainDatasetProcessor,
    }[stage]
    return processor_class(template, tokenizer, None, arguments).preprocess_dataset(columns)


def _render_v1(record: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    from llamafactory.v1.core.utils.rendering import Renderer

    rendered = Renderer("chatml", tokenizer).render_messages(record["messages"], record.get("tools"))
    return {name: list(rendered[name]) for name in ("input_ids", "labels", "loss_weights")}


def _make_pair(
    chosen: list[int], chosen_labels: list[int], rejected: list[int], rejected_labels: list[int]
) -> dict[str, Any]:
    good, bad = _split_answer(chosen, chosen_labels), _split_answer(rejected, rejected_labels)
    return {
        "prompt_ids": good["prompt_ids"],
        "chosen_ids": good["completion_ids"],
        "rejected_ids": bad["completion_ids"],
    }


def _split_answer(ids: list[int], labels: list[int]) -> dict[str, list[int]]:
    start = next(number for number, label in enumerate(labels) if label != _UNTRAINED)
    return {"prompt_ids": ids[:start], "completion_ids": ids[start:]}
