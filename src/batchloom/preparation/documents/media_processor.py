"""Media processor of a job, opened once per process."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from batchloom.media import MediaProcessor, open_processor, read_processor_files
from batchloom.preparation.settings.media_recipe import MediaRecipe
from batchloom.preparation.settings.processor_lookup import find_processor_folder
from batchloom.tokens import read_sidecar_hints


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
    return _open_cached_processor(folder, tokenizer_folder, read_processor_files(folder).fingerprint)


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
def _open_cached_processor(folder: Path, tokenizer: Path | None, fingerprint: str) -> MediaProcessor:
    processor = open_processor(folder, tokenizer)
    if processor.files.fingerprint != fingerprint:
        raise AssertionError(f"{folder} changed while it was read")
    return processor


def read_processor_template(media: MediaRecipe) -> str | None:
    """Read the chat template next to a processor; None if there is none."""
    return read_sidecar_hints(find_processor_folder(media.processor)).chat.templates.get("default")
