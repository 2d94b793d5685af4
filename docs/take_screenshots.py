"""Take the screenshots of docs/how-to/check/view.md from a store of real conversations.

    python docs/take_screenshots.py STORE RUN MIXTURE

It needs Chromium, playwright and Pillow.
"""

import io
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
WIDTH, MAX_BYTES = 1120, 60_000
# Name, address, colour scheme and height.
Shot = tuple[str, str, str, int]
STORE_SHOTS: tuple[Shot, ...] = (
    ("view-overview", "/", "light", 835),
    ("view-document", "/document/40", "light", 590),
    ("view-packing", "/packing?step=3", "dark", 555),
)
RUN_SHOTS: tuple[Shot, ...] = (("view-run", "/run?step=40", "light", 1130),)


def take_screenshots(arguments: list[str], shots: tuple[Shot, ...], folder: Path = IMAGES) -> None:
    """Serve data and write one WebP image per page to a folder."""
    command = [sys.executable, "-m", "batchloom", "view", *arguments, "--no-browser"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,  # noqa: S603 - our own command
        sync_playwright() as playwright,
    ):
        try:
            address = next(iter(server.stdout or ())).strip()
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(address)
            for name, path, scheme, height in shots:
                page.set_viewport_size({"width": WIDTH, "height": height})
                page.emulate_media(color_scheme=scheme)
                page.goto("/".join(address.split("/")[:3]) + path)
                page.wait_for_load_state("networkidle")
                file = folder / f"{name}.webp"
                Image.open(io.BytesIO(page.screenshot())).save(file, "WEBP", quality=80, method=6)
                if file.stat().st_size > MAX_BYTES:
                    raise SystemExit(f"{file} has {file.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}.")
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    take_screenshots([sys.argv[1]], STORE_SHOTS)
    take_screenshots([sys.argv[2], "--mixture", sys.argv[3]], RUN_SHOTS)
