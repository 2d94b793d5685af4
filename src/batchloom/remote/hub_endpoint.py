"""The address of the Hub, as the environment gives it: its libraries fail on import where it is none."""

import os
from urllib.parse import urlsplit

from batchloom.core.errors import InputError


def check_hub_endpoint() -> None:
    """Refuse an ``HF_ENDPOINT`` that is no web address. It is not repeated: there may be a password in it.

    Raises:
        InputError: it is none.
    """
    address = os.environ.get("HF_ENDPOINT")
    if address is None:
        return
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise InputError(
            "HF_ENDPOINT is no address of a Hub: unset it, or write it as https://host or http://host:port."
        )
