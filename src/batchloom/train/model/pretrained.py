"""Adapter of a Hugging Face language model to the loop: rows in, summed loss out.

``position_ids`` restart with each document and no mask is passed. From that transformers builds attention inside
each document, if the model and its attention support it. A mask of ones or a cache would silently undo it.
``model_build`` verifies it for a model before training.

Only this module imports transformers, without network access and without custom code.
"""

import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchloom import Store
from batchloom.adapters.weighted_loss import shift_left, sum_token_losses
from batchloom.batches import IGNORE_INDEX, is_leaking
from batchloom.core.errors import InputError, InputMissingError, MissingDependencyError, SettingsError, TrainError
from batchloom.core.files import read_json_object, refuse_url
from batchloom.core.slow_loads import announce_load
from batchloom.streaming import Stream
from batchloom.train.run_data import get_data_name, has_tokenizer
from batchloom.train.train_settings import ModelSettings, PretrainedSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel

# Further model inputs besides tokens and positions, by argument name.
ModelInputs = Mapping[str, Any]
# Maximum number of logits in memory at once: 128 MiB of float32.
_MAX_SCORES = 1 << 25

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILE = "tokenizer.json"
# Files that transformers' AutoTokenizer reads next to tokenizer.json; none of them is code.
_TOKENIZER_FILES = (
    _TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_EDGE_BYTES = 1 << 20
# The store's vocabulary may differ a little from the model's, for example by tokens of a chat template.
_MAX_DIFFERENT_SHARE = 0.05


@final
class PretrainedModel(nn.Module):
    """Model of a folder, in float32 and without dropout."""

    def __init__(self, model: Any, name: str, dtype: str) -> None:
        super().__init__()
        self.model: Any = model
        model.train(mode=False)
        self.name = name
        self._dtype = dtype
        self.vocab_size = _count_embedding_rows(model)
        self.window: int | None = getattr(model.config.get_text_config(), "sliding_window", None)
        body = model.base_model
        self._takes_positions = "position_ids" in inspect.signature(body.forward).parameters
        self._head_is_plain = False

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the model."""
        embedding: nn.Module = self.model.get_input_embeddings()
        return embedding

    @property
    def description(self) -> str:
        """Short description of the model."""
        return f"{type(self.model).__name__} of {self.name}"

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        # transformers exposes no public name for it.
        return self.model.config._attn_implementation or "its own"  # noqa: SLF001

    @property
    def _needs_half_precision(self) -> bool:
        """True if the attention kernels support only half precision."""
        return self.attention.startswith("flash")

    def make_probe_autocast(self, device: torch.device) -> torch.autocast:
        """Return the autocast context of probes: float32 unless that is unsupported."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._needs_half_precision)

    def compile_body(self) -> None:
        """Compile the layers in place; weight names stay unchanged."""
        (self.model.base_model if self._head_is_plain else self.model).compile()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        media: ModelInputs | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of the trained tokens in nats: a float32 scalar.

        ``loss_weights`` [rows, seq_len] weight the loss of each label.
        """
        targets = shift_left(labels, IGNORE_INDEX)
        is_trained = targets != IGNORE_INDEX
        weights = None if loss_weights is None else shift_left(loss_weights, 0)[is_trained]
        if not self._head_is_plain:
            scores = self.logits(input_ids, position_ids, media)[is_trained]
            return sum_token_losses(scores, targets[is_trained], weights)
        hidden = self._call(self.model.base_model, input_ids, position_ids, media)[is_trained]
        return compute_summed_loss(self.model.get_output_embeddings(), hidden, targets[is_trained], weights)

    def logits(self, input_ids: Tensor, position_ids: Tensor, media: ModelInputs | None = None) -> Tensor:
        """Return the logits of every next token, [rows, seq_len, vocab_size]."""
        return self._call(self.model, input_ids, position_ids, media)

    def compute_scores(
        self, input_ids: Tensor, position_ids: Tensor, media: ModelInputs | None = None
    ) -> Callable[[int, slice], Tensor]:
        """Return a function (row, slice) -> logits, [tokens, vocab_size].

        With a head that is a plain matrix, the logits of all tokens are never in memory at once.
        """
        if not self._head_is_plain:
            scores = self.logits(input_ids, position_ids, media)
            return lambda row, part: scores[row, part]
        hidden = self._call(self.model.base_model, input_ids, position_ids, media)
        head = self.model.get_output_embeddings()
        return lambda row, part: head(hidden[row, part])

    def _call(self, part: Any, input_ids: Tensor, position_ids: Tensor, media: ModelInputs | None = None) -> Tensor:
        model_inputs = {"input_ids": input_ids, "attention_mask": None, **(media or {})}
        if self._takes_positions:
            model_inputs["position_ids"] = position_ids
        # Request a named output, because Qwen2-Audio reads its own body's output by name.
        output: Tensor = part(**model_inputs, use_cache=False, return_dict=True)[0]
        return output

    @torch.no_grad()
    def detect_linear_head(self, document: Tensor, data_name: str) -> None:
        """Check whether the logits are the last hidden states times a matrix."""
        device = next(self.parameters()).device
        row = document[None].to(device)
        position_ids = torch.arange(row.shape[1], device=device)[None]
        with self.make_probe_autocast(device):
            expected_scores = self.logits(row, position_ids).float()
        if not bool(expected_scores.isfinite().all()):
            raise TrainError(
                f"The scores of {self.name} on the first document of {data_name} are not finite: its "
                "weights are damaged. Download the folder again."
            )
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or self.model.base_model is self.model:
            return
        with self.make_probe_autocast(device):
            head_scores = head(self._call(self.model.base_model, row, position_ids)).float()
        scale = float(expected_scores.abs().max())
        self._head_is_plain = head_scores.shape == expected_scores.shape and bool(
            ((head_scores - expected_scores).abs() <= 1e-5 * scale).all()
        )

    def check_no_leak(self, packed: float, mixed: float, data_name: str) -> None:
        """Refuse a loss difference of packed documents that shows a leak."""
        if is_leaking(packed, mixed, half=self._needs_half_precision):
            raise TrainError(
                f"{type(self.model).__name__} with {self.attention} attention lets packed documents see each other: "
                f"on the first documents of {data_name} the loss of a token differs by {packed:.2g} nats "
                "from its loss in the document alone. Train one document per row (--packing none), or try another "
                "--attn-implementation (sdpa, eager, flex_attention)."
            )

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json and safetensors for transformers' ``from_pretrained``."""
        # Pass the state explicitly, because transformers would write the names that compile_body adds to modules.
        state = self.model.state_dict()
        if self._dtype == "bfloat16":
            cast_tensors: dict[int, Tensor] = {}
            for name, tensor in state.items():
                # Shared weights must stay shared, so that they are written once.
                cast_tensor = cast_tensors.setdefault(tensor.data_ptr(), tensor.to(torch.bfloat16))
                state[name] = cast_tensor if tensor.is_floating_point() else tensor
        self.model.save_pretrained(folder, state_dict=state)
        if self._dtype == "bfloat16":
            file = folder / "config.json"
            config = {**json.loads(file.read_text("utf-8")), "dtype": "bfloat16"}
            file.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def compute_summed_loss(head: nn.Linear, hidden: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the summed, weighted loss of a head with bounded memory for logits."""
    rows = max(1, _MAX_SCORES // head.weight.shape[0])

    def compute_part_loss(states: Tensor, part: slice) -> Tensor:
        return sum_token_losses(head(states), targets[part], None if weights is None else weights[part])

    if len(hidden) <= rows:
        return compute_part_loss(hidden, slice(None))
    total = torch.zeros((), device=hidden.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        # Checkpointing recomputes the logits in the backward pass instead of storing them.
        total = total + checkpoint(compute_part_loss, hidden[part], part, use_reentrant=False, preserve_rng_state=False)
    return total


def _import_transformers() -> Any:
    """Import transformers; that takes seconds, and only ``--init`` needs it."""
    if find_spec("transformers") is None:
        raise MissingDependencyError(
            "--init needs transformers, not installed: pip install 'batchloom[train,hf]' (or: pip install datasets "
            "transformers)."
        )
    with announce_load("transformers"):
        return importlib.import_module("transformers")


def read_model_config(settings: PretrainedSettings) -> "PretrainedConfig":
    hf = _import_transformers()
    folder = Path(settings.init)
    read_safe_config(folder)
    hf.utils.logging.disable_progress_bar()
    try:
        config: PretrainedConfig = hf.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _list_load_errors() as error:
        _raise_unusable_model(folder, error)
    return config


def _check_model_kind(folder: Path, config: "PretrainedConfig", *, media: bool) -> None:
    """Refuse a text model for a store with media, and a multimodal one for text."""
    auto_module = importlib.import_module("transformers.models.auto.modeling_auto")
    mapping = "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES" if media else "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    class_names = config.architectures or []
    # transformers before version 5 has no mapping for multimodal models.
    if not class_names or {*getattr(auto_module, mapping, {}).values()} & {*class_names}:
        return
    kind, contents, prepared = (
        ("multimodal", "images or audio", "without") if media else ("causal", "only text", "with")
    )
    raise InputError(
        f"--init: {folder} holds {', '.join(map(str, class_names))}, which is not a {kind} language model, and the "
        f"store holds {contents}: give the folder of one, as {_get_auto_class(media=media)} saves it, or a store "
        f"prepared {prepared} --processor"
    )


def _get_auto_class(*, media: bool) -> str:
    return "AutoModelForMultimodalLM" if media else "AutoModelForCausalLM"


def get_max_positions(config: "PretrainedConfig") -> int | None:
    """Return the maximum context length of a model; None if it has none."""
    max_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return max_positions if isinstance(max_positions, int) and max_positions > 0 else None


def get_model_vocabulary(settings: PretrainedSettings | ModelSettings) -> int | None:
    """Return the model's vocabulary size; None if it adapts to any."""
    if not isinstance(settings, PretrainedSettings):
        return settings.vocab_size
    vocab_size = getattr(read_model_config(settings), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) else None


def build_meta_model(settings: PretrainedSettings, *, media: bool = False) -> "PreTrainedModel":
    """Build the model of a folder on the meta device, without memory for its weights."""
    config = read_model_config(settings)
    _check_model_kind(Path(settings.init), config, media=media)
    auto = _get_auto_class(media=media)
    faults: tuple[type[Exception], ...] = (*_list_load_errors(), RuntimeError)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = getattr(_import_transformers(), auto).from_config(
                config, attn_implementation=settings.attn_implementation, trust_remote_code=False, dtype=torch.float32
            )
    except faults as error:
        if (attention := settings.attn_implementation) is not None:
            problem = f"{attention!r} is not available: {_get_first_line(error)}; leave it unset"
            raise SettingsError([f"model.attn_implementation: {problem}"]) from error
        _raise_unusable_model(Path(settings.init), error)
    return model


def check_size(settings: PretrainedSettings, model: "PreTrainedModel", data: Store | Stream) -> None:
    """Refuse a model whose embedding is too small for the ids of a store."""
    rows = _count_embedding_rows(model)
    needed = data.vocab_size or 0
    if rows < needed:
        raise TrainError(
            f"{get_data_name(data)} has ids up to {needed - 1:,} and the model in {settings.init} has {rows:,} ids: "
            f"prepare the data with --tokenizer {settings.init} (images and audio with --processor), give synthetic "
            f"data vocab={rows}, or resize the model's embedding with transformers' resize_token_embeddings."
        )


def load_pretrained(settings: PretrainedSettings, blueprint: "PreTrainedModel") -> PretrainedModel:
    """Load the model of a folder with its weights, in float32."""
    folder = Path(settings.init)
    try:
        # The type is Any, because the stubs of transformers lack ``output_loading_info``.
        kind: Any = type(blueprint)
        model, loading_info = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=blueprint.config._attn_implementation,  # noqa: SLF001 - as it was built
            use_safetensors=True,
            # Mismatched weights are reported together with missing ones below.
            ignore_mismatched_sizes=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except _list_load_errors() as error:
        _raise_unusable_model(folder, error)
    shapes = (name for name, *_ in loading_info["mismatched_keys"])
    missing_weights = sorted((*loading_info["missing_keys"], *shapes))
    if missing_weights:
        raise InputError(
            f"--init: the weights in {folder} lack {len(missing_weights)} of those that its config.json lists, or "
            f"have them in another shape ({missing_weights[0]}): they would be initialized at random. Download the "
            "folder again, or save the whole model"
        )
    dtype = read_model_config(settings).dtype
    return PretrainedModel(model, str(folder), str(dtype or torch.float32).removeprefix("torch."))


def _count_embedding_rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _list_load_errors() -> tuple[type[Exception], ...]:
    """List the exceptions that transformers raises for an invalid config or weights."""
    strict = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    plain = (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError)
    return (*plain, SafetensorError, strict)


def _raise_unusable_model(folder: Path, error: Exception) -> NoReturn:
    raise InputError(
        f"--init: transformers {_import_transformers().__version__} cannot load {folder}: {_get_first_line(error)}"
    ) from error


def _get_first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def read_safe_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a folder that is safe to load: no pickles, no code."""
    refuse_url(folder, "--init")
    if not folder.is_dir():
        raise InputMissingError(
            f"--init: {folder} is not a folder. Give a local folder with config.json and safetensors weights; "
            "download a model of the Hub first: hf download ORG/NAME --local-dir FOLDER"
        )
    try:
        config = read_json_object(folder / _CONFIG_FILE)
    except ValueError as error:
        raise InputMissingError(
            f"--init: {folder / _CONFIG_FILE} {error}; give a folder that transformers' save_pretrained wrote"
        ) from error
    kernel = str(config.get("attn_implementation") or config.get("_attn_implementation") or "")
    if "auto_map" in config or "/" in kernel:
        setting = "auto_map" if "auto_map" in config else f"attn_implementation {kernel!r}"
        raise InputError(
            f"--init: {folder / _CONFIG_FILE} has {setting}: it needs code from outside transformers, which "
            "batchloom never runs. Use a model that transformers itself supports; if it supports this one, delete "
            f"the entry from {_CONFIG_FILE}"
        )
    if "quantization_config" in config:
        raise InputError(
            f"--init: the weights in {folder} are quantized and cannot be finetuned: give the folder of the full "
            "weights"
        )
    _list_weight_files(folder)
    return config


def _list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model; refuse pickles."""
    file = folder / _WEIGHTS_FILE
    index = folder / _WEIGHTS_INDEX_FILE
    if file.is_file():
        return [file]
    if not index.is_file():
        raise InputMissingError(
            f"--init: {folder} has no {_WEIGHTS_FILE}. If its weights are in pytorch_model.bin: that is a pickle, "
            "which can run code when it is opened, so it is never loaded. If you trust it, convert it: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    try:
        files_by_weight = read_json_object(index).get("weight_map")
    except ValueError as error:
        raise InputError(f"--init: {index} {error}") from error
    names = sorted(set(map(str, files_by_weight.values()))) if isinstance(files_by_weight, dict) else []
    if not names:
        raise InputMissingError(f"--init: {index} names no file: download the model again")
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InputMissingError(
                f"--init: {index} names {name!r}, which is not a file in this folder: download the model again"
            )
    return [folder / name for name in names]


def compute_folder_fingerprint(folder: Path) -> str:
    """Return a fingerprint of a model.

    It covers the config, and size, first and last MiB of each weight file.
    """
    digest = xxhash.xxh3_128()
    for file in (folder / _CONFIG_FILE, *_list_weight_files(folder)):
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(f"{file.name} {size} ".encode() + opened.read(_EDGE_BYTES))
            opened.seek(max(0, size - _EDGE_BYTES))
            digest.update(opened.read(_EDGE_BYTES))
    return digest.hexdigest()


def describe_tokenizer_difference(folder: Path, data: Store | Stream) -> str | None:
    """Describe how a store's tokenizer differs from a model's; None if it does not."""
    file = folder / _TOKENIZER_FILE
    state = data.tokenizer.state() if has_tokenizer(data) else {"kind": "none"}
    if state["kind"] == "none" or not file.is_file():
        missing = folder if not file.is_file() else get_data_name(data)
        return (
            f"{missing} has no {_TOKENIZER_FILE}, so the tokenizers of the data and the model cannot be compared. "
            "Check that the data was prepared with the model's tokenizer."
        )
    model_tokenizer = _parse_tokenizer(file.read_text("utf-8"))
    if state["kind"] == "bytes":
        # Bytes have no vocabulary, but each id is a text.
        store_vocabulary = {number: data.tokenizer.decode([number]) for number in range(data.tokenizer.vocab_size)}
        model_vocabulary = {
            number: model_tokenizer.decode([number], skip_special_tokens=False)
            for number in model_tokenizer.get_vocab().values()
        }
    else:
        store_vocabulary = _list_tokens(_parse_tokenizer(json.dumps(state["tokenizer"])))
        model_vocabulary = _list_tokens(model_tokenizer)
    shared_ids = store_vocabulary.keys() & model_vocabulary.keys()
    differing_ids = sorted(number for number in shared_ids if store_vocabulary[number] != model_vocabulary[number])
    unknown_ids = len(store_vocabulary.keys() - model_vocabulary.keys())
    if not differing_ids and not unknown_ids:
        return None
    example = ""
    if differing_ids:
        first = differing_ids[0]
        example = (
            f", id {first} is {store_vocabulary[first]!r} in the store and {model_vocabulary[first]!r} in the model"
        )
    fact = (
        f"{len(differing_ids):,} of {len(store_vocabulary):,} ids of the store's tokenizer ({data.tokenizer.name!r}) "
        f"are other tokens in {folder / _TOKENIZER_FILE}{example}, and {unknown_ids:,} are not in it"
    )
    if len(differing_ids) > _MAX_DIFFERENT_SHARE * len(store_vocabulary):
        raise TrainError(f"{fact}: the model would learn nonsense. Prepare the data with --tokenizer {folder}.")
    return fact


def _parse_tokenizer(definition: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    return Tokenizer.from_str(definition)


def _list_tokens(tokenizer: "Tokenizer") -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def copy_tokenizer(folder: Path, data: Store | Stream, out: Path) -> None:
    """Copy the tokenizer files of a model's folder next to its trained weights.

    Without any, the store's tokenizer is written, if it is a tokenizer.json.
    """
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    if any((out / name).is_file() for name in _TOKENIZER_FILES) or not has_tokenizer(data):
        return
    if (definition := data.tokenizer.state().get("tokenizer")) is not None:
        (out / _TOKENIZER_FILE).write_text(json.dumps(definition, ensure_ascii=False), "utf-8")
        chat = data.tokenizer.chat
        # The default class of the model type may apply other rules, so name the generic one.
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **chat.tokens}
        (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, ensure_ascii=False), "utf-8")
        if (template := chat.templates.get("default")) is not None:
            (out / "chat_template.jinja").write_text(template, "utf-8")
