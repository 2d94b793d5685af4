"""What of a command line is told to nobody: passwords, signatures and tokens in its URLs."""

import re
from collections.abc import Sequence

_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://(?:([^/?#\s]*)@)?[^?#\s]*(?:\?([^#\s]*))?(?:#(\S*))?")
# A wildcard of one character is no secret.
_MIN_SECRET_LENGTH = 2


def redact_urls(sentence: str, arguments: Sequence[str]) -> str:
    """The sentence without what stands before the host of a URL, and without its query and fragment.

    Whatever a path or a library has made of the URL: those words are left out wherever they stand.
    """
    url_parts = {part for word in arguments for match in _URL_PATTERN.findall(word) for part in match}
    for part in sorted((part for part in url_parts if len(part) >= _MIN_SECRET_LENGTH), key=len, reverse=True):
        sentence = sentence.replace(part, "...")
    return sentence
