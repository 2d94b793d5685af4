"""A tokenizer with what it takes to place control tokens in a text; and with a chat template."""

import datetime as dt
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import choose_template
from batchloom.chat.templates import (
    DEFAULT_DATE,
    ConversationRenderer,
    PlaceholderFormat,
    make_control_pattern,
)
from batchloom.core.errors import TokenizerError
from batchloom.core.medium import MediumKind
from batchloom.media import ProcessorFamily
from batchloom.tokens import Tokenizer


class ControlEncoder(Protocol):
    """A tokenizer for texts in which control tokens stand at places that are known."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Turns text into ids."""

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """Bytes of each id; None where tokens are placed one text at a time."""

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """Whether each id is a control token."""

    @property
    def control(self) -> re.Pattern[str]:
        """Matches control tokens in text."""

    @property
    def families(self) -> Mapping[MediumKind, ProcessorFamily]:
        """The arithmetic of the media that texts may hold, by kind."""


@final
class MediaTextEncoder:
    """A tokenizer for texts with media; see :class:`ControlEncoder`.

    Args:
        tokenizer: turns text into ids.
        families: the arithmetic of media, by kind.

    Raises:
        TokenizerError: it has no control token for media.
    """

    def __init__(self, tokenizer: Tokenizer, families: Mapping[MediumKind, ProcessorFamily]) -> None:
        self.tokenizer, self.families = tokenizer, families
        _check_placeholders(tokenizer, families)
        self.sizes = tokenizer.id_bytes()
        self.is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self.is_control[list(tokenizer.control.values())] = True
        self.control = make_control_pattern(list(tokenizer.control))


@final
class ChatEncoder:
    """A tokenizer and a template, ready for conversations; made once, used for many batches.

    Attributes:
        tokenizer: turns text into ids.
        renderer: turns conversations into text.
        sizes: bytes of each id; None where tokens are placed one text at a time.
        is_control: whether each id is a control token.
        control: matches control tokens in text.
        families: the arithmetic of the media that conversations may hold, by kind.
        text: the same for texts that no template renders.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        date: dt.date = DEFAULT_DATE,
        families: Mapping[MediumKind, ProcessorFamily] = MappingProxyType({}),
        templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Choose and probe a template.

        Args:
            tokenizer: turns text into ids.
            template: ``chatml``, ``llama3``, ``alpaca``, ``plain``, the name of one of the
                tokenizer's own or the path of a file; None for the tokenizer's own, else plain.
            date: the day that ``strftime_now`` of templates speaks of.
            families: the arithmetic of media, by kind.
            templates: by name, before the tokenizer's own.

        Raises:
            TokenizerError: it has no control token for media.
            TemplateError: no such template, or one that cannot be used.
            InputMissingError: no such file.
        """
        self.tokenizer, self.families = tokenizer, families
        self.text = MediaTextEncoder(tokenizer, families)
        self.sizes, self.is_control = self.text.sizes, self.text.is_control
        self.control = self.text.control
        control, chat = tokenizer.control, tokenizer.chat
        token_by_id = {number: token for token, number in control.items()}
        special_tokens = {"eos_token": token_by_id[tokenizer.end_id]}
        if tokenizer.bos_id is not None:
            special_tokens["bos_token"] = token_by_id[tokenizer.bos_id]
        self.renderer = ConversationRenderer(
            choose_template(template, {**chat.templates, **templates}, control, tokenizer.name),
            {**special_tokens, **chat.tokens},
            control,
            added=tokenizer.added,
            date=date,
            media={
                kind: PlaceholderFormat(family.placeholder, family.fallback_text) for kind, family in families.items()
            },
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of template and tokenizer, in sentences."""
        if self.sizes is not None:
            return self.renderer.notes
        slow = (
            f"tokens of {self.tokenizer.name!r} do not stand for bytes of their own: conversations "
            "are encoded with tokenizers, one at a time"
        )
        return (*self.renderer.notes, slow)


def _check_placeholders(tokenizer: Tokenizer, families: Mapping[MediumKind, ProcessorFamily]) -> None:
    for kind, family in families.items():
        for token in (family.placeholder, family.token):
            if token not in tokenizer.control:
                raise TokenizerError(
                    f"tokenizer {tokenizer.name!r} has no control token {token!r}, which the processor writes for "
                    f"{kind}: give the tokenizer that the processor was saved with, --tokenizer and --processor the "
                    "same folder"
                )
