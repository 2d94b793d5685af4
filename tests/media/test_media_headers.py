"""Facts read from media headers equal those of decoding; bad media are refused."""

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
from batchloom.media.audio import count_mp3_samples, has_mp3_length, is_mp3
from media.media_servers import open_silent_server, serve_files
from media.sample_media import encode_image, make_image, make_noise, make_sound

LIMITS = MediaLimits()
FORMS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")


@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_an_image_is_that_of_decoding(form):
    data = encode_image(make_image(), form)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)
    assert decode_image(BytesContent(data)).size == (30, 20)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(make_image(), form, exif=exif)
    facts, image = inspect_image(BytesContent(data), LIMITS), decode_image(BytesContent(data))
    assert (facts.width, facts.height) == image.size == ((30, 20), (20, 30))[orientation > 4]


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'


def make_rotated_image(form):
    """Return a 30 x 20 image with its orientation in XMP or a raw PNG profile."""
    from PIL.PngImagePlugin import PngInfo
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    if form == "TIFF":
        tags = ImageFileDirectory_v2()
        tags[700], tags.tagtype[700] = XMP, 1
        return encode_image(make_image(), form, tiffinfo=tags)
    texts = PngInfo()
    if form == "PNG with XMP":
        texts.add_itxt("XML:com.adobe.xmp", XMP.decode())
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        data = exif.tobytes().hex()
        texts.add_text("Raw profile type exif", f"\nexif\n{len(data) // 2:8d}\n{data}\n", zip=True)
    return encode_image(make_image(), "PNG", pnginfo=texts)


@pytest.mark.parametrize("form", ["PNG with XMP", "PNG with a raw profile", "TIFF"])
def test_images_are_turned_by_xmp_and_raw_profiles(form):
    facts, image = (
        inspect_image(BytesContent(make_rotated_image(form)), LIMITS),
        decode_image(BytesContent(make_rotated_image(form))),
    )
    assert (facts.width, facts.height) == image.size == (20, 30)


def test_only_headers_of_large_files_are_read(tmp_path):
    read_sizes = []

    class CountingContent:
        def __init__(self, data):
            self.data, self.size = data, len(data)

        def read(self, start, stop):
            data_range = self.data[start:stop]
            read_sizes.append(len(data_range))
            return data_range

    big = np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), dtype=np.uint8)
    data = encode_image(Image.fromarray(big), "PNG")
    assert len(data) > 5_000_000
    inspect_image(CountingContent(data), LIMITS)
    assert sum(read_sizes) < 400_000
    read_sizes.clear()
    data = make_sound(16_000 * 200)
    inspect_audio(CountingContent(data), LIMITS)
    assert sum(read_sizes) < 800_000


def test_sounds_with_nan_samples_are_refused():
    import soundfile

    for value in (np.nan, np.inf, 1e30):
        data = make_noise(16_000)
        data[77] = value
        buffer = io.BytesIO()
        soundfile.write(buffer, data, 16_000, format="WAV", subtype="FLOAT")
        content = BytesContent(buffer.getvalue())
        with pytest.raises(UnusableRecordError, match="samples that are not numbers"):
            decode_audio(content, inspect_audio(content, LIMITS), 16_000)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_image_that_is_cut_anywhere_is_refused(form):
    data = encode_image(make_image(64, 48), form)
    pixels = np.asarray(decode_image(BytesContent(data)))
    refused = 0
    for size in [*range(0, len(data) - 1, max(1, len(data) // 40)), len(data) - 1]:
        cut = BytesContent(data[:size])
        try:
            inspect_image(cut, LIMITS)
        except UnusableRecordError:
            refused += 1
            continue
        # Only the end marker is missing.
        assert size >= len(data) - 16
        assert np.array_equal(np.asarray(decode_image(cut)), pixels)
    assert refused >= 40


def test_trailing_bytes_of_an_image_are_ignored():
    data = encode_image(make_image(), "JPEG") + b"\x00" * 40 + b"a trailer of some camera"
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)


def test_a_large_header_is_read_to_its_end():
    data = encode_image(make_image(), "JPEG", icc_profile=b"x" * 200_000)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr"])
def test_images_of_any_colours_become_rgb(mode):
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = encode_image(make_image().convert(mode), form)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20)
    decoded = decode_image(BytesContent(data))
    assert (decoded.mode, decoded.size) == ("RGB", (30, 20))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_images_of_16_bits_keep_their_shades(form):
    shades = np.linspace(0, 65_535, 600).astype(np.uint16).reshape(20, 30)
    decoded = np.asarray(decode_image(BytesContent(encode_image(Image.fromarray(shades), form))))
    assert np.array_equal(decoded[..., 0], shades >> 8)


def test_float_pixels_of_unknown_range_are_refused():
    data = encode_image(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(UnusableRecordError, match="of an unknown value range"):
        decode_image(BytesContent(data))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animated_image_the_first_picture_is_read(form):
    second = Image.new("RGB", (30, 20), "red")
    data = encode_image(make_image(), form, save_all=True, append_images=[second], lossless=True)
    assert inspect_image(BytesContent(data), LIMITS) == ImageFacts(30, 20, animated=True)
    assert np.asarray(decode_image(BytesContent(data))).std() > 10


def make_pixel_bomb():
    """Return a small PNG whose header claims 60,000 x 60,000 pixels."""

    def chunk(name, data):
        body = name + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    pixels = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG drawing"),
        (b"<?xml version='1.0'?><svg/>", "an SVG drawing"),
        (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
        (b"%PDF-1.7", "which is not the start of a supported image: JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "which is not the start of a supported image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIF image"),
        (make_pixel_bomb(), r"60,000 x 60,000 pixels, more than the 100,000,000 that are allowed"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "begins as JPEG but cannot be read as JPEG"),
    ],
)
def test_other_files_are_no_images(data, message):
    with pytest.raises(UnusableRecordError, match=message):
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
def test_the_length_of_a_sound_is_that_of_decoding(form, subtype, rate):
    for samples, channels in ((1, 1), (777, 2), (20_001, 1)):
        data = make_sound(samples, rate, channels, form, subtype)
        facts = inspect_audio(BytesContent(data), LIMITS)
        assert facts == AudioFacts(samples, rate, channels)
        waveform = decode_audio(BytesContent(data), facts, 16_000)
        assert (waveform.dtype, len(waveform)) == (np.float32, -(-samples * 16_000 // rate))


def test_sounds_are_decoded_as_by_librosa():
    """As in ``librosa.load``, channels are averaged and resampled with soxr's HQ."""
    import soxr

    data = make_noise(30_000, 2)
    waveform = decode_audio(
        BytesContent(make_sound(30_000, 44_100, 2, "WAV", "FLOAT")),
        AudioFacts(30_000, 44_100, 2),
        16_000,
    )
    expected = soxr.resample(data.mean(axis=1), 44_100, 16_000, quality="HQ")
    size = min(len(waveform), len(expected))
    assert np.abs(waveform[:size] - expected[:size]).max() < 1e-6
    assert len(waveform) == -(-30_000 * 16_000 // 44_100)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "AIFF"])
def test_a_sound_that_is_cut_is_refused(form):
    data = make_sound(30_000, form=form)
    for size in (0, 10, 100, len(data) // 3, len(data) - 2_000, len(data) - 1):
        with pytest.raises(UnusableRecordError):
            decode_audio(BytesContent(data[:size]), inspect_audio(BytesContent(data[:size]), LIMITS), 16_000)


@pytest.mark.parametrize(("form", "subtype"), [("OGG", "VORBIS"), ("MP3", None)])
def test_a_cut_sound_of_pages_is_a_shorter_one(form, subtype):
    data = make_sound(30_000, form=form, subtype=subtype)
    for size in range(10, len(data), len(data) // 30):
        cut = BytesContent(data[:size])
        try:
            facts = inspect_audio(cut, LIMITS)
        except UnusableRecordError:
            continue
        assert len(decode_audio(cut, facts, 16_000)) == facts.samples <= 30_000


def test_an_mp3_without_its_length_is_refused(capfd):
    import soundfile

    data = np.concatenate([make_noise(48_000), np.zeros((144_000, 1), np.float32), make_noise(48_000)])
    buffer = io.BytesIO()
    settings = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "VARIABLE"}
    with soundfile.SoundFile(buffer, "w", samplerate=48_000, channels=1, compression_level=0.5, **settings) as file:
        file.write(data)
    content = BytesContent(buffer.getvalue())
    assert is_mp3(content)
    assert has_mp3_length(content)
    assert inspect_audio(content, LIMITS).samples == len(data)
    frame_start = next(
        at
        for at in range(4, 4_000)
        if is_mp3(BytesContent(content.read(at, content.size)))
        and count_mp3_samples(BytesContent(content.read(at, content.size))) > 200_000
    )
    bare = BytesContent(content.read(frame_start, content.size))
    assert not has_mp3_length(bare)
    with pytest.raises(UnusableRecordError, match="MP3 of variable bit rate that does not state its length"):
        inspect_audio(bare, LIMITS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"RIFF\x08\0\0\0WAVEjunk", "cannot be read as audio"),
        (b"not a sound at all", "cannot be read as audio"),
        (make_sound(0), "holds no samples"),
        (make_sound(16_000 * 9, 16_000), "lasts 9.0 s, more than the 5.0 s"),
    ],
)
def test_other_files_are_no_sounds(data, message):
    with pytest.raises(UnusableRecordError, match=message):
        inspect_audio(BytesContent(data), MediaLimits(audio_seconds=5))


def test_edge_hashes_distinguish_media(tmp_path):
    data = bytes(range(256)) * 1024
    (tmp_path / "a").write_bytes(data)
    with FileContent(tmp_path / "a") as file:
        assert read_edges(file) == (data[:65_536], data[-65_536:])
        digest = hash_edges(file.size, *read_edges(file))
    assert digest == hash_edges(len(data), *read_edges(BytesContent(data)))
    assert digest.hex() == "84ea68b89f3236554372c8c2f17b43e7"
    for changed in (data[:-1], data + b"x", b"x" + data[1:], data[:-1] + b"x"):
        assert hash_edges(len(changed), *read_edges(BytesContent(changed))) != digest
    short = b"abc"
    assert hash_edges(3, *read_edges(BytesContent(short))) != hash_edges(3, *read_edges(BytesContent(b"abd")))


def test_paths_begin_at_the_folder_and_never_leave_it(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.png").write_bytes(encode_image(make_image(), "PNG"))
    (tmp_path / "out.png").write_bytes(encode_image(make_image(), "PNG"))
    resolver = MediaResolver(str(tmp_path / "in"))
    inspect_media = MediaInspector(resolver, ["image"], FrameSampling(), embed=False)
    ((inspected,),) = inspect_media([Medium("image", "deep/../a.png")])
    assert inspected.info.facts == ImageFacts(30, 20)
    assert inspect_media([Medium("image", str(tmp_path / "in" / "a.png"))])[0][0].info == inspected.info
    assert inspect_media([Medium("image", f"file://{tmp_path}/in/a.png")])[0][0].info == inspected.info
    for path in ("../out.png", str(tmp_path / "out.png"), "/etc/passwd", "a/../../out.png"):
        with pytest.raises(UnusableRecordError, match="is outside"):
            inspect_media([Medium("image", path)])
    with pytest.raises(UnusableRecordError, match=r"image 1 \(b.png\) is missing"):
        inspect_media([Medium("image", "b.png")])
    with pytest.raises(UnusableRecordError, match="cannot be read"):
        inspect_media([Medium("image", "deep")])
    with pytest.raises(UnusableRecordError, match="with an unsupported scheme"):
        inspect_media([Medium("image", "ftp://h/a.png")])
    with pytest.raises(UnusableRecordError, match="is audio, but the processor takes only image"):
        inspect_media([Medium("audio", "a.wav")])


def test_paths_never_leave_the_folder_of_a_url():
    resolver = MediaResolver("https://host/data")
    assert resolver.resolve("a/b.png") == "https://host/data/a/b.png"
    assert resolver.resolve("https://other/c.png") == "https://other/c.png"
    for path in ("../b.png", "/b.png"):
        with pytest.raises(UnusableRecordError, match="is outside"):
            resolver.resolve(path)


def test_media_of_the_web_are_complete_or_refused():
    data = encode_image(make_image(), "PNG")
    with serve_files({"/a.png": data, "/page.png": b"<html>log in</html>"}) as address:
        inspect_media = MediaInspector(
            MediaResolver(".", MediaLimits(file_bytes=100_000)),
            ["image"],
            FrameSampling(),
            embed=False,
        )
        ((inspected,),) = inspect_media([Medium("image", f"{address}/a.png")])
        assert inspected.info.facts == ImageFacts(30, 20)
        assert inspected.info.size == len(data)
        with pytest.raises(UnusableRecordError, match="is missing"):
            inspect_media([Medium("image", f"{address}/none.png")])
        with pytest.raises(UnusableRecordError, match="is an HTML page"):
            inspect_media([Medium("image", f"{address}/page.png")])
        inspect_small = MediaInspector(
            MediaResolver(".", MediaLimits(file_bytes=100)), ["image"], FrameSampling(), embed=False
        )
        with pytest.raises(UnusableRecordError, match="at most 100 are allowed"):
            inspect_small([Medium("image", f"{address}/a.png")])


def test_a_url_that_hangs_is_given_up():
    with open_silent_server() as address:
        inspect_media = MediaInspector(
            MediaResolver(".", MediaLimits(fetch_seconds=0.5)),
            ["image"],
            FrameSampling(),
            embed=False,
        )
        with pytest.raises(UnusableRecordError, match=r"was not downloaded within 0.5 s"):
            inspect_media([Medium("image", f"{address}/a.png")])


def test_invalid_limits_are_refused():
    with pytest.raises(SettingsError) as error:
        MediaLimits(image_pixels=0, audio_seconds=-1, file_bytes="much", fetch_seconds=float("nan"))
    assert len(error.value.problems) == 4
