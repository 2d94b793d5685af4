"""Processors of transformers, run on blank media to get the text they write."""

import functools
import re
from typing import Any, final

import numpy as np

from batchloom.core.errors import InputError, UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, MediumFacts, MediumKind
from batchloom.media.processor_families import PlaceholderExpansion

# Errors that a processor may raise for a medium it does not accept.
_PROCESSOR_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
    RuntimeError,
)
_OFFSETS_KEY = "text_replacement_offsets"


def collapse_expansion(text: str, token: str, grid: tuple[int, int, int] = (0, 0, 0)) -> PlaceholderExpansion:
    """Collapse each run of the token in a processor's text for one medium."""
    runs: list[int] = []

    def collapse_run(match: re.Match[str]) -> str:
        runs.append(len(match.group()) // len(token))
        return token

    text = re.sub(f"(?:{re.escape(token)})+", collapse_run, text)
    return PlaceholderExpansion(text, tuple(runs), grid)


def render_medium(processor: Any, kind: MediumKind, facts: MediumFacts) -> str:
    """Return the text that a processor writes for a medium of this size.

    Raises:
        UnusableRecordError: the processor does not accept the medium.
        InputError: the processor does not report the text, as in older transformers.
    """
    name = type(processor).__name__
    placeholder = getattr(processor, f"{kind}_token", None)
    if not placeholder:
        raise InputError(f"{name} has no token for {kind}: it does not support {kind}")
    try:
        arguments = make_blank_medium(processor, facts)
        output = processor(text=[placeholder], return_text_replacement_offsets=True, **arguments)
    except _PROCESSOR_ERRORS as error:
        raise UnusableRecordError(f"is rejected by {name}: {error}") from error
    if _OFFSETS_KEY not in output:
        raise InputError(
            f"{name} of the installed transformers does not report the text it writes for a medium: update transformers"
        )
    (replacement,) = output[_OFFSETS_KEY][0]
    text: str = replacement["replacement"]
    return text


def make_blank_medium(processor: Any, facts: MediumFacts) -> dict[str, Any]:
    """Return a blank medium as keyword arguments of a processor."""
    if isinstance(facts, ImageFacts):
        from PIL import Image  # noqa: PLC0415 - imported late, only for images

        return {"images": [Image.new("RGB", (facts.width, facts.height))]}
    extractor = getattr(processor, "feature_extractor", None) or processor.audio_processor
    rate = int(extractor.sampling_rate)
    silence = np.zeros(facts.samples_at(rate), np.float32)
    return {"audio": [silence], "sampling_rate": rate}


def _find_repeated_token(processor: Any, kind: MediumKind, placeholder: str) -> str:
    """Return the repeated token, which may differ from the placeholder."""
    token_ids = getattr(processor, f"{kind}_token_ids", None) or [getattr(processor, f"{kind}_token_id", None)]
    if token_ids[0] is None:
        return placeholder
    token: str = processor.tokenizer.convert_ids_to_tokens(token_ids[0])
    return token


@final
class ProbedProcessor:
    """Family of an unknown processor, which is run once per size of a medium.

    Attributes:
        kind, placeholder, token: see :class:`batchloom.media.ProcessorFamily`.
    """

    def __init__(self, processor: Any, kind: MediumKind) -> None:
        self.kind: MediumKind = kind
        self.placeholder: str = getattr(processor, f"{kind}_token")
        self.token = _find_repeated_token(processor, kind, self.placeholder)
        self._cached_render = functools.lru_cache(maxsize=4096)(functools.partial(render_medium, processor, kind))

    @property
    def fallback_text(self) -> str:
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        size: MediumFacts = (
            AudioFacts(facts.samples, facts.rate)
            if isinstance(facts, AudioFacts)
            else ImageFacts(facts.width, facts.height)
        )
        return collapse_expansion(self._cached_render(size), self.token)
