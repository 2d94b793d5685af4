"""Choice of the chat template: the tokenizer's own, a built-in one, or a file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import orjson

from batchloom.core.errors import InputMissingError, TemplateError
from batchloom.core.files import refuse_url
from batchloom.core.settings import suggest

# Built-in templates and the control tokens that each writes.
BUILT_IN_TEMPLATES: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "alpaca": (),
    "plain": (),
}
_MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChosenTemplate:
    """A chosen template, not yet compiled.

    Attributes:
        name: a built-in name, ``own`` for the tokenizer's, else the name of the file.
        text: the Jinja text.
        tools_text: the text for conversations with tools, None if it is the same.
        note: note on the choice for the user, else empty.
    """

    name: str
    text: str
    tools_text: str | None = None
    note: str = ""


def choose_template(
    spec: str | None, own: Mapping[str, str], control: Mapping[str, int], tokenizer: str
) -> ChosenTemplate:
    """Return the template that ``spec`` selects for a tokenizer.

    Args:
        spec: ``chatml``, ``llama3``, ``alpaca`` or ``plain``; the name of one of the tokenizer's
            own templates; the path of a file; None for the tokenizer's own, else ``plain``.
        own: the tokenizer's own templates by name, usually one called ``default``.
        control: control tokens of the tokenizer.
        tokenizer: name of the tokenizer for error messages.

    Raises:
        TemplateError: no such template, or one whose control tokens the tokenizer lacks.
        InputMissingError: no such file.
    """
    if spec is None:
        return _choose_own_template(own, tokenizer)
    if spec in BUILT_IN_TEMPLATES:
        missing = [token for token in BUILT_IN_TEMPLATES[spec] if token not in control]
        if missing:
            raise TemplateError(
                f"template {spec} writes {', '.join(missing)}, which tokenizer {tokenizer!r} does not have as "
                "control tokens: use plain or alpaca, which need none, or a tokenizer that has them"
            )
        return ChosenTemplate(spec, read_built_in(spec))
    if spec in own:
        return ChosenTemplate(spec, own[spec])
    refuse_url(spec, "The template")
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    template_names = [*BUILT_IN_TEMPLATES, *own]
    if not path.suffix and path.name == spec and not path.exists():
        raise TemplateError(
            f"there is no template {spec!r}{suggest(spec, template_names)}; choose {', '.join(template_names)}, or "
            "give the path of a .jinja file"
        )
    return ChosenTemplate(path.name, _read_template_file(path))


def read_built_in(name: str) -> str:
    """Return the Jinja text of a built-in template."""
    return (files("batchloom.chat") / "templates" / f"{name}.jinja").read_text("utf-8").strip()


def _choose_own_template(own: Mapping[str, str], tokenizer: str) -> ChosenTemplate:
    if not own:
        note = f"tokenizer {tokenizer!r} has no chat template: plain is used, which needs no control tokens"
        return ChosenTemplate("plain", read_built_in("plain"), note=note)
    if "default" in own:
        return ChosenTemplate("own", own["default"], own.get("tool_use"))
    if len(own) == 1:
        return ChosenTemplate("own", *own.values())
    raise TemplateError(
        f"tokenizer {tokenizer!r} has the chat templates {', '.join(sorted(own))} but none called default: name one "
        "of them"
    )


def _read_template_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(raw) > _MAX_TEMPLATE_BYTES:
            raise TemplateError(f"{path} is not a chat template: it is larger than 1 MiB")
        text = raw.decode()
        if path.suffix == ".json":
            text = orjson.loads(text)["chat_template"]
    except FileNotFoundError as error:
        raise InputMissingError(
            f"there is no template file {path}; give {', '.join(BUILT_IN_TEMPLATES)}, or the path of a .jinja file"
        ) from error
    except OSError as error:
        raise TemplateError(f"template {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TemplateError(f"template {path} is not UTF-8: {error}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise TemplateError(
            f"{path} is not a chat template: a .json file must be an object with chat_template"
        ) from error
    if not isinstance(text, str):
        raise TemplateError(f"{path}: chat_template is not a string")
    return text
