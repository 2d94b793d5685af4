"""A tokenizer from the Hugging Face Hub: its files, the local cache first."""

import sys
from contextlib import suppress
from pathlib import Path

from batchloom.core.errors import MissingDependencyError, TokenizerError
from batchloom.core.hub_address import check_hub_address

_TOKENIZER = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "chat_template.jinja")
_HTTPX = ("TransportError", "TooManyRedirects", "DecodingError", "StreamError", "InvalidURL")
_OF_THE_NETWORK = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "requests": (
        "ConnectionError",
        "Timeout",
        "TooManyRedirects",
        "InvalidURL",
        "InvalidSchema",
        "MissingSchema",
    ),
    "huggingface_hub.errors": ("XetDownloadError",),
}


def cached_file(repo: str, filename: str = _TOKENIZER) -> Path | None:
    """A file of a repository out of the local Hub cache, None where it is not there.

    Raises:
        InputError: ``HF_ENDPOINT`` is no address.
    """
    check_hub_address()
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional
    except ImportError:
        return None
    found = try_to_load_from_cache(repo, filename)
    return Path(found) if isinstance(found, str) else None


def hub_files(repo: str) -> Path:
    """tokenizer.json; what the repository has of the files that go with it lies beside it.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        TokenizerError: no such repository or file, no access, or no network and not in the cache.
        InputError: ``HF_ENDPOINT`` is no address.
    """
    check_hub_address()
    try:
        import huggingface_hub  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        raise MissingDependencyError(
            f"{repo} is a Hub id, which needs huggingface_hub: pip install 'batchloom[hf]' (or: pip install "
            "datasets transformers), or give the path of a tokenizer.json"
        ) from error
    tokenizer = _fetch(repo, _TOKENIZER, None)
    if tokenizer is None:
        raise TokenizerError(
            f"{repo} on the Hub has no tokenizer.json: load it with transformers, save it with "
            "save_pretrained, and give the folder"
        )
    for name in _BESIDE:
        # Files of one commit lie in one folder, named by the commit.
        _fetch(repo, name, tokenizer.parent.name)
    return tokenizer


def _fetch(repo: str, filename: str, revision: str | None) -> Path | None:
    """The file, from the cache or the Hub; None where the repository has no such file."""
    from huggingface_hub import (  # noqa: PLC0415 - optional
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        known = try_to_load_from_cache(repo, filename, revision=revision)
        if known is not None:
            return Path(known) if isinstance(known, str) else None
        # A download tries a Hub that does not answer many times, and says so each time.
        url = hf_hub_url(repo, filename, revision=revision)
        with suppress(EntryNotFoundError, HfHubHTTPError):
            get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(repo, filename, revision=revision))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _unreachable(repo, filename, error) from error
    except EntryNotFoundError:
        return None
    except GatedRepoError as error:
        raise TokenizerError(
            f"{repo} asks for permission: accept its terms on the Hub, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise TokenizerError(
            f"the Hub has no repository {repo} (or it is private and you are not logged in): "
            "check the name, run `hf auth login`, or give the path of a tokenizer.json"
        ) from error
    except network_errors() as error:
        raise _unreachable(repo, filename, error) from None
    except (HfHubHTTPError, OSError) as error:
        raise TokenizerError(
            f"the Hub did not give {filename} of {repo} ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); try again, or give the path of a tokenizer.json"
        ) from error


def network_errors() -> tuple[type[Exception], ...]:
    """What the Hub's client lets through of its HTTP library: httpx, httpx2 or requests, as its version has it.

    A library that is not loaded has raised nothing.
    """
    found: list[type[Exception]] = []
    for module, names in _OF_THE_NETWORK.items():
        loaded = sys.modules.get(module)
        found += [kind for name in names if (kind := getattr(loaded, name, None)) is not None]
    return tuple(found)


def _unreachable(repo: str, filename: str, error: Exception) -> TokenizerError:
    name = type(error).__name__
    why = "HF_HUB_OFFLINE is set" if name == "OfflineModeIsEnabled" else name
    return TokenizerError(
        f"{filename} of {repo} is not in the local Hub cache and the Hub cannot be reached "
        f"({why}); go online once, or give the path of a tokenizer.json, "
        "bytes, or train:8192"
    )
