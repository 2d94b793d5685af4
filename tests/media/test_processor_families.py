"""Token counts of media, computed from the size, equal the processor's own."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from batchloom import InputError
from batchloom.core.errors import InputMissingError, UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts
from batchloom.media import ProcessorFiles, open_processor, read_processor_files
from batchloom.media.processor import (
    ProbedProcessor,
    collapse_expansion,
    find_processor_disagreement,
    make_full_text,
    render_medium,
)
from batchloom.media.processor_families import (
    FixedSizeFamily,
    PatchGridFamily,
    SplitFamily,
    TileFamily,
    WhisperFamily,
)
from media.processors import PROCESSORS, aya_vision, llava, qwen2_audio, qwen2_vl, save_processor
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


@pytest.fixture(scope="module", params=list(PROCESSORS))
def processors(request, tmp_path_factory):
    """Name, transformers processor, and batchloom's processor of its folder."""
    hf_processor = PROCESSORS[request.param]()
    folder = save_processor(hf_processor, tmp_path_factory.mktemp(request.param))
    return request.param, hf_processor, open_processor(folder)


def test_the_arithmetic_of_a_folder_is_known(processors):
    name, _, processor = processors
    (family,) = processor.families.values()
    assert isinstance(family, FAMILIES[name])
    assert processor.notes == ()


def test_every_size_becomes_the_tokens_of_the_processor(processors):
    _, hf_processor, processor = processors
    (family,) = processor.families.values()

    def check(facts):
        try:
            expected = render_medium(hf_processor, family.kind, facts)
        except UnusableRecordError:
            with pytest.raises(UnusableRecordError):
                family.expand(facts)
            return
        try:
            expansion = family.expand(facts)
        except UnusableRecordError:
            # The processor makes nothing of refused audio, or drops a part.
            assert isinstance(family, WhisperFamily)
            return
        assert make_full_text(family, expansion) == expected

    if family.kind == "audio":
        sounds = st.builds(AudioFacts, st.integers(1, 500_000), st.just(16_000))
        settings(max_examples=examples(25))(given(sounds)(check))()
    else:
        settings(max_examples=examples(60))(given(st.builds(ImageFacts, SIDES, SIDES))(check))()


def test_a_grid_is_the_image_processors():
    hf_processor = qwen2_vl()
    size = hf_processor.image_processor.size
    family = PatchGridFamily("<|image_pad|>", "<|image_pad|>", 14, 2, size["shortest_edge"], size["longest_edge"])
    for width, height in ((336, 224), (20, 300), (1000, 1000), (28, 28)):
        picture = np.zeros((height, width, 3), np.uint8)
        grid = hf_processor.image_processor(images=[picture])["image_grid_thw"][0]
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
    hf_processor = aya_vision()
    processor = open_processor(save_processor(hf_processor, tmp_path))
    family = processor.families["image"]
    assert isinstance(family, ProbedProcessor)
    for width, height in ((100, 60), (14, 14), (400, 30)):
        expected = render_medium(hf_processor, "image", ImageFacts(width, height))
        assert expected.count("<|IMG_PATCH|>") > 0
        assert make_full_text(family, family.expand(ImageFacts(width, height))) == expected
    assert len(family.expand(ImageFacts(400, 30)).runs) > 1


def test_a_family_that_contradicts_the_processor_is_found():
    hf_processor = llava()
    wrong = FixedSizeFamily("<image>", "<image>", 5)
    assert "is written with 4 tokens, not 5" in find_processor_disagreement(
        wrong, hf_processor, hf_processor.image_processor
    )
    grid = PatchGridFamily("<|image_pad|>", "<|image_pad|>", 14, 2, 28 * 28, 28 * 28 * 9)
    assert "becomes a grid of" in find_processor_disagreement(grid, None, qwen2_vl().image_processor)


def test_a_text_is_collapsed_to_its_runs():
    assert collapse_expansion("a<i><i><i>b<i>", "<i>") == ("a<i>b<i>", (3, 1), (0, 0, 0))
    family = FixedSizeFamily("<i>", "<i>", 3)
    assert make_full_text(family, collapse_expansion("a<i><i><i>b<i>", "<i>")) == "a<i><i><i>b<i>"


def test_files_of_a_processor_come_back(tmp_path):
    files = read_processor_files(save_processor(qwen2_audio(), tmp_path / "one"))
    (tmp_path / "two").mkdir()
    files.write(tmp_path / "two")
    read_again = read_processor_files(tmp_path / "two")
    assert read_again == files
    assert read_again.fingerprint == files.fingerprint
    changed = ProcessorFiles(files.name, {"processor_config.json": '{"a": 1}'})
    assert changed.fingerprint != files.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no processor"),
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        ('{"patch_size": 14}', "does not name the class"),
        ('{"processor_class": "NoSuchProcessor"}', "does not report"),
    ],
)
def test_a_folder_without_a_processor_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "processor_config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        open_processor(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputMissingError, match="There is no folder"):
        open_processor(tmp_path / "none")
