"""Loss curves of the tests of training are files without a picture, except where a test looks at one."""

from pathlib import Path

import pytest


def _save_no_pixels(figure, path, **_settings):
    Path(path).touch()


@pytest.fixture(autouse=True, scope="module")
def undrawn_curves():
    """Save figures without pixels: drawing one takes several times as long as training a small model."""
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _save_no_pixels)
        yield patch


@pytest.fixture
def drawn_curves(undrawn_curves):
    """Draw the figures of this test."""
    from matplotlib.figure import Figure

    undrawn_curves.undo()
    yield
    undrawn_curves.setattr(Figure, "savefig", _save_no_pixels)
