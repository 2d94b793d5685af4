"""Check of the Hub address in the environment; its libraries fail on a bad one."""

import os
from urllib.parse import urlsplit

from batchloom.core.errors import InputError


def check_hub_endpoint() -> None:
    """Reject an ``HF_ENDPOINT`` that is not a web address.

    The error does not repeat it, because it may contain a password.

    Raises:
        InputError: the address is invalid.
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
            "HF_ENDPOINT is not the address of a Hub: unset it, or write it as https://host or http://host:port."
        )
