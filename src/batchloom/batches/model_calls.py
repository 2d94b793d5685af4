"""Check that packed documents do not see each other in ``model(**batch)``.

In a model of transformers nothing fails if they do: with a cache, with a mask of ones, or if its mask does not depend
on ``position_ids``. Therefore each form of a call is tried with two short documents before its first use.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from batchloom.batches.assembly.array_filling import IGNORE_INDEX
from batchloom.batches.assembly.batch_assembly import TOKEN_AXES
from batchloom.batches.forms import to_varlen
from batchloom.batches.isolation import is_leaking, make_probe_batch
from batchloom.batches.masks import add_dense_mask
from batchloom.core.errors import TrainError

Forward = Callable[..., Any]
_MAX_DOCUMENT_TOKENS = 16
# Share of the size of outputs that is rounding.
_NOISE = 1e-5


class _CallForm(NamedTuple):
    """Properties of a call on which the separation of documents depends."""

    config: tuple[object, object]  # use_cache and kind of attention of the model's config, which may change
    use_cache: bool | None
    mask: Literal["none", "ones", "bool", "additive"]
    is_varlen: bool
    position_axes: int  # M-RoPE has several positions of each token; 0 for one


# Whether documents see each other, by model and form of the call.
_VERDICTS: WeakKeyDictionary[nn.Module, dict[_CallForm, bool]] = WeakKeyDictionary()
_CALLS = threading.local()


def check_model_calls() -> None:
    """Check all later calls of models of transformers, if it is imported.

    Such a call with the ``position_ids`` of packed documents raises a :class:`TrainError` if they see each other; it
    names the call that works.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None or "__call__" in vars(base):
        return
    forward = base.__call__

    @wraps(forward)
    def checked_call(model: Any, *args: Any, **inputs: Any) -> Any:
        # The outermost model is checked; it calls others.
        if inputs.get("position_ids") is None or getattr(_CALLS, "running", False) or torch.compiler.is_compiling():
            return forward(model, *args, **inputs)
        with allow_model_calls():
            _check_call(_Trial(model, inputs["position_ids"], forward), inputs)
            return forward(model, *args, **inputs)

    base.__call__ = checked_call


@contextmanager
def allow_model_calls() -> Iterator[None]:
    """Let this thread call models unchecked."""
    was_running = getattr(_CALLS, "running", False)
    _CALLS.running = True
    try:
        yield
    finally:
        _CALLS.running = was_running


def _check_call(trial: "_Trial", inputs: Mapping[str, Any]) -> None:
    mask = inputs.get("attention_mask")
    if inputs.get("past_key_values") is not None or not (mask is None or getattr(mask, "ndim", 0) == TOKEN_AXES):
        return  # The mask says which tokens see each other.
    config = getattr(trial.model, "config", None)
    form = _CallForm(
        (getattr(config, "use_cache", None), getattr(config, "_attn_implementation", None)),
        inputs.get("use_cache"),
        "none" if mask is None else "ones",
        "cu_seq_lens_q" in inputs,
        trial.position_ids.shape[0] if trial.position_ids.ndim > TOKEN_AXES else 0,
    )
    if trial.is_leaking(form) and _has_neighbours(inputs):
        raise TrainError(
            f"The documents of a packed row see each other in this call of {type(trial.model).__name__}. Instead, "
            f"{_find_remedy(trial, form)}. To let them, leave out position_ids."
        )


def _has_neighbours(inputs: Mapping[str, Any]) -> bool:
    """Return whether a trained token has another document before it in its row."""
    position_ids = inputs["position_ids"]
    # M-RoPE positions begin with those of the text.
    positions = position_ids[0] if position_ids.ndim > TOKEN_AXES else position_ids
    starts = (positions[:, 1:-1] == 0) & (positions[:, 2:] == 1)
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    if mask is not None:
        starts = starts & (mask[:, :-2] != 0)
    if labels is None:
        # The padding behind a single document begins anew, too.
        return bool((starts.sum(1) > 1).any())
    is_trained = labels[:, 2:] != IGNORE_INDEX
    return bool((starts & is_trained.flip(1).cummax(1).values.flip(1)).any())


def _find_remedy(trial: "_Trial", form: _CallForm) -> str:
    """Return the first of several changes with which documents are separated."""
    add_mask = "give it the mask of batchloom.batches.masks.add_dense_mask(batch, config=model.config"
    rows = form._replace(use_cache=False, is_varlen=False)
    remedies = {
        rows._replace(mask="none"): "call model(**batch, use_cache=False)" + " without a mask" * (form.mask == "ones"),
        rows._replace(mask="bool"): f"{add_mask}), and use_cache=False",
        rows._replace(mask="additive"): f"{add_mask}, additive='{trial.dtype}'), and use_cache=False",
    }
    for other, remedy in remedies.items():
        try:
            if not trial.is_leaking(other):
                return remedy
        except Exception:  # noqa: BLE001, S112 - what the model does not take is no remedy
            continue
    return "give it one document a row: Loader(packing='none')"


class _Trial(NamedTuple):
    """A model that is tried with two documents."""

    model: Any
    position_ids: Tensor
    forward: Forward

    @property
    def dtype(self) -> str:
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def is_leaking(self, form: _CallForm) -> bool:
        """Return whether packed documents see each other in calls of a form."""
        verdicts = _VERDICTS.setdefault(self.model, {})
        if form not in verdicts:
            packed, mixed, noise = self._measure_differences(form)
            if mixed <= noise:
                # Weights that are zero show nothing yet.
                return False
            half = self.dtype != "float32" or torch.is_autocast_enabled(self.position_ids.device.type)
            verdicts[form] = is_leaking(packed, mixed, half=half, noise=noise)
        return verdicts[form]

    def _measure_differences(self, form: _CallForm) -> tuple[float, float, float]:
        """Compare the outputs of packed documents with those of each alone.

        Returns:
            The mean difference; the same if they are called as one document; and what of it is rounding.
        """
        tokens = max(2, min(_MAX_DOCUMENT_TOKENS, self.position_ids.shape[-1] // 2))
        rows = self.model.get_input_embeddings().num_embeddings
        # Special tokens are at the beginning and the end of a vocabulary.
        ids = ((torch.arange(2 * tokens) + rows // 2) % rows).to(self.position_ids.device)
        documents = [*ids.split(tokens)]
        with _evaluation(self.model):
            alone = torch.cat([self._compute_outputs(form, [document]) for document in documents])
            packed, mixed = (
                float((self._compute_outputs(form, order) - alone).abs().mean()) for order in (documents, [ids])
            )
        return packed, mixed, _NOISE * float(alone.abs().mean())

    def _compute_outputs(self, form: _CallForm, documents: list[Tensor]) -> Tensor:
        """Return the outputs of a row of documents, [tokens, width]."""
        batch = make_probe_batch([documents], as_one_document=False)
        if form.mask in ("bool", "additive"):
            additive = self.dtype if form.mask == "additive" else None
            batch = add_dense_mask(batch, additive=additive, config=getattr(self.model, "config", None))
        inputs = dict(to_varlen(batch) if form.is_varlen else batch)
        del inputs["labels"]
        if form.mask == "ones":
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if form.use_cache is not None:
            inputs["use_cache"] = form.use_cache
        if form.position_axes:
            inputs["position_ids"] = inputs["position_ids"].expand(form.position_axes, 1, -1)
        outputs: Tensor = self.forward(self.model, **inputs)[0]
        return outputs[0].float()


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients; modules keep their modes."""
    training_modules = [module for module in model.modules() if module.training]
    try:
        for module in training_modules:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training_modules:
            module.training = True
