"""Processors of transformers: loading them, and asking them what they write for a medium."""

import functools
import re
from typing import Any, final

import numpy as np

from batchloom.core.errors import InputError, UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, MediumFacts, MediumKind
from batchloom.media.processor_families import PlaceholderExpansion

# What a processor may raise of a medium that it does not take.
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
    """An expansion out of all that a processor writes for one medium."""
    runs: list[int] = []

    def collapse_run(match: re.Match[str]) -> str:
        runs.append(len(match.group()) // len(token))
        return token

    text = re.sub(f"(?:{re.escape(token)})+", collapse_run, text)
    return PlaceholderExpansion(text, tuple(runs), grid)


def render_medium(processor: Any, kind: MediumKind, facts: MediumFacts) -> str:
    """What a processor writes for a medium of such a size.

    Args:
        processor: of transformers.
        kind: of the medium.
        facts: its size.

    Raises:
        UnusableRecordError: it takes no such medium.
        InputError: it does not tell, as those of older transformers do not.
    """
    name = type(processor).__name__
    placeholder = getattr(processor, f"{kind}_token", None)
    if not placeholder:
        raise InputError(f"{name} has no token for {kind}: it takes none of it")
    try:
        arguments = make_blank_medium(processor, facts)
        output = processor(text=[placeholder], return_text_replacement_offsets=True, **arguments)
    except _PROCESSOR_ERRORS as error:
        raise UnusableRecordError(f"is not taken by {name}: {error}") from error
    if _OFFSETS_KEY not in output:
        raise InputError(
            f"{name} of the installed transformers does not tell what it writes for a medium: update transformers"
        )
    (replacement,) = output[_OFFSETS_KEY][0]
    text: str = replacement["replacement"]
    return text


def make_blank_medium(processor: Any, facts: MediumFacts) -> dict[str, Any]:
    """An empty medium of a size, as the argument that a processor takes it in."""
    if isinstance(facts, ImageFacts):
        from PIL import Image  # noqa: PLC0415 - late: only where there are images

        return {"images": [Image.new("RGB", (facts.width, facts.height))]}
    extractor = getattr(processor, "feature_extractor", None) or processor.audio_processor
    rate = int(extractor.sampling_rate)
    silence = np.zeros(facts.samples_at(rate), np.float32)
    return {"audio": [silence], "sampling_rate": rate}


def _find_repeated_token(processor: Any, kind: MediumKind, placeholder: str) -> str:
    """The token that is written many times, which need not be the one that asks for it."""
    token_ids = getattr(processor, f"{kind}_token_ids", None) or [getattr(processor, f"{kind}_token_id", None)]
    if token_ids[0] is None:
        return placeholder
    token: str = processor.tokenizer.convert_ids_to_tokens(token_ids[0])
    return token


@final
class ProbedProcessor:
    """A processor whose arithmetic is not known: it is run once for each size.

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
        """See :class:`batchloom.media.ProcessorFamily`."""
        return self.placeholder

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        """See :class:`batchloom.media.ProcessorFamily`."""
        size: MediumFacts = (
            AudioFacts(facts.samples, facts.rate)
            if isinstance(facts, AudioFacts)
            else ImageFacts(facts.width, facts.height)
        )
        return collapse_expansion(self._cached_render(size), self.token)
