"""Redaction of secrets in URLs of the command line: passwords, signatures, tokens."""

import re
from collections.abc import Sequence

_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:([^/?#\s]*)@)?[^?#\s]*(?:\?([^#\s]*))?(?:#(\S*))?")
# URL parts of one character are wildcards, not secrets.
_MIN_SECRET_LENGTH = 2


def redact_urls(sentence: str, arguments: Sequence[str]) -> str:
    """Return a sentence without credentials, query and fragment of any URL.

    A path or library may have changed a URL, so each secret is removed wherever it occurs.
    """
    url_parts = {part for word in arguments for match in _URL_PATTERN.findall(word) for part in match}
    for part in sorted((part for part in url_parts if len(part) >= _MIN_SECRET_LENGTH), key=len, reverse=True):
        sentence = sentence.replace(part, "...")
    return sentence
