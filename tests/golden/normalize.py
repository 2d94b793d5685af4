"""JSON of commands without machine facts, and the sentences in it."""

from collections.abc import Iterator
from typing import Any

# Times, speeds and memory: whatever stands there is replaced.
MACHINE = frozenset(
    {
        *("seconds", "seconds_by_phase", "start_seconds", "bytes_per_second", "started", "when"),
        *("peak_memory_bytes", "mtime_ns"),
    }
)
# Sentences for people: they are pinned in a file of their own, so that new wording changes that file alone.
SENTENCES = frozenset(
    {
        *("notes", "warnings", "faults", "used", "reason", "sentence", "description"),
        *("engine_note", "fault"),
    }
)
_MACHINE, _SENTENCE = "<machine>", "<sentence>"


def normalize(value: Any, root: str) -> Any:
    """Return a JSON value without machine facts, sentences and the root folder."""
    if isinstance(value, dict):
        return {name.replace(root, "<root>"): _normalize_field(name, inner, root) for name, inner in value.items()}
    if isinstance(value, list):
        return [normalize(inner, root) for inner in value]
    if isinstance(value, float):
        # The last digits of logarithms and powers differ between platforms.
        return float(f"{value:.9g}")
    return value.replace(root, "<root>") if isinstance(value, str) else value


def _normalize_field(name: str, value: Any, root: str) -> Any:
    if name in MACHINE and value is not None:
        return _MACHINE
    if name in SENTENCES and isinstance(value, str) and value:
        return _SENTENCE
    if name in SENTENCES and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return [_SENTENCE for _ in value]
    return normalize(value, root)


def sentences(value: Any, root: str, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each sentence of a JSON value."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from sentences(inner, root, f"{place}[{number}]")
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        where = f"{place}.{name}".lstrip(".")
        texts = inner if isinstance(inner, list) else [inner]
        if name in SENTENCES and texts and all(isinstance(text, str) for text in texts):
            for number, text in enumerate(texts):
                if text:
                    yield f"{where}[{number}]", text.replace(root, "<root>")
        else:
            yield from sentences(inner, root, where)
