"""Processors of media that a recipe names: their files and fingerprints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from batchloom.core.errors import InputError
from batchloom.media import (
    PROCESSOR_FILES,
    TEMPLATE_FILES,
    MediaProcessor,
    is_tokenizer_folder,
    open_processor,
    read_processor_files,
)
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.tokens import HUB_ID_PATTERN, RepositoryFiles, fetch_hub_folder, read_sidecar_hints


def compute_processor_fingerprint(processor: str, image_settings: Mapping[str, Any]) -> str:
    """Return the fingerprint of a recipe's processor: 32 hex digits."""
    return read_processor_files(find_processor_folder(processor)).with_image_settings(image_settings).fingerprint


_FOLDER_HINT = "give the folder that a processor's save_pretrained wrote"
_REQUIRED_FILES = RepositoryFiles(
    # video_preprocessor_config.json alone is no processor.
    PROCESSOR_FILES[:2],
    (
        *PROCESSOR_FILES[2:],
        *TEMPLATE_FILES,
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "config.json",
    ),
    InputError,
    f"it is of no processor; {_FOLDER_HINT}",
    f"{_FOLDER_HINT} (there is none of this name here)",
)
# Files of a processor, or of a plain tokenizer.
_TOKENIZER_FILES = replace(_REQUIRED_FILES, main=(*_REQUIRED_FILES.main, "tokenizer.json", "tokenizer_config.json"))


def has_only_tokenizer(processor: str) -> bool:
    """Return whether a folder or repository holds a tokenizer and no processor."""
    if is_repository_name(processor):
        processor = str(fetch_hub_folder(processor, _TOKENIZER_FILES))
    return is_tokenizer_folder(processor)


def is_repository_name(processor: str) -> bool:
    """Return whether a name is a Hub repository: no local path, and of its form."""
    return HUB_ID_PATTERN.fullmatch(processor) is not None and not Path(processor).exists()


def find_processor_folder(processor: str) -> Path:
    """Return the folder of a processor, fetched from the Hub if it is a repository.

    Files in the local Hub cache are not requested again.
    """
    if is_repository_name(processor):
        return fetch_hub_folder(processor, _REQUIRED_FILES)
    return Path(processor).expanduser()


def open_job_processor(media: MediaRecipe, tokenizer: str) -> MediaProcessor:
    """Open the processor of a recipe; its folder is read again if its files change.

    Args:
        media: media settings, which name the processor.
        tokenizer: tokenizer as the recipe names it; used if the processor's folder has no tokenizer.

    Raises:
        InputError: the processor does not exist or cannot be loaded.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    folder = find_processor_folder(media.processor)
    tokenizer_path = Path(tokenizer).expanduser()
    tokenizer_folder = tokenizer_path if tokenizer_path.is_dir() else None
    image_settings = orjson.dumps(media.image_settings, option=orjson.OPT_SORT_KEYS)
    fingerprint = read_processor_files(folder).with_image_settings(media.image_settings).fingerprint
    return _open_cached_processor(folder, tokenizer_folder, image_settings, fingerprint)


def get_processor_state(media: MediaRecipe, tokenizer: str) -> dict[str, Any]:
    """Return the stored state of a recipe's processor, with its media tokens.

    Args:
        media: media settings, which name the processor.
        tokenizer: as in :func:`open_job_processor`, which also lists the exceptions.
    """
    processor = open_job_processor(media, tokenizer)
    tokens = {kind: family.token for kind, family in processor.families.items()}
    return {**processor.files.state(), "tokens": tokens}


@lru_cache(maxsize=4)
def _open_cached_processor(
    folder: Path, tokenizer: Path | None, image_settings: bytes, fingerprint: str
) -> MediaProcessor:
    processor = open_processor(folder, tokenizer, orjson.loads(image_settings))
    if processor.files.fingerprint != fingerprint:
        raise AssertionError(f"{folder} changed while it was read")
    return processor


def read_processor_template(media: MediaRecipe) -> str | None:
    """Read the chat template next to a processor; None if there is none."""
    return read_sidecar_hints(find_processor_folder(media.processor)).chat.templates.get("default")
