"""``batchloom upload``."""

from pathlib import Path
from typing import Annotated

from batchloom.cli.options import Argument, AsJson
from batchloom.cli.prepare import ProgressDisplay
from batchloom.cli.terminal import report
from batchloom.core.wording import format_count, format_size
from batchloom.preparation import upload_store


def upload(
    path: Annotated[Path, Argument(metavar="STORE", help="Folder of a finished store.")],
    url: Annotated[
        str,
        Argument(
            metavar="URL",
            help="Folder in an object store (s3://bucket/prefix) that is empty or holds a part of this store.",
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Upload a finished store to an object store.

    Run the same command again to resume an interrupted upload.
    """
    with ProgressDisplay() as display:
        result = upload_store(path, url, progress=display.show)
    size = f"{format_count(result.files, 'file')}, {format_size(result.bytes)}"
    if result.sent_bytes:
        text = f"{result.path}: {size}; {format_size(result.sent_bytes)} sent now."
    else:
        text = f"{result.path} holds this store already: {size}; nothing to do."
    report(result, [text], as_json=as_json)
