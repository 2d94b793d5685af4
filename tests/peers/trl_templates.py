"""Tokenizers and chat templates of the comparison with TRL."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from chat.conversations import CHATML
from peers.cases import Case
from peers.gpt2_folder import write_gpt2_folder

_REAL_TOKENIZERS = os.environ.get("BATCHLOOM_REAL_TOKENIZERS")


@dataclass(frozen=True)
class TemplateChoice:
    """A tokenizer with its template.

    Attributes:
        template: a text, or the name of one of TRL's template files.
        eos: end token of the configuration; unused with a ``source``.
        bos: first token of the configuration; unused with a ``source``.
        left_out: names of cases begin or end with these words if the template cannot write them.
        source: folder of a published tokenizer, used instead of GPT-2's.
        fast: names of cases begin with these words if the fast tests run them.
    """

    template: str
    eos: str
    bos: str | None = None
    left_out: tuple[str, ...] = ()
    source: Path | None = None
    fast: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write the tokenizer's folder."""
        text = _read_template(self.template) if self.template.endswith(".jinja") else self.template
        if self.source is None:
            return write_gpt2_folder(folder, text, eos=self.eos, bos=self.bos)
        folder.mkdir(parents=True)
        shutil.copy(self.source / "tokenizer.json", folder)
        config = json.loads((self.source / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))
        return folder

    def holds(self, case: Case) -> bool:
        """Return whether the template writes the records of a case."""
        return not (case.name.startswith(self.left_out) or case.name.endswith(self.left_out))

    def is_fast(self, case: Case) -> bool:
        """Return whether the fast tests run a case with this template."""
        return case.name.startswith(self.fast)

    def get_settings(self, case: Case) -> dict[str, Any]:
        """Return the settings of batchloom that this tokenizer needs for a case."""
        return {"end_token": "config"} if self._ends_otherwise(case) else {}

    def _ends_otherwise(self, case: Case) -> bool:
        """Return whether TRL ends texts with another token than batchloom's default."""
        return case.name.startswith("standard") and self.eos != "<|endoftext|>"


def _read_template(name: str) -> str:
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("trl is not installed: pip install trl")
    return Path(spec.submodule_search_locations[0], "chat_templates", name).read_text(encoding="utf-8")


TOOLS, ASSISTANT_ONLY = "toolcall", "assistant_only_loss"
_OF_TOKEN = {
    "<|im_start|>": TemplateChoice("qwen3_training.jinja", "<|im_end|>"),
    "<|start_header_id|>": TemplateChoice("llama3_training.jinja", "<|eot_id|>", left_out=(TOOLS,)),
}


def _find_published() -> dict[str, TemplateChoice]:
    """Return the published tokenizers for which TRL has a training template."""
    choices: dict[str, TemplateChoice] = {}
    if not _REAL_TOKENIZERS:
        return choices
    for path in sorted(Path(_REAL_TOKENIZERS).rglob("tokenizer.json")):
        config = (path.parent / "tokenizer_config.json").read_text()
        for token, choice in _OF_TOKEN.items():
            if token in config:
                name = f"{path.parent.relative_to(_REAL_TOKENIZERS)} with {choice.template}"
                choices[name] = replace(choice, source=path.parent)
    return choices


TEMPLATES = {
    # The fast tests run most cases with one template, and with others those that are written differently.
    "qwen3_training": TemplateChoice(
        "qwen3_training.jinja", "<|im_end|>", fast=("standard", "conversation", "toolcall language_modeling")
    ),
    "chatml": TemplateChoice(
        CHATML,
        "<|endoftext|>",
        left_out=(TOOLS,),
        fast=("standard_language", "standard_prompt_completion", "conversational_preference"),
    ),
    "gptoss_training": TemplateChoice(
        "gptoss_training.jinja", "<|return|>", fast=("harmony", "toolcall language_modeling, assistant_only_loss")
    ),
    "qwen2_5_training": TemplateChoice("qwen2_5_training.jinja", "<|im_end|>"),
    "llama3_training": TemplateChoice("llama3_training.jinja", "<|eot_id|>", "<|begin_of_text|>", left_out=(TOOLS,)),
    "llama3_1": TemplateChoice("llama3_1.jinja", "<|eot_id|>", "<|begin_of_text|>", left_out=(ASSISTANT_ONLY,)),
    **_find_published(),
}
