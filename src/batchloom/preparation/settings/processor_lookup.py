"""Where the processor lies that a recipe names: a folder, or a repository of the Hub."""

from pathlib import Path

from batchloom.core.errors import InputError
from batchloom.media import PROCESSOR_FILES, TEMPLATE_FILES
from batchloom.tokens import HUB_ID_PATTERN, RepositoryFiles, fetch_hub_folder

_FOLDER_HINT = "give the folder that a processor's save_pretrained wrote"
_REQUIRED_FILES = RepositoryFiles(
    # video_preprocessor_config.json makes no processor of its own.
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
    """Whether this names a repository of the Hub: no such path is here, and it is written as one."""
    return HUB_ID_PATTERN.fullmatch(processor) is not None and not Path(processor).exists()


def find_processor_folder(processor: str) -> Path:
    """The folder of a processor, after fetching it from the Hub where it is one of its repositories.

    What the local cache of the Hub holds is not asked for again.

    Raises:
        MissingDependencyError: it is to come from the Hub, and huggingface_hub is not installed.
        InputError: it is to come from the Hub, and does not.
    """
    if is_repository_name(processor):
        return fetch_hub_folder(processor, _REQUIRED_FILES)
    return Path(processor).expanduser()
