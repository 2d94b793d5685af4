"""Log messages that say whether the data is synthetic."""

import logging
from collections.abc import MutableMapping
from typing import Any, final

from batchloom.store import Store

_SYNTHETIC_LABEL = "source=synthetic"


_LOG = logging.getLogger("batchloom")


def describe_data_source(*stores: object) -> str:
    """Return ``source=real NAME/SUBSET FINGERPRINT, ...`` or ``source=synthetic ...``."""
    opened = [store for store in stores if isinstance(store, Store)]
    made_up = any(store.contents.synthetic for store in opened)
    names = ", ".join(
        f"{store.path.name}{f'/{store.split}' if store.split else ''} {store.fingerprint[:12]}" for store in opened
    )
    return f"{_SYNTHETIC_LABEL if made_up else 'source=real'} {names}"


def make_data_logger(*stores: object) -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the ``batchloom`` logger, which marks every line about synthetic data."""
    if any(isinstance(store, Store) and store.contents.synthetic for store in stores):
        return _SyntheticLogAdapter(_LOG)
    return _LOG


@final
class _SyntheticLogAdapter(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{msg} {_SYNTHETIC_LABEL}", kwargs
