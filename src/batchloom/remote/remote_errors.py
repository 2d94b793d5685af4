"""Classification and description of remote errors, without secrets of a URL.

Libraries put the complete URL into their errors, with its signature. So their messages
are not repeated here, and their errors are not chained to ours.
"""

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from batchloom.core.addresses import get_scheme, redact_url
from batchloom.core.errors import AccessError, DownloadError, InputError, InputMissingError, OutputError

FaultKind = Literal["missing", "denied", "unreachable", "passing", "refused"]

# Library errors that are not OSErrors, by module. A module that is not loaded cannot have raised one.
_LIBRARY_ERRORS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
_UNREACHABLE_ERRORS = (
    "ClientConnectorError",
    "ClientConnectorDNSError",
    "EndpointConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "ConnectTimeoutError",
    "ConnectionTimeoutError",
    "TransportError",
)
_BAD_ADDRESS = "its address is invalid or incomplete ({})"
_ADDRESS_ERRORS = ("InvalidURL", "InvalidUrlClientError", "ParamValidationError")
_CREDENTIAL_ERRORS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Codes of object stores with status 400 or 409 for a body that arrived broken or late, or for a concurrent
# request.
_TRANSIENT_CODES = (
    "RequestTimeout",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
    "Throttling",
    "ThrottlingException",
)
# These codes come with status 400, too.
_DENIED_CODES = ("ExpiredToken", "InvalidToken", "ExpiredTokenException", "TokenRefreshRequired")
_CREDENTIAL_REMEDIES = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}


@dataclass(frozen=True, slots=True)
class RemoteFault:
    """Meaning and description of a library error."""

    kind: FaultKind
    description: str


class AnswerError(OSError):
    """Error response that a library reports only as text; ``status`` is its code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


def list_library_errors() -> tuple[type[BaseException], ...]:
    """Return the error types of the loaded libraries that mean a remote fault."""
    error_types: list[type[BaseException]] = [OSError]
    for module, name in _LIBRARY_ERRORS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            error_types.append(kind)
    return tuple(error_types)


def classify_error(error: BaseException) -> RemoteFault:
    """Classify an error by its own status or type first, then by its causes."""
    chain = list(_iter_causes(error))
    if any(type(cause).__name__ in _CREDENTIAL_ERRORS for cause in chain):
        return RemoteFault("denied", "no credentials were found")
    status = next(filter(None, map(_get_status, chain)), None)
    if status is None and isinstance(error, PermissionError):
        status = 403
    if status is None and isinstance(error, FileNotFoundError):
        status = 404
    if status is not None and status >= 400:
        return _classify_status(status, next(filter(None, map(_get_error_code, chain)), ""))
    return _classify_type(error, chain)


def classify_address_error(error: Exception) -> RemoteFault:
    """Classify an error of a library that rejects the address or the response."""
    if isinstance(error, json.JSONDecodeError):
        return RemoteFault("refused", "its server did not answer with JSON")
    return RemoteFault("refused", _BAD_ADDRESS.format(type(error).__name__))


def _classify_status(status: int, code: str) -> RemoteFault:
    description = f"{status} {code}".strip()
    if status in (401, 403) or code in _DENIED_CODES:
        return RemoteFault("denied", f"the server answered {description}")
    if status in (404, 410):
        return RemoteFault("missing", "it does not exist")
    is_transient = status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    return RemoteFault("passing" if is_transient else "refused", f"the server answered {description}")


def _classify_type(error: BaseException, chain: list[BaseException]) -> RemoteFault:
    names = {type(cause).__name__ for cause in chain}
    if "OfflineModeIsEnabled" in names:
        return RemoteFault("unreachable", "HF_HUB_OFFLINE is set")
    if "SSLCertVerificationError" in names:
        return RemoteFault("refused", "the certificate of its server cannot be verified")
    if any(isinstance(cause, socket.gaierror) for cause in chain) or "ClientConnectorDNSError" in names:
        return RemoteFault("unreachable", "the host name of its server cannot be resolved")
    if any(isinstance(cause, ConnectionRefusedError) for cause in chain):
        return RemoteFault("unreachable", "the connection was refused")
    if names.intersection(_ADDRESS_ERRORS):
        return RemoteFault("refused", _BAD_ADDRESS.format(type(error).__name__))
    if names.intersection(_UNREACHABLE_ERRORS):
        return RemoteFault("unreachable", "there is no connection to its server")
    if isinstance(error, TimeoutError):
        return RemoteFault("passing", "no answer in time")
    return RemoteFault("passing", f"the connection broke ({type(error).__name__})")


def make_remote_error(fault: RemoteFault, url: str) -> InputError:
    """Make the error to raise for a permanent fault of a URL."""
    redacted_url = redact_url(url)
    if fault.kind == "missing":
        return InputMissingError(f"There is no file or folder {redacted_url}.")
    if fault.kind == "denied":
        return AccessError(
            f"Access to {redacted_url} is denied: {fault.description}; {_describe_remedy(fault, url, 'read')}."
        )
    if fault.kind == "refused":
        return DownloadError(f"{redacted_url} cannot be read: {fault.description}; {_describe_address(url)}.")
    return DownloadError(
        f"Failed to download {redacted_url}: {fault.description}; check the network and the address, then give the "
        "same command again."
    )


def make_write_error(fault: RemoteFault, url: str, tries: int = 1) -> OutputError:
    """Make the error to raise when a URL cannot be written."""
    redacted_url = redact_url(url)
    if fault.kind == "missing":
        return OutputError(
            f"Cannot write {redacted_url}: there is no such bucket or folder; create it first, or check the address."
        )
    if fault.kind == "denied":
        return OutputError(
            f"Cannot write {redacted_url}: {fault.description}; {_describe_remedy(fault, url, 'write')}, then give the "
            "same command again."
        )
    if fault.kind == "refused":
        return OutputError(f"Cannot write {redacted_url}: {fault.description}; check the address.")
    attempts_note = f" ({tries} tries)" if tries > 1 else ""
    return OutputError(
        f"Cannot write {redacted_url}: {fault.description}{attempts_note}; check the network and the address, then "
        "give the same command again to resume."
    )


def _describe_address(url: str) -> str:
    """Describe what to do about an address that cannot be read."""
    if get_scheme(url) == "hf":
        return "check its address, which begins with hf://datasets/ORG/NAME"
    return "check its address"


def _describe_remedy(fault: RemoteFault, url: str, action: str) -> str:
    """Describe how to fix denied access."""
    if "RequestTimeTooSkewed" in fault.description:
        return "set the clock of this machine"
    credentials = _CREDENTIAL_REMEDIES.get(get_scheme(url).replace("s3a", "s3").replace("gcs", "gs"))
    return f"give credentials that may {action} it ({credentials})" if credentials else f"check who may {action} it"


def _iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        yield error
        # aiohttp stores the system's error in an attribute, outside the exception chain.
        os_error = getattr(error, "os_error", None)
        if isinstance(os_error, BaseException):
            yield os_error
        error = error.__cause__ or error.__context__


def _get_status(error: Any) -> int | None:
    """Return the HTTP status of an error; each library stores it in another attribute."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(response, "status_code", None) or getattr(error, "status", None)
        if type(error).__module__.startswith("gcsfs"):
            status = error.code
    return status if isinstance(status, int) else None


def _get_error_code(error: Any) -> str:
    """Return the error code of an object store; empty if there is none."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    word = str(response.get("Error", {}).get("Code", ""))
    return word if word.isalnum() and not word.isdigit() else ""
