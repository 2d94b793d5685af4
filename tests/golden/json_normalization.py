"""JSON of commands without values of the machine, and the sentences in it."""

from collections.abc import Iterator
from typing import Any

# Fields with times, speeds and memory, whose values are replaced.
MACHINE_FIELDS = frozenset(
    {
        *("seconds", "seconds_by_phase", "start_seconds", "bytes_per_second", "started", "when"),
        *("peak_memory_bytes", "mtime_ns"),
    }
)
# Fields with sentences, which a separate file pins, so that new wording changes only that file.
SENTENCE_FIELDS = frozenset(
    {
        *("notes", "warnings", "faults", "used", "reason", "sentence", "description"),
        *("engine_note", "fault"),
    }
)
_MACHINE, _SENTENCE = "<machine>", "<sentence>"


def normalize(value: Any, root: str) -> Any:
    """Replace values of the machine, sentences and the root folder in a JSON value."""
    if isinstance(value, dict):
        return {name.replace(root, "<root>"): _normalize_field(name, inner, root) for name, inner in value.items()}
    if isinstance(value, list):
        return [normalize(inner, root) for inner in value]
    if isinstance(value, float):
        # The last digits of logarithms and powers differ between platforms.
        return float(f"{value:.9g}")
    return value.replace(root, "<root>") if isinstance(value, str) else value


def _normalize_field(name: str, value: Any, root: str) -> Any:
    if name in MACHINE_FIELDS and value is not None:
        return _MACHINE
    if name in SENTENCE_FIELDS and isinstance(value, str) and value:
        return _SENTENCE
    if name in SENTENCE_FIELDS and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return [_SENTENCE for _ in value]
    return normalize(value, root)


def iter_sentences(value: Any, root: str, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each sentence of a JSON value."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from iter_sentences(inner, root, f"{parent}[{number}]")
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        location = f"{parent}.{name}".lstrip(".")
        texts = inner if isinstance(inner, list) else [inner]
        if name in SENTENCE_FIELDS and texts and all(isinstance(text, str) for text in texts):
            for number, text in enumerate(texts):
                if text:
                    yield f"{location}[{number}]", text.replace(root, "<root>")
        else:
            yield from iter_sentences(inner, root, location)
