"""A tokenizer and a chat template that belong together."""

import datetime as dt
from collections.abc import Mapping
from types import MappingProxyType
from typing import final

import numpy as np

from batchloom.chat.choose import choose_template
from batchloom.chat.grammar import control_pattern
from batchloom.chat.render import Renderer
from batchloom.chat.stands import Stand
from batchloom.chat.template import DEFAULT_DATE
from batchloom.core.errors import TokenizerError
from batchloom.core.media import Kind
from batchloom.media.families import Family
from batchloom.tokens import Tokenizer


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
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        date: dt.date = DEFAULT_DATE,
        families: Mapping[Kind, Family] = MappingProxyType({}),
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
        _refuse_unknown(tokenizer, families)
        control, chat = tokenizer.control, tokenizer.chat
        words = {number: token for token, number in control.items()}
        named = {"eos_token": words[tokenizer.end_id]}
        if tokenizer.bos_id is not None:
            named["bos_token"] = words[tokenizer.bos_id]
        self.renderer = Renderer(
            choose_template(template, {**chat.templates, **templates}, control, tokenizer.name),
            {**named, **chat.tokens},
            control,
            added=tokenizer.added,
            date=date,
            media={kind: Stand(one.placeholder, one.alone) for kind, one in families.items()},
        )
        self.sizes = tokenizer.id_bytes()
        self.is_control = np.zeros(tokenizer.vocab_size, np.bool_)
        self.is_control[list(control.values())] = True
        self.control = control_pattern(list(control))

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


def _refuse_unknown(tokenizer: Tokenizer, families: Mapping[Kind, Family]) -> None:
    for kind, family in families.items():
        for token in (family.placeholder, family.token):
            if token not in tokenizer.control:
                raise TokenizerError(
                    f"tokenizer {tokenizer.name!r} has no control token {token!r}, which the processor writes for "
                    f"{kind}: give the tokenizer that the processor was saved with, --tokenizer and --processor the "
                    "same folder"
                )
