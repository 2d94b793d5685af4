"""Warnings about the data that a loader serves."""

import threading
from collections.abc import Mapping

from batchloom.batches.loading.data_logging import make_data_logger
from batchloom.core.wording import format_list
from batchloom.plan import Plan
from batchloom.plan.order import SOURCE, SourceOrder
from batchloom.store import Store
from batchloom.store.read import has_media

# Counting reads every length; up to this many documents that takes a few milliseconds.
_MAX_INLINE_COUNT = 1 << 20


_MAX_LISTED = 5


def announce_left_out(plan: Plan, missing_documents: Mapping[str, tuple[int, ...]]) -> bool:
    """Log what the run leaves out; return True if it still has to be counted."""
    for name, numbers in missing_documents.items():
        store = plan.stores[name]
        make_data_logger(store).warning(
            "%s of %s documents of %s are served as padding: their images or audio are missing (MediaOptions.replace).",
            f"{len(numbers):,}",
            f"{store.lengths.size:,}",
            store.location.name if isinstance(store, Store) else name,
        )
    leaving = _list_shortened_orders(plan)
    if sum(order.pools.documents for order in leaving) <= _MAX_INLINE_COUNT:
        _log_left_out_counts(plan)
        return False
    for order in leaving:
        rule = order.spec.overlong
        make_data_logger(order.store).warning(
            "overlong=%r leaves out %s%s longer than seq_len %d; plan.left_out() counts them, and %s keeps them.",
            rule,
            "documents" if rule == "drop" else "the ends of documents",
            _describe_source(order),
            order.spec.seq_len,
            _suggest_overlong_remedy(order),
        )
    return True


def _list_shortened_orders(plan: Plan) -> list[SourceOrder]:
    """Return the sources that drop or truncate overlong documents."""
    return [order for order in plan.orders.latest() if order.spec.overlong in ("drop", "truncate")]


def _describe_source(order: SourceOrder) -> str:
    return "" if order.name == SOURCE else f" of {order.name!r}"


def _suggest_overlong_remedy(order: SourceOrder) -> str:
    """Return the setting that would include the documents."""
    media = isinstance(order.store, Store) and has_media(order.store)
    return "a larger seq_len" if media else "overlong='split'"


def announce_split_conversations(plan: Plan) -> None:
    """Warn that conversations are split, for stores that mix them with text."""
    for order in plan.orders.latest():
        store = order.store
        spec = order.spec
        if not (isinstance(store, Store) and store.contents.mixed and spec.overlong == "split"):
            continue
        if order.pools.documents > _MAX_INLINE_COUNT or order.pools.longest() > spec.seq_len:
            make_data_logger(store).warning(
                "The store%s holds texts and conversations, and its documents longer than seq_len %d are cut, "
                "conversations too: overlong='drop' leaves all of them out; prepare --max-tokens %d leaves out only "
                "conversations.",
                _describe_source(order),
                spec.seq_len,
                spec.seq_len,
            )


def announce_loss_weights(plan: Plan) -> None:
    """Log the sources whose loss has weights, which a training loop must apply."""
    stores = [store for store in plan.stores.values() if isinstance(store, Store) and store.reader.weighted]
    if stores:
        make_data_logger(*stores).warning(
            "Batches have loss_weights, which the loss must apply (docs/how-to/train/loader.md): those of %s.",
            ", ".join(store.location.name for store in stores),
        )


def announce_unused_weights(plan: Plan) -> None:
    """Warn that the weights that a single store records do not change its order."""
    (order, *others) = plan.orders.latest()
    if others or not (isinstance(order.store, Store) and order.store.contents.weights):
        return
    weights = [f"{name} {weight:g}" for name, weight in order.store.contents.weights]
    make_data_logger(order.store).warning(
        "The weights recorded in %s (%s) are not applied: documents of one store are drawn in proportion to their "
        "tokens. To apply them: batchloom prepare MANIFEST --separate --out DIR, then train --mixture DIR/mixture.yaml "
        "(or read_mixture('DIR/mixture.yaml')).",
        order.store.location.name,
        format_list(weights, _MAX_LISTED),
    )


def count_left_out(plan: Plan) -> None:
    threading.Thread(target=_log_left_out_counts, args=(plan,), name="batchloom-left-out", daemon=True).start()


def _log_left_out_counts(plan: Plan) -> None:
    for order in _list_shortened_orders(plan):
        left_out = order.pools.left_out()
        spec = order.spec
        if left_out.tokens:
            make_data_logger(order.store).warning(
                "overlong=%r leaves %s of %s documents%s and %s tokens out of every epoch because they are longer "
                "than seq_len %d; %s keeps them.",
                spec.overlong,
                f"{left_out.documents:,}",
                f"{order.pools.documents:,}",
                _describe_source(order),
                f"{left_out.tokens:,}",
                spec.seq_len,
                _suggest_overlong_remedy(order),
            )
