"""Tokenizers that locate control tokens in text, with or without a chat template."""

import datetime as dt
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.chat import choose_template
from batchloom.chat.templates import DEFAULT_DATE, ConversationRenderer, PlaceholderFormat, make_control_pattern
from batchloom.core.errors import TokenizerError
from batchloom.core.medium import MediumKind
from batchloom.media import ProcessorFamily
from batchloom.tokens import Tokenizer


class ControlEncoder(Protocol):
    """Tokenizer for texts with control tokens at known positions."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def sizes(self) -> NDArray[np.int64] | None:
        """UTF-8 bytes of each id, int64 [vocab]; None if texts are aligned one at a time."""

    @property
    def is_control(self) -> NDArray[np.bool_]:
        """True for ids of control tokens, bool [vocab]."""

    @property
    def control(self) -> re.Pattern[str]:
        """Pattern that matches control tokens in text."""

    @property
    def families(self) -> Mapping[MediumKind, ProcessorFamily]:
        """Processor family of each kind of media that texts may hold."""


@final
class MediaTextEncoder:
    """Tokenizer for texts with media; see :class:`ControlEncoder`."""

    def __init__(self, tokenizer: Tokenizer, families: Mapping[MediumKind, ProcessorFamily]) -> None:
        self.tokenizer, self.families = tokenizer, families
        _check_placeholders(tokenizer, families)
        self.sizes = tokenizer.id_bytes()
        self.is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self.is_control[list(tokenizer.control.values())] = True
        self.control = make_control_pattern(list(tokenizer.control))


@final
class ChatEncoder:
    """Tokenizer and template for conversations; made once, used for many batches.

    Attributes:
        tokenizer: the tokenizer.
        renderer: renders conversations as text.
        sizes: UTF-8 bytes of each id, int64 [vocab]; None if texts are aligned one at a time.
        is_control: True for ids of control tokens, bool [vocab].
        control: pattern that matches control tokens in text.
        families: processor family of each kind of media that conversations may hold.
        text: encoder of texts without a template.
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
            tokenizer: the tokenizer.
            template: ``chatml``, ``llama3``, ``alpaca``, ``plain``, the name of one of the tokenizer's own
                templates, or a file path; None for the tokenizer's own, else plain.
            date: date that ``strftime_now`` of templates returns.
            families: processor family by media kind.
            templates: templates by name, which take precedence over the tokenizer's own.

        Raises:
            TokenizerError: the tokenizer has no control token for media.
            TemplateError: the template does not exist or cannot be used.
            InputMissingError: the template file does not exist.
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
        """Notes on the template and the tokenizer for the user."""
        if self.sizes is not None:
            return self.renderer.notes
        slow = (
            f"tokens of {self.tokenizer.name!r} cannot be mapped to byte ranges: conversations are encoded with "
            "tokenizers, one at a time"
        )
        return (*self.renderer.notes, slow)


def _check_placeholders(tokenizer: Tokenizer, families: Mapping[MediumKind, ProcessorFamily]) -> None:
    for kind, family in families.items():
        for token in (family.placeholder, family.token):
            if token not in tokenizer.control:
                raise TokenizerError(
                    f"tokenizer {tokenizer.name!r} has no control token {token!r}, which the processor writes for "
                    f"{kind}: give the tokenizer that the processor was saved with, the same folder for "
                    "--tokenizer and --processor"
                )
