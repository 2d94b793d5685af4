"""Headers of images and sounds say what decoding gives; what is cut, damaged, hostile or too large is refused."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from batchloom import SettingsError
from batchloom.core.errors import UnusableRecordError
from batchloom.core.medium import AudioFacts, ImageFacts, Medium
from batchloom.media import (
    BytesContent,
    FileContent,
    FrameSampling,
    MediaInspector,
    MediaLimits,
    MediaResolver,
    decode_audio,
    decode_image,
    hash_edges,
    inspect_audio,
    inspect_image,
    read_edges,
)
from batchloom.media.mp3 import count_mp3_samples, has_mp3_length, is_mp3
from media.made import encoded, noise, picture, sound
from media.web import hanging, serving

LIMITS = MediaLimits()
FORMS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_an_image_is_what_decoding_gives(form):
    data = encoded(picture(), form)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)
    assert decode_image(BytesContent(data)).size == (30, 20)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), form, exif=exif)
    facts, image = inspect_image(BytesContent(data), LIMITS), decode_image(BytesContent(data))
    assert (facts.width, facts.height) == image.size == ((30, 20), (20, 30))[orientation > 4]


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'


def turned(form):
    """An image of 30 x 20 whose orientation stands in XMP, or in an older text of a PNG."""
    from PIL.PngImagePlugin import PngInfo
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    if form == "TIFF":
        tags = ImageFileDirectory_v2()
        tags[700], tags.tagtype[700] = XMP, 1
        return encoded(picture(), form, tiffinfo=tags)
    texts = PngInfo()
    if form == "PNG with XMP":
        texts.add_itxt("XML:com.adobe.xmp", XMP.decode())
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = exif.tobytes().hex()
        texts.add_text("Raw profile type exif", f"\nexif\n{len(data) // 2:8d}\n{data}\n", zip=True)
    return encoded(picture(), "PNG", pnginfo=texts)


@pytest.mark.parametrize("form", ["PNG with XMP", "PNG with a raw profile", "TIFF"])
def test_images_are_turned_as_other_texts_of_theirs_say(form):
    facts, image = (
        inspect_image(BytesContent(turned(form)), LIMITS),
        decode_image(BytesContent(turned(form))),
    )
    assert (facts.width, facts.height) == image.size == (20, 30)


def test_headers_are_all_that_is_read_of_large_files(tmp_path):
    asked = []

    class Counted:
        def __init__(self, data):
            self.data, self.size = data, len(data)

        def read(self, start, stop):
            found = self.data[start:stop]
            asked.append(len(found))
            return found

    big = np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(big), "PNG")
    assert len(data) > 5_000_000
    inspect_image(Counted(data), LIMITS)
    assert sum(asked) < 400_000
    asked.clear()
    data = sound(16_000 * 200)
    inspect_audio(Counted(data), LIMITS)
    assert sum(asked) < 800_000


def test_sounds_of_no_numbers_are_refused():
    import soundfile

    for value in (np.nan, np.inf, 1e30):
        data = noise(16_000)
        data[77] = value
        buffer = io.BytesIO()
        soundfile.write(buffer, data, 16_000, format="WAV", subtype="FLOAT")
        whole = BytesContent(buffer.getvalue())
        with pytest.raises(UnusableRecordError, match="samples that are not numbers"):
            decode_audio(whole, inspect_audio(whole, LIMITS), 16_000)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_image_that_is_cut_anywhere_is_refused(form):
    data = encoded(picture(64, 48), form)
    whole = np.asarray(decode_image(BytesContent(data)))
    refused = 0
    for size in [*range(0, len(data) - 1, max(1, len(data) // 40)), len(data) - 1]:
        cut = BytesContent(data[:size])
        try:
            inspect_image(cut, LIMITS)
        except UnusableRecordError:
            refused += 1
            continue
        # All but the mark of the end is there.
        assert size >= len(data) - 16
        assert np.array_equal(np.asarray(decode_image(cut)), whole)
    assert refused >= 40


def test_what_stands_behind_an_image_does_no_harm():
    data = encoded(picture(), "JPEG") + b"\x00" * 40 + b"a trailer of some camera"
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)


def test_a_large_header_is_read_to_its_end():
    data = encoded(picture(), "JPEG", icc_profile=b"x" * 200_000)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr"])
def test_images_of_any_colours_become_rgb(mode):
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = encoded(picture().convert(mode), form)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)
    found = decode_image(BytesContent(data))
    assert (found.mode, found.size) == ("RGB", (30, 20))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_images_of_16_bits_keep_their_shades(form):
    shades = np.linspace(0, 65_535, 600).astype(np.uint16).reshape(20, 30)
    found = np.asarray(decode_image(BytesContent(encoded(Image.fromarray(shades), form))))
    assert np.array_equal(found[..., 0], shades >> 8)


def test_pixels_whose_white_nobody_knows_are_refused():
    data = encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(UnusableRecordError, match="of an unknown value range"):
        decode_image(BytesContent(data))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animated_image_the_first_picture_is_read(form):
    second = Image.new("RGB", (30, 20), "red")
    data = encoded(picture(), form, save_all=True, append_images=[second], lossless=True)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20, animated=True)
    assert np.asarray(decode_image(BytesContent(data))).std() > 10


def bomb():
    """A PNG of a few bytes that says it has 60,000 x 60,000 pixels."""

    def chunk(kind, data):
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"<?xml version='1.0'?><svg/>", "an SVG drawing"),
        (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
        (b"%PDF-1.7", "which is not the start of a supported image: JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "which is not the start of a supported image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIF image"),
        (bomb(), r"60,000 x 60,000 pixels, more than the 100,000,000 that are allowed"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "begins as JPEG but cannot be read as JPEG"),
    ],
)
def test_what_is_no_image_is_told_for_what_it_is(data, said):
    with pytest.raises(UnusableRecordError, match=said):
        inspect_image(BytesContent(data), LIMITS)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("MP3", None),
        ("AIFF", None),
    ],
)
def test_the_length_of_a_sound_is_what_decoding_gives(form, subtype, rate):
    for samples, channels in ((1, 1), (777, 2), (20_001, 1)):
        data = sound(samples, rate, channels, form, subtype)
        facts = inspect_audio(BytesContent(data), LIMITS)
        assert facts == AudioFacts(samples, rate, channels)
        heard = decode_audio(BytesContent(data), facts, 16_000)
        assert (heard.dtype, len(heard)) == (np.float32, -(-samples * 16_000 // rate))


def test_sounds_are_heard_as_librosa_hears_them():
    """``librosa.load``: the mean of the channels, resampled by soxr's HQ, as long as the time says."""
    import soxr

    data = noise(30_000, 2)
    heard = decode_audio(
        BytesContent(sound(30_000, 44_100, 2, "WAV", "FLOAT")),
        AudioFacts(30_000, 44_100, 2),
        16_000,
    )
    expected = soxr.resample(data.mean(axis=1), 44_100, 16_000, quality="HQ")
    size = min(len(heard), len(expected))
    assert np.abs(heard[:size] - expected[:size]).max() < 1e-6
    assert len(heard) == -(-30_000 * 16_000 // 44_100)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "AIFF"])
def test_a_sound_that_is_cut_is_refused(form):
    data = sound(30_000, form=form)
    for size in (0, 10, 100, len(data) // 3, len(data) - 2_000, len(data) - 1):
        with pytest.raises(UnusableRecordError):
            decode_audio(BytesContent(data[:size]), inspect_audio(BytesContent(data[:size]), LIMITS), 16_000)


@pytest.mark.parametrize(("form", "subtype"), [("OGG", "VORBIS"), ("MP3", None)])
def test_where_pages_end_a_cut_sound_is_a_shorter_one(form, subtype):
    data = sound(30_000, form=form, subtype=subtype)
    for size in range(10, len(data), len(data) // 30):
        cut = BytesContent(data[:size])
        try:
            facts = inspect_audio(cut, LIMITS)
        except UnusableRecordError:
            continue
        assert len(decode_audio(cut, facts, 16_000)) == facts.samples <= 30_000


def test_an_mp3_that_does_not_say_how_long_it_is(capfd):
    import soundfile

    data = np.concatenate([noise(48_000), np.zeros((144_000, 1), np.float32), noise(48_000)])
    buffer = io.BytesIO()
    settings = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "VARIABLE"}
    with soundfile.SoundFile(buffer, "w", samplerate=48_000, channels=1, compression_level=0.5, **settings) as file:
        file.write(data)
    whole = BytesContent(buffer.getvalue())
    assert is_mp3(whole)
    assert has_mp3_length(whole)
    assert inspect_audio(whole, LIMITS).samples == len(data)
    first = next(
        at
        for at in range(4, 4_000)
        if is_mp3(BytesContent(whole.read(at, whole.size)))
        and count_mp3_samples(BytesContent(whole.read(at, whole.size))) > 200_000
    )
    bare = BytesContent(whole.read(first, whole.size))
    assert not has_mp3_length(bare)
    with pytest.raises(UnusableRecordError, match="MP3 of variable bit rate that does not state its length"):
        inspect_audio(bare, LIMITS)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"RIFF\x08\0\0\0WAVEjunk", "cannot be read as audio"),
        (b"not a sound at all", "cannot be read as audio"),
        (sound(0), "holds no samples"),
        (sound(16_000 * 9, 16_000), "lasts 9.0 s, more than the 5.0 s"),
    ],
)
def test_what_is_no_sound_is_told(data, said):
    with pytest.raises(UnusableRecordError, match=said):
        inspect_audio(BytesContent(data), MediaLimits(audio_seconds=5))


def test_edges_tell_media_apart(tmp_path):
    data = bytes(range(256)) * 1024
    (tmp_path / "a").write_bytes(data)
    with FileContent(tmp_path / "a") as file:
        assert read_edges(file) == (data[:65_536], data[-65_536:])
        found = hash_edges(file.size, *read_edges(file))
    assert found == hash_edges(len(data), *read_edges(BytesContent(data)))
    assert found.hex() == "84ea68b89f3236554372c8c2f17b43e7"
    for other in (data[:-1], data + b"x", b"x" + data[1:], data[:-1] + b"x"):
        assert hash_edges(len(other), *read_edges(BytesContent(other))) != found
    short = b"abc"
    assert hash_edges(3, *read_edges(BytesContent(short))) != hash_edges(3, *read_edges(BytesContent(b"abd")))


def test_paths_begin_at_the_folder_and_never_leave_it(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.png").write_bytes(encoded(picture(), "PNG"))
    (tmp_path / "out.png").write_bytes(encoded(picture(), "PNG"))
    places = MediaResolver(str(tmp_path / "in"))
    look = MediaInspector(places, ["image"], FrameSampling(), embed=False)
    ((found,),) = look([Medium("image", "deep/../a.png")])
    assert found.info.facts == ImageFacts(30, 20)
    assert look([Medium("image", str(tmp_path / "in" / "a.png"))])[0][0].info == found.info
    assert look([Medium("image", f"file://{tmp_path}/in/a.png")])[0][0].info == found.info
    for place in ("../out.png", str(tmp_path / "out.png"), "/etc/passwd", "a/../../out.png"):
        with pytest.raises(UnusableRecordError, match="is outside"):
            look([Medium("image", place)])
    with pytest.raises(UnusableRecordError, match=r"image 1 \(b.png\) is missing"):
        look([Medium("image", "b.png")])
    with pytest.raises(UnusableRecordError, match="cannot be read"):
        look([Medium("image", "deep")])
    with pytest.raises(UnusableRecordError, match="with an unsupported scheme"):
        look([Medium("image", "ftp://h/a.png")])
    with pytest.raises(UnusableRecordError, match="is audio, but the processor takes only image"):
        look([Medium("audio", "a.wav")])


def test_below_a_url_paths_stay_there():
    places = MediaResolver("https://host/data")
    assert places.resolve("a/b.png") == "https://host/data/a/b.png"
    assert places.resolve("https://other/c.png") == "https://other/c.png"
    for place in ("../b.png", "/b.png"):
        with pytest.raises(UnusableRecordError, match="is outside"):
            places.resolve(place)


def test_media_of_the_web_come_whole_or_are_refused():
    data = encoded(picture(), "PNG")
    with serving({"/a.png": data, "/page.png": b"<html>log in</html>"}) as address:
        look = MediaInspector(
            MediaResolver(".", MediaLimits(file_bytes=100_000)),
            ["image"],
            FrameSampling(),
            embed=False,
        )
        ((found,),) = look([Medium("image", f"{address}/a.png")])
        assert found.info.facts == ImageFacts(30, 20)
        assert found.info.size == len(data)
        with pytest.raises(UnusableRecordError, match="is missing"):
            look([Medium("image", f"{address}/none.png")])
        with pytest.raises(UnusableRecordError, match="is an HTML page"):
            look([Medium("image", f"{address}/page.png")])
        small = MediaInspector(MediaResolver(".", MediaLimits(file_bytes=100)), ["image"], FrameSampling(), embed=False)
        with pytest.raises(UnusableRecordError, match="at most 100 are allowed"):
            small([Medium("image", f"{address}/a.png")])


def test_a_url_that_hangs_is_given_up():
    with hanging() as address:
        look = MediaInspector(
            MediaResolver(".", MediaLimits(fetch_seconds=0.5)),
            ["image"],
            FrameSampling(),
            embed=False,
        )
        with pytest.raises(UnusableRecordError, match=r"was not downloaded within 0.5 s"):
            look([Medium("image", f"{address}/a.png")])


def test_limits_that_are_none_are_told_at_once():
    with pytest.raises(SettingsError) as told:
        MediaLimits(image_pixels=0, audio_seconds=-1, file_bytes="much", fetch_seconds=float("nan"))
    assert len(told.value.problems) == 4
