"""Lookup of a recipe's processor: a folder, or a repository of the Hub."""

from pathlib import Path

from batchloom.core.errors import InputError
from batchloom.media import PROCESSOR_FILES, TEMPLATE_FILES
from batchloom.tokens import HUB_ID_PATTERN, RepositoryFiles, fetch_hub_folder

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


def is_repository_name(processor: str) -> bool:
    """Return whether a name is a Hub repository: no local path, and of its form."""
    return HUB_ID_PATTERN.fullmatch(processor) is not None and not Path(processor).exists()


def find_processor_folder(processor: str) -> Path:
    """Return the folder of a processor, fetched from the Hub if it is a repository.

    Files in the local Hub cache are not requested again.

    Raises:
        MissingDependencyError: it is on the Hub, and huggingface_hub is not installed.
        InputError: it cannot be fetched from the Hub.
    """
    if is_repository_name(processor):
        return fetch_hub_folder(processor, _REQUIRED_FILES)
    return Path(processor).expanduser()
