"""Images: their size from the header alone, and their pixels.

Formats are told by their first bytes and nothing else is tried: some of what Pillow reads runs other programs.
"""

import zlib
from dataclasses import replace
from typing import Any

from batchloom.core.errors import MissingDependencyError, UnusableRecordError
from batchloom.core.medium import ImageFacts
from batchloom.media.media_content import Content, Held, edges, opened
from batchloom.media.media_limits import MediaLimits

# What Pillow's readers raise of files that are not what they begin as.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, IndexError, KeyError, TypeError),
    *(EOFError, OverflowError, zlib.error, ZeroDivisionError, NotImplementedError),
)
_PLUGINS = {
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "WebP": ("WebPImagePlugin", "WebPImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "PPM": ("PpmImagePlugin", "PpmImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
}
_ENDED = ("JPEG", "PNG", "GIF", "WebP")
_TELLING = (b"eXIf", b"iTXt", b"zTXt", b"tEXt")
_ANIMATED = ("GIF", "PNG", "WebP", "AVIF")
_READ = ", ".join(list(_PLUGINS)[:-1]) + " and AVIF"
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"}
_HEIF = (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_SHOWN = 16
_PNG_HEAD, _PNG_CHUNK = 8, 12


def look_at_image(content: Content, limits: MediaLimits) -> ImageFacts:
    """What an image's header says, after checking that the file has an end.

    Nothing is decoded, but where the end does not show: then decoding tells whether it is cut.

    Raises:
        UnusableRecordError: it is empty, no image, cut short, damaged, or larger than allowed.
        MissingDependencyError: Pillow is not installed.
    """
    head, tail = edges(content)
    form = form_of(head)
    facts = _facts(content, head, form)
    if min(facts.width, facts.height) < 1:
        raise UnusableRecordError(f"is {facts.width} x {facts.height} pixels: it shows nothing")
    if facts.width * facts.height > limits.image_pixels:
        raise UnusableRecordError(
            f"has {facts.width:,} x {facts.height:,} pixels, more than the {limits.image_pixels:,} that are allowed "
            "(image_pixels): make it smaller, or allow more"
        )
    if form in _ENDED and _ends(form, content.size, head, tail):
        return facts
    # Of other formats neither an end nor an orientation is told by a header alone.
    width, height = decode_image(content).size
    return replace(facts, width=width, height=height)


def decode_image(content: Content) -> Any:
    """The first picture of an image as an upright RGB ``PIL.Image.Image``.

    Orientation and colours are those of transformers' ``load_image``; pixels of 16 bits are scaled to 8, where
    Pillow's conversion would make white of nearly all of them.

    Raises:
        UnusableRecordError: it cannot be decoded.
    """
    form = form_of(content.read(0, 64))
    try:
        with _opened(Held(content.read(0, content.size)), form) as image:
            return _rgb(image)
    except UnusableRecordError:
        raise
    except _DAMAGED as error:
        raise _damaged(form, error) from error


def form_of(head: bytes) -> str:
    """The format that the first bytes of an image are of.

    Raises:
        UnusableRecordError: of none that is read; says what it seems to be.
    """
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:4] in (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"):
        return "TIFF"
    if head[:2] == b"BM" and len(head) > 26:
        return "BMP"
    if head[:2] in (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6") and head[2:3].isspace():
        return "PPM"
    if head[4:8] == b"ftyp" and head[8:12] in _BRANDS:
        return _BRANDS[head[8:12]]
    raise UnusableRecordError(_no_image(head))


def _no_image(head: bytes) -> str:
    if not head:
        return "is empty (0 bytes)"
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF:
        return "is a HEIF image (HEIC), which is not read; convert it to JPEG"
    start = head[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<svg", b"<?xml")) and b"<svg" in head.lower():
        return "is a drawing in SVG, not an image of pixels; render it to PNG"
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        return "is a page of HTML, not an image: perhaps what a server said instead; fetch it again"
    return f"begins with {head[:_SHOWN]!r}, which no image does that is read: {_READ}"


def _opened(content: Content, form: str) -> Any:
    """Pillow's reader of this format and no other, at the header.

    Its own ``open`` warns of large images by a filter of the whole process.
    """
    try:
        from PIL import Image  # noqa: F401, PLC0415 - late: only where there are images
    except ImportError as error:
        raise MissingDependencyError(
            "Images need Pillow: pip install 'batchloom[media]'."
        ) from error
    import importlib  # noqa: PLC0415 - as above

    module, name = _PLUGINS[form]
    reader = getattr(importlib.import_module(f"PIL.{module}"), name)
    return reader(opened(content))


def _facts(content: Content, head: bytes, form: str) -> ImageFacts:
    """Facts from the first stretch where they are in it, else from the whole file."""
    tries = [Held(head), content] if form in ("JPEG", "BMP") else [content]
    for some in tries:
        try:
            with _opened(some, form) as image:
                return _facts_of(image, some, form)
        except _DAMAGED as error:
            if some is tries[-1] or content.size <= len(head):
                raise _damaged(form, error) from error
    raise AssertionError("the last try gives facts or raises")


def _facts_of(image: Any, content: Content, form: str) -> ImageFacts:
    width, height = image.size
    turned = form in _ENDED and _orientation(image, content, form) in _ON_ITS_SIDE
    animated = form in _ANIMATED and bool(getattr(image, "is_animated", False))
    return ImageFacts(*((height, width) if turned else (width, height)), animated)


def _orientation(image: Any, content: Content, form: str) -> int:
    # Pillow decodes a PNG to find what may stand behind its pixels: EXIF, or texts that hold it or XMP.
    if form == "PNG" and not _png_has(content, _TELLING):
        return 1
    return int(image.getexif().get(_ORIENTATION, 1) or 1)


def _png_has(content: Content, kinds: tuple[bytes, ...]) -> bool:
    """Whether a PNG has a chunk of one of these kinds."""
    at = _PNG_HEAD
    while len(start := content.read(at, at + 8)) == 8:
        if start[4:] in kinds:
            return True
        at += int.from_bytes(start[:4], "big") + _PNG_CHUNK
    return False


def _ends(form: str, size: int, head: bytes, tail: bytes) -> bool:
    """Whether a file ends as its format does, so that it is not cut."""
    if form == "JPEG":
        return tail.rstrip(b"\x00\r\n").endswith(b"\xff\xd9")
    if form == "PNG":
        return b"IEND\xaeB`\x82" in tail[-64:]
    if form == "GIF":
        return tail.rstrip(b"\x00").endswith(b";")
    if form == "WebP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    return False


def _damaged(form: str, error: BaseException) -> UnusableRecordError:
    said = str(error).strip().rstrip(".") or type(error).__name__
    return UnusableRecordError(
        f"begins as {form} and cannot be read as one: it is damaged or cut short ({said}); fetch or make it again"
    )


def _rgb(image: Any) -> Any:
    from PIL import ImageOps  # noqa: PLC0415 - late, as above

    # Where nothing has to be turned or converted its pixels are not copied.
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise UnusableRecordError(
            f"has pixels of 32 bits (mode {image.mode}), whose white nobody knows; convert it to 8 bits"
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bits(image: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only such images need it
    from PIL import Image  # noqa: PLC0415 - late, as above

    high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
    return Image.fromarray(high, "L").convert("RGB")
