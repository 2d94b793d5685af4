"""Check that calls of models keep packed documents apart, and shift labels once.

In a model of transformers nothing fails if they do: with a cache, with a mask of ones, or if its mask does not depend
on ``position_ids``. Therefore each form of a call is tried before its first use, with a row of two short documents: the
outputs of the second one must not depend on the tokens of the first. Labels of next tokens are refused by models that
shift labels: those whose loss does not depend on the first label of a row.
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch

from batchloom.batches.assembly.array_filling import IGNORE_INDEX
from batchloom.batches.assembly.batch_assembly import TOKEN_AXES
from batchloom.batches.forms import to_varlen
from batchloom.batches.isolation import make_probe_batch
from batchloom.batches.masks import add_dense_mask
from batchloom.batches.shifted_labels import are_next_tokens, may_be_shifted
from batchloom.core.errors import TrainError

_LOG = logging.getLogger("batchloom")
_MAX_DOCUMENT_TOKENS = 16
# Share of the change of the first document's outputs, below which a change of the second one's is rounding.
_ROUNDING_SHARE = 1e-4
# Trials of a form without a result: weights that are zero at the beginning show nothing.
_MAX_TRIALS = 8
_FLAT_KEYS = ("cu_seq_lens_q", "seq_idx")
# Modes such as those of selective checkpointing would record the trial.
_without_modes: Callable[[], Any] = getattr(_python_dispatch, "_disable_current_modes", nullcontext)


class _CallForm(NamedTuple):
    """Properties of a call on which the separation of documents depends."""

    config: tuple[object, object]  # use_cache and kind of attention of the model's config, which may change
    use_cache: bool | None
    mask: Literal["none", "ones", "bool", "additive"]
    is_flat: bool
    position_axes: int  # M-RoPE has several positions of each token; 0 for one


class _Verdicts(NamedTuple):
    """Results of the trials of a model, by form of the call."""

    remedies: dict[_CallForm, str]  # The call that works; empty if the documents are separated
    trials: dict[_CallForm, int]  # Number of trials without a result
    calls: dict[_CallForm, int]  # Number of calls


_VERDICTS: WeakKeyDictionary[nn.Module, _Verdicts] = WeakKeyDictionary()
# What to do with shifted labels, by model; empty for a model that does not shift.
_SHIFT_REMEDIES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_CALLS = threading.local()


def check_model_calls() -> None:
    """Check all later calls of models of transformers, if it is imported.

    Such a call with the ``position_ids`` of packed documents raises a :class:`TrainError` if they see each other, and
    one with labels of next tokens if the model shifts them again; it names the call that works.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    _check_calls_of(base, lambda model: model)
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if compiled is not None:
        _check_calls_of(compiled, lambda module: module._orig_mod if isinstance(module._orig_mod, base) else None)  # noqa: SLF001 - what torch.compile wraps


def _check_calls_of(base: type, get_model: Callable[[Any], Any]) -> None:
    """Check the calls of a class, whose model ``get_model`` returns, or None."""
    call = base.__call__
    if getattr(call, "checks_batches", False):
        return

    @wraps(call)
    def checked_call(module: Any, *args: Any, **inputs: Any) -> Any:
        # The outermost model is checked; it calls others.
        if torch.compiler.is_compiling() or getattr(_CALLS, "running", False):
            return call(module, *args, **inputs)
        model = get_model(module)
        names = _name_inputs(model, args, inputs) if args and model is not None else inputs
        if model is None:
            return call(module, *args, **inputs)
        _check_labels(model, names)
        if names.get("position_ids") is None:
            return call(module, *args, **inputs)
        with allow_model_calls():
            _check_call(model, names)
            return call(module, *args, **inputs)

    checked_call.checks_batches = True  # type: ignore[attr-defined]
    base.__call__ = checked_call  # type: ignore[method-assign]


def _name_inputs(model: Any, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**inspect.signature(model.forward).bind_partial(*args, **inputs).arguments, **inputs}
    except TypeError:
        # The call itself says what is wrong.
        return inputs


@contextmanager
def allow_model_calls() -> Iterator[None]:
    """Let this thread call models unchecked."""
    was_running = getattr(_CALLS, "running", False)
    _CALLS.running = True
    try:
        yield
    finally:
        _CALLS.running = was_running


def _check_labels(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise if a model shifts labels that are those of next tokens already."""
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not (isinstance(ids, Tensor) and isinstance(labels, Tensor)) or inputs.get("shift_labels") is not None:
        return
    if ids.ndim != TOKEN_AXES or labels.shape != ids.shape or not may_be_shifted():
        return
    if model not in _SHIFT_REMEDIES:
        if _is_alone() and not are_next_tokens(ids, labels):
            return
        _SHIFT_REMEDIES[model] = _find_shift_remedy(model, inputs, ids, labels)
    if (remedy := _SHIFT_REMEDIES[model]) and are_next_tokens(ids, labels):
        raise TrainError(
            f"The labels of this call are next tokens already (labels='shifted'), and {type(model).__name__} would "
            f"shift them again. {remedy}"
        )


def _find_shift_remedy(model: Any, inputs: Mapping[str, Any], ids: Tensor, labels: Tensor) -> str:
    """Return what to do with shifted labels, if a model shifts those that it gets."""
    unlabelled = torch.full_like(labels, IGNORE_INDEX)
    first = unlabelled.clone()
    first[:, 0] = ids[:, 0]
    with allow_model_calls(), _evaluation(model), _without_modes():
        expected = _compute_model_loss(model, inputs, labels=unlabelled)
        if not _are_equal_losses(_compute_model_loss(model, inputs, labels=first), expected):
            return ""
        takes_shifted = _are_equal_losses(_compute_model_loss(model, inputs, shift_labels=unlabelled), expected)
    call = "Call model(**batch, shift_labels=batch['labels'], use_cache=False), or give" if takes_shifted else "Give"
    return f"{call} Loader(labels='aligned')."


def _is_alone() -> bool:
    """Return whether no other rank has to try the same calls.

    Ranks whose weights are divided must, whatever their rows hold.
    """
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _compute_model_loss(model: Any, inputs: Mapping[str, Any], **labels: Tensor) -> Any:
    """Return the loss of a call with other labels; None if the model takes none."""
    try:
        return nn.Module._call_impl(model, **{**inputs, **labels})[0]  # type: ignore[no-untyped-call] # noqa: SLF001
    except TypeError:
        return None


def _are_equal_losses(loss: Any, expected: Any) -> bool:
    """Return whether both are losses and equal; that of no labels is often NaN."""
    are_losses = all(isinstance(value, Tensor) and value.ndim == 0 for value in (loss, expected))
    return are_losses and torch.allclose(loss, expected, equal_nan=True)


def _check_call(model: Any, inputs: Mapping[str, Any]) -> None:
    position_ids, labels, mask = (inputs.get(name) for name in ("position_ids", "labels", "attention_mask"))
    if not isinstance(position_ids, Tensor) or position_ids.ndim not in (TOKEN_AXES, TOKEN_AXES + 1):
        return
    if inputs.get("past_key_values") is not None:
        return
    if labels is not None and labels.shape != position_ids.shape[-TOKEN_AXES:]:
        return  # Labels of rows, not of tokens.
    if not (mask is None or getattr(mask, "ndim", 0) == TOKEN_AXES):
        return  # The mask says which tokens see each other.
    form = _describe_call(model, inputs, position_ids)
    known = _VERDICTS.get(model)
    if (known is None or form not in known.remedies) and _is_alone() and not _has_neighbours(inputs):
        return
    remedy = _try_call(model, form, position_ids)
    if remedy and _has_neighbours(inputs):
        raise TrainError(
            f"The documents of a packed row see each other in this call of {type(model).__name__}. Instead, {remedy}. "
            "To let them, leave out position_ids."
        )


def _has_neighbours(inputs: Mapping[str, Any]) -> bool:
    """Return whether a trained token has another document before it in its row."""
    position_ids = inputs["position_ids"]
    # M-RoPE positions begin with those of the text.
    positions = position_ids[0] if position_ids.ndim > TOKEN_AXES else position_ids
    starts = (positions[:, 1:-1] == 0) & (positions[:, 2:] == 1)
    mask, labels, ids = (inputs.get(name) for name in ("attention_mask", "labels", "input_ids"))
    if mask is not None:
        starts = starts & (mask[:, :-2] != 0)
    if labels is not None:
        is_trained = labels[:, 2:] != IGNORE_INDEX
        starts = starts & is_trained.flip(1).cummax(1).values.flip(1)
    elif ids is not None and ids.shape == positions.shape:
        # Positions of the padding begin anew, too.
        is_padding = (ids == ids[:, -1:]).flip(1).cummin(1).values.flip(1)
        starts = starts & ~is_padding[:, 1:-1]
    return bool(starts.any())


def _describe_call(model: Any, inputs: Mapping[str, Any], position_ids: Tensor) -> _CallForm:
    config = getattr(model, "config", None)
    use_cache = inputs.get("use_cache")
    if use_cache is not False and model.training:
        # Models that compute activations again use no cache. The first name is that of newer versions.
        names = ("is_activation_checkpointing", "is_gradient_checkpointing")
        name = next((name for name in names if hasattr(type(model), name)), "")
        use_cache = False if name and getattr(model, name) else use_cache
    return _CallForm(
        (getattr(config, "use_cache", None), getattr(config, "_attn_implementation", None)),
        use_cache,
        "none" if inputs.get("attention_mask") is None else "ones",
        any(name in inputs for name in _FLAT_KEYS),
        position_ids.shape[0] if position_ids.ndim > TOKEN_AXES else 0,
    )


def _try_call(model: Any, form: _CallForm, position_ids: Tensor) -> str:
    """Return the call that works, if documents see each other in this form.

    It is empty if they do not, or if that is not known.
    """
    verdicts = _VERDICTS.setdefault(model, _Verdicts({}, {}, {}))
    trials = verdicts.trials.get(form, 0)
    calls = verdicts.calls[form] = verdicts.calls.get(form, 0) + 1
    remedy = verdicts.remedies.get(form)
    # Layers that begin as zeros mix nothing before they are trained: what is separated is tried again, less and less.
    is_due = calls.bit_count() == 1
    if trials == _MAX_TRIALS or remedy or (remedy is not None and not is_due):
        return remedy or ""
    try:
        is_leaking = _is_leaking(model, form, position_ids)
    except Exception as error:  # noqa: BLE001 - of any model, which may take other inputs only
        verdicts.trials[form] = _MAX_TRIALS
        _LOG.warning(
            "%s cannot be tried with two short documents (%s: %s), so it is not known whether those of a packed row "
            "see each other in it: test it with batchloom.testing.assert_packed_equals_unpacked.",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return ""
    if is_leaking is None:
        verdicts.trials[form] = trials + 1
        return ""
    verdicts.remedies[form] = _find_remedy(model, form, position_ids) if is_leaking else ""
    return verdicts.remedies[form]


def _find_remedy(model: Any, form: _CallForm, position_ids: Tensor) -> str:
    """Return the first of several changes with which documents are separated."""
    add_mask = "give it the mask of batchloom.batches.masks.add_dense_mask(batch, config=model.config"
    rows = form._replace(use_cache=False, is_flat=False)
    remedies = {
        rows._replace(mask="none"): "call model(**batch, use_cache=False)" + " without a mask" * (form.mask == "ones"),
        rows._replace(mask="bool"): f"{add_mask}), and use_cache=False",
        rows._replace(mask="additive"): f"{add_mask}, additive='{_get_dtype(model)}'), and use_cache=False",
    }
    for other, remedy in remedies.items():
        try:
            if other != form and _is_leaking(model, other, position_ids) is False:
                return remedy
        except Exception:  # noqa: BLE001, S112 - what the model does not take is no remedy
            continue
    return "give it one document a row: Loader(packing='none')"


def _is_leaking(model: Any, form: _CallForm, position_ids: Tensor) -> bool | None:
    """Return whether a document changes the outputs of the next one.

    None if outputs do not depend on tokens.
    """
    tokens = max(2, min(_MAX_DOCUMENT_TOKENS, position_ids.shape[-1] // 2))
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]
    # Special tokens are at the beginning and the end of a vocabulary.
    first, second, other = ((torch.arange(3 * tokens, device=position_ids.device) + rows // 2) % rows).split(tokens)
    with _evaluation(model), _without_modes():
        outputs, changed = (_compute_outputs(model, form, [start, second]) for start in (first, other))
    differences = (outputs - changed).abs()
    own = float(differences[:tokens].mean())
    # A short convolution reaches the first tokens of the next document only.
    neighbour = float(differences[tokens:].mean(dim=-1).max())
    if own == 0:
        return None
    return not neighbour <= _ROUNDING_SHARE * own


def _compute_outputs(model: Any, form: _CallForm, documents: list[Tensor]) -> Tensor:
    """Return the outputs of a row of documents, [tokens, width]."""
    batch = make_probe_batch([documents], as_one_document=False)
    if form.mask in ("bool", "additive"):
        additive = _get_dtype(model) if form.mask == "additive" else None
        batch = add_dense_mask(batch, additive=additive, config=getattr(model, "config", None))
    inputs = dict(to_varlen(batch) if form.is_flat else batch)
    del inputs["labels"]
    if form.mask == "ones":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if form.use_cache is not None:
        inputs["use_cache"] = form.use_cache
    if form.position_axes:
        inputs["position_ids"] = inputs["position_ids"].expand(form.position_axes, 1, -1)
    # With the hooks of a sharded model, but not compiled for this shape.
    outputs: Tensor = nn.Module._call_impl(model, **inputs)[0]  # type: ignore[no-untyped-call] # noqa: SLF001
    tokens = sum(map(len, documents))
    if outputs.ndim != TOKEN_AXES + 1 or outputs.shape[:TOKEN_AXES] != (1, tokens):
        raise TypeError(f"outputs {list(outputs.shape)} are not of {tokens} tokens")
    return outputs[0].float()


def _get_dtype(model: Any) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


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
