"""The number of tokens a medium becomes is the processor's own, from the size alone, for every size."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.core.errors import InputMissingError, UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts
from batchloom.media import ProcessorFiles, open_processor, read_processor_files
from batchloom.media.hf_processor import ProbedProcessor, collapse_expansion, render_medium
from batchloom.media.processor_agreement import find_processor_disagreement, make_full_text
from batchloom.media.processor_families import (
    FixedSizeFamily,
    PatchGridFamily,
    SplitFamily,
    TileFamily,
    WhisperFamily,
)
from media.processors import MADE, aya_vision, llava, qwen2_audio, qwen2_vl, save
from tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FAMILIES = {
    "qwen2_vl": PatchGridFamily,
    "qwen2_5_vl": PatchGridFamily,
    "qwen3_vl": PatchGridFamily,
    "llava": FixedSizeFamily,
    "llava_next": TileFamily,
    "idefics3": SplitFamily,
    "smolvlm": SplitFamily,
    "gemma3": FixedSizeFamily,
    "qwen2_audio": WhisperFamily,
}
SIDES = st.one_of(st.integers(1, 60), st.integers(1, 700))


@pytest.fixture(scope="module", params=list(MADE))
def opened(request, tmp_path_factory):
    """A whole processor, and what is opened of its folder."""
    made = MADE[request.param]()
    folder = save(made, tmp_path_factory.mktemp(request.param))
    return request.param, made, open_processor(folder)


def test_the_arithmetic_of_a_folder_is_known(opened):
    name, _, processor = opened
    (family,) = processor.families.values()
    assert isinstance(family, FAMILIES[name])
    assert processor.notes == ()


def test_every_size_becomes_the_tokens_that_the_processor_writes(opened):
    _, made, processor = opened
    (family,) = processor.families.values()

    def check(facts):
        try:
            expected = render_medium(made, family.kind, facts)
        except UnusableRecordError:
            with pytest.raises(UnusableRecordError):
                family.expand(facts)
            return
        try:
            found = family.expand(facts)
        except UnusableRecordError:
            # Of what is refused the processor makes nothing, or drops a part.
            assert isinstance(family, WhisperFamily)
            return
        assert make_full_text(family, found) == expected

    if family.kind == "audio":
        sounds = st.builds(AudioFacts, st.integers(1, 500_000), st.just(16_000))
        settings(max_examples=examples(25))(given(sounds)(check))()
    else:
        settings(max_examples=examples(60))(given(st.builds(ImageFacts, SIDES, SIDES))(check))()


def test_a_grid_is_the_image_processors():
    made = qwen2_vl()
    size = made.image_processor.size
    family = PatchGridFamily("<|image_pad|>", "<|image_pad|>", 14, 2, size["shortest_edge"], size["longest_edge"])
    for width, height in ((336, 224), (20, 300), (1000, 1000), (28, 28)):
        picture = np.zeros((height, width, 3), np.uint8)
        grid = made.image_processor(images=[picture])["image_grid_thw"][0]
        assert family.expand(ImageFacts(width, height)).grid == tuple(np.asarray(grid).tolist())


def test_a_sound_that_would_be_cut_is_refused():
    family = WhisperFamily("<|AUDIO|>", "<|AUDIO|>", 16_000, 160, 480_000)
    assert family.expand(AudioFacts(480_000, 16_000)).runs == (750,)
    with pytest.raises(
        UnusableRecordError,
        match=r"480,001 samples at 16,000 per second\), but the processor takes at most 30 s",
    ):
        family.expand(AudioFacts(480_001, 16_000))
    with pytest.raises(UnusableRecordError, match="lasts 36000.0 s"):
        family.expand(AudioFacts(36_000 * 44_100, 44_100, 2))
    with pytest.raises(UnusableRecordError, match="too short"):
        family.expand(AudioFacts(200, 16_000))


def test_a_processor_of_unknown_arithmetic_is_run_once_for_each_size(tmp_path):
    made = aya_vision()
    processor = open_processor(save(made, tmp_path))
    family = processor.families["image"]
    assert isinstance(family, ProbedProcessor)
    for width, height in ((100, 60), (14, 14), (400, 30)):
        written = render_medium(made, "image", ImageFacts(width, height))
        assert written.count("<|IMG_PATCH|>") > 0
        assert make_full_text(family, family.expand(ImageFacts(width, height))) == written
    assert len(family.expand(ImageFacts(400, 30)).runs) > 1


def test_what_contradicts_the_installed_processor_is_not_trusted():
    made = llava()
    wrong = FixedSizeFamily("<image>", "<image>", 5)
    assert "is written with 4 tokens, not 5" in find_processor_disagreement(wrong, made, made.image_processor)
    grid = PatchGridFamily("<|image_pad|>", "<|image_pad|>", 14, 2, 28 * 28, 28 * 28 * 9)
    assert "becomes a grid of" in find_processor_disagreement(grid, None, qwen2_vl().image_processor)


def test_a_text_is_collapsed_to_its_runs():
    assert collapse_expansion("a<i><i><i>b<i>", "<i>") == ("a<i>b<i>", (3, 1), (0, 0, 0))
    family = FixedSizeFamily("<i>", "<i>", 3)
    assert make_full_text(family, collapse_expansion("a<i><i><i>b<i>", "<i>")) == "a<i><i><i>b<i>"


def test_files_of_a_processor_come_back(tmp_path):
    files = read_processor_files(save(qwen2_audio(), tmp_path / "one"))
    (tmp_path / "two").mkdir()
    files.write(tmp_path / "two")
    again = read_processor_files(tmp_path / "two")
    assert again == files
    assert again.fingerprint == files.fingerprint
    other = ProcessorFiles(files.name, {"processor_config.json": '{"a": 1}'})
    assert other.fingerprint != files.fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no processor"),
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ('{"patch_size": 14}', "does not name the class"),
        ('{"processor_class": "NoSuchProcessor"}', "does not report"),
    ],
)
def test_a_folder_without_a_processor_is_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "processor_config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        open_processor(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputMissingError, match="There is no folder"):
        open_processor(tmp_path / "none")
