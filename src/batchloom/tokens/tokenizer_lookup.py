"""Resolution of ``--tokenizer``: built-in, Hub and OpenAI tokenizers, files."""

import base64
import binascii
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from batchloom.core.errors import BatchloomError, MissingDependencyError, TokenizerError
from batchloom.core.files import describe_os_error, read_regular_file, refuse_url
from batchloom.core.settings import suggest
from batchloom.remote import check_hub_endpoint
from batchloom.tokens.json_tokenizer import parse_train_spec
from batchloom.tokens.local_tokenizers import (
    TokenizerHints,
    load_tokenizer_from_path,
    make_json_tokenizer,
    read_sidecar_hints,
    read_tokenizer_json,
)
from batchloom.tokens.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer
from batchloom.tokens.tokenizer_definition import GPT2_PRE_TOKENIZER, make_byte_alphabet, make_byte_level_json

_SPEC_FORMS = (
    "give bytes, gpt2, train:8192, tiktoken:NAME, the path of a tokenizer.json or of its folder, "
    "or a Hub id such as org/name"
)
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def resolve_tokenizer(spec: str, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that a spec names.

    ``bytes`` and ``gpt2`` always mean those tokenizers; write ``./gpt2`` for a folder of that name.

    Args:
        spec: ``bytes``; ``gpt2``; ``tiktoken:NAME`` or ``tiktoken:PATH.tiktoken``; the path of a
            tokenizer.json, of a folder with one, or of a store; else a Hub id ``org/name``. A spec
            that exists as a path, ends in ``.json`` or starts with ``.``, ``/`` or ``~`` is never
            looked up on the Hub.
        end_token: token that ends a document; ``config`` for the ``eos_token`` of tokenizer_config.json; None for
            the tokenizer's own.

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
        return make_json_tokenizer("gpt2", _load_gpt2_json(), TokenizerHints(), end_token)
    if parse_train_spec(spec) is not None:
        raise TokenizerError(
            f"{spec} is learned from the input it is for: give it to `batchloom prepare`, or call "
            "train_tokenizer with texts"
        )
    if spec.startswith("tiktoken:"):
        name, raw = make_tiktoken_json(spec.removeprefix("tiktoken:"))
        return make_json_tokenizer(f"tiktoken:{name}", raw, TokenizerHints(), end_token)
    refuse_url(spec, "The tokenizer")
    path = Path(os.path.expanduser(spec))
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
        import huggingface_hub  # noqa: F401 - optional
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
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (
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


_MAX_BYTES = 1 << 28
_RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"

# The patterns as first published. tiktoken's current spelling uses syntax that other regex
# dialects interpret differently ($, possessive counts); both give the same ids on these vocabularies.
_CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TiktokenEncoding(NamedTuple):
    """A published encoding."""

    # Ranks file of its tokens: name, sha256 of its lines, number of tokens.
    ranks_name: str
    sha256: str
    size: int
    # Special tokens and their ids.
    control: Mapping[str, int]
    # Pre-tokenization regex; None for GPT-2's.
    pattern: str | None = None


_GPT2_ENCODING = TiktokenEncoding(
    "r50k_base", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", 50256, {END_OF_TEXT: 50256}
)
TIKTOKEN_ENCODINGS: dict[str, TiktokenEncoding] = {
    "gpt2": _GPT2_ENCODING,
    "r50k_base": _GPT2_ENCODING,
    "p50k_base": TiktokenEncoding(
        "p50k_base", "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069", 50280, {END_OF_TEXT: 50256}
    ),
    "cl100k_base": TiktokenEncoding(
        "cl100k_base",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        100256,
        {
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        _CL100K_PATTERN,
    ),
    "o200k_base": TiktokenEncoding(
        "o200k_base",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        199998,
        {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
        _O200K_PATTERN,
    ),
}


def make_tiktoken_json(target: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the tokenizer.json of an encoding.

    ``target`` is the encoding's name, or the path of its ``.tiktoken`` ranks file. Raises TokenizerError for an
    unknown name, a missing or modified file, or a failed download, and MissingDependencyError for a name without
    the package tiktoken.
    """
    path = Path(os.path.expanduser(target))
    is_file = path.suffix == ".tiktoken"
    name = path.stem if is_file else target
    encoding = TIKTOKEN_ENCODINGS.get(name)
    if encoding is None:
        raise TokenizerError(
            f"tiktoken:{target}: {name!r} is not an encoding{suggest(name, TIKTOKEN_ENCODINGS)}; the encodings are "
            f"{', '.join(TIKTOKEN_ENCODINGS)}; a ranks file carries the encoding's name, such as "
            "cl100k_base.tiktoken"
        )
    ranks = _read_ranks_file(path) if is_file else _load_ranks_with_tiktoken(encoding)
    _check_ranks(ranks, encoding, str(target) if is_file else f"tiktoken:{name}")
    return name, convert_ranks_to_json(ranks, encoding.pattern, encoding.control)


def _read_ranks_file(path: Path) -> dict[bytes, int]:
    """Read the ranks in a file of lines ``base64 rank``."""
    try:
        lines = read_regular_file(path, _MAX_BYTES).splitlines()
    except OSError as error:
        raise TokenizerError(
            f"tiktoken:{path}: cannot be read ({describe_os_error(error)}); give the path of a .tiktoken "
            "file, or the name of an encoding"
        ) from error
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{path}, line {number}: {line[:40]!r} is not a token in base64 and its rank"
            ) from error
    return ranks


def _load_ranks_with_tiktoken(encoding: TiktokenEncoding) -> dict[bytes, int]:
    """Load the ranks from tiktoken's own cache, else let it download them."""
    try:
        from tiktoken.load import load_tiktoken_bpe
    except ImportError as error:
        raise MissingDependencyError(
            f"tiktoken:{encoding.ranks_name} needs the package tiktoken: pip install tiktoken, "
            f"or give the file: tiktoken:path/to/{encoding.ranks_name}.tiktoken"
        ) from error
    try:
        loaded: dict[bytes, int] = load_tiktoken_bpe(_RANKS_URL.format(encoding.ranks_name), encoding.sha256)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the ranks of tiktoken:{encoding.ranks_name} are not in tiktoken's cache and cannot be "
            f"downloaded ({type(error).__name__}); go online once, set TIKTOKEN_CACHE_DIR to a "
            f"cache that has them, or give the file: tiktoken:path/to/{encoding.ranks_name}.tiktoken"
        ) from error
    return loaded


def _check_ranks(ranks: Mapping[bytes, int], encoding: TiktokenEncoding, label: str) -> None:
    """Refuse modified ranks: a name must always mean the same ids."""
    lines = sorted(ranks.items(), key=lambda pair: pair[1])
    text = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in lines)
    if hashlib.sha256(text).hexdigest() != encoding.sha256:
        raise TokenizerError(
            f"{label} does not hold the published ranks of {encoding.ranks_name}: it has {len(ranks)} "
            f"tokens instead of {encoding.size}, or other tokens; fetch the file again, or "
            "convert your own ranks to a tokenizer.json under another name"
        )


def convert_ranks_to_json(
    ranks: Mapping[bytes, int], pattern: str | None, control: Mapping[str, int]
) -> dict[str, Any]:
    """Convert ranks to a tokenizer.json with ids as in tiktoken's ``encode_ordinary``.

    tiktoken always merges the neighbours whose union has the lowest rank. When it merges x and y to
    t, all lower ranks are exhausted, so the ranks below t's split t alone into x and y.
    One merge per token therefore gives the same ids as all of them. ``pattern`` None means GPT-2's.
    """
    alphabet = make_byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join([alphabet[byte] for byte in token])

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        parts = _split_token(token, rank, ranks) if len(token) > 1 else []
        if len(parts) == 2:
            merges.append([spell(part) for part in parts])
    vocab = {spell(token): rank for token, rank in ranks.items()} | dict(control)
    free = set(range(max(vocab.values()))).difference(vocab.values())
    # Engines need ids without gaps. No text spells these tokens, because a space is not in the alphabet.
    vocab |= {f" unused {number}": number for number in sorted(free)}
    split: dict[str, Any] = GPT2_PRE_TOKENIZER
    if pattern is not None:
        regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
        parts_json = [{**regex, "invert": False}, {**GPT2_PRE_TOKENIZER, "use_regex": False}]
        split = {"type": "Sequence", "pretokenizers": parts_json}
    return make_byte_level_json(vocab, merges, dict(control), pre_tokenizer=split, ignore_merges=True)


def _split_token(token: bytes, limit: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Split ``token`` with the ranks below ``limit``."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joins = [ranks.get(a + b, limit) for a, b in itertools.pairwise(parts)]
        lowest = min(joins)
        if lowest >= limit:
            break
        index = joins.index(lowest)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def _load_gpt2_json() -> dict[str, Any]:
    """Return GPT-2's tokenizer.json, made from its merges.

    The ids are those of the bytes, in the order of their characters, then one per merge, then the control token.
    """
    text = Path(__file__).with_name("gpt2_vocab.bpe").read_text("utf-8")
    merges = [line.split(" ") for line in text.splitlines()[1:]]
    tokens = [*sorted(make_byte_alphabet()), *map("".join, merges), END_OF_TEXT]
    vocab = {token: number for number, token in enumerate(tokens)}
    control = {END_OF_TEXT: vocab[END_OF_TEXT]}
    return make_byte_level_json(vocab, merges, control, pre_tokenizer=GPT2_PRE_TOKENIZER)
