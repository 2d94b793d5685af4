"""What of a command line is told to nobody: passwords, signatures and tokens in its URLs."""

import re
from collections.abc import Sequence

_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.\-]*://(?:([^/?#\s]*)@)?[^?#\s]*(?:\?([^#\s]*))?(?:#(\S*))?"
)
# A wildcard of one character is no secret.
_LEAST = 2


def without_secrets(sentence: str, arguments: Sequence[str]) -> str:
    """The sentence without what stands before the host of a URL, and without its query and fragment.

    Whatever a path or a library has made of the URL: those words are left out wherever they stand.
    """
    found = {part for word in arguments for match in _URL.findall(word) for part in match}
    for part in sorted((part for part in found if len(part) >= _LEAST), key=len, reverse=True):
        sentence = sentence.replace(part, "...")
    return sentence
