"""The script that takes the screenshots of the documentation."""

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from train.runs import run_training, small_store
from view.conftest import CHROMIUM

SCRIPT = Path(__file__).parents[2] / "docs/take_screenshots.py"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
def test_the_script_takes_every_screenshot_of_the_documentation(chats, tmp_path):
    store = small_store(tmp_path / "s")
    run_training(store, tmp_path / "run", {"steps": 4, "log_row_loss": 1})
    script = runpy.run_path(str(SCRIPT))
    images = tmp_path / "images"
    images.mkdir()
    run_shots = [(name, path.replace("40", "3"), scheme, height) for name, path, scheme, height in script["RUN_SHOTS"]]
    data = [str(chats)], [str(tmp_path / "run"), "--store", str(store.path)]
    # This thread may have the event loop of the other tests' browser.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(script["take_screenshots"], data[0], script["STORE_SHOTS"], images).result()
        thread.submit(script["take_screenshots"], data[1], run_shots, images).result()
    shots = (*script["STORE_SHOTS"], *run_shots)
    assert {image.name for image in images.iterdir()} == {f"{name}.webp" for name, *_ in shots}
    for name, _, _, height in shots:
        with Image.open(images / f"{name}.webp") as image:
            assert image.size == (script["WIDTH"], height)
            # A blank page, or one with only an error, has few colours.
            assert len(image.convert("RGB").getcolors(1 << 24)) > 500
        assert (script["IMAGES"] / f"{name}.webp").exists()
