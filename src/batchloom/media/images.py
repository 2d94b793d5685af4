"""Images: size from the header alone, and pixels.

Formats are detected by their first bytes and nothing else is tried: some Pillow readers run other programs.
"""

import zlib
from dataclasses import replace
from typing import Any

from batchloom.core.errors import MissingDependencyError, UnusableRecordError
from batchloom.core.medium import ImageFacts
from batchloom.media.media_content import BytesContent, MediaContent, MediaLimits, open_content, read_edges

# Errors that Pillow's readers raise for damaged files.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    EOFError,
    OverflowError,
    zlib.error,
    ZeroDivisionError,
    NotImplementedError,
)
_PILLOW_PLUGINS = {
    "JPEG": ("JpegImagePlugin", "JpegImageFile"),
    "PNG": ("PngImagePlugin", "PngImageFile"),
    "GIF": ("GifImagePlugin", "GifImageFile"),
    "WebP": ("WebPImagePlugin", "WebPImageFile"),
    "BMP": ("BmpImagePlugin", "BmpImageFile"),
    "TIFF": ("TiffImagePlugin", "TiffImageFile"),
    "PPM": ("PpmImagePlugin", "PpmImageFile"),
    "AVIF": ("AvifImagePlugin", "AvifImageFile"),
}
_FORMATS_WITH_END = ("JPEG", "PNG", "GIF", "WebP")
_METADATA_CHUNKS = (b"eXIf", b"iTXt", b"zTXt", b"tEXt")
_ANIMATED_FORMATS = ("GIF", "PNG", "WebP", "AVIF")
_READABLE_FORMATS = ", ".join(list(_PILLOW_PLUGINS)[:-1]) + " and AVIF"
_ORIENTATION_TAG = 0x0112
_ROTATED_ORIENTATIONS = (5, 6, 7, 8)
_AVIF_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"}
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_MAX_SHOWN_BYTES = 16
_PNG_HEADER_BYTES = 8
_PNG_CHUNK_BYTES = 12


def inspect_image(content: MediaContent, limits: MediaLimits) -> ImageFacts:
    """Read the header of an image and check that the file is complete.

    The image is decoded only if its end cannot be recognized; decoding then shows whether it is truncated.

    Raises:
        UnusableRecordError: the content is empty, no image, truncated, damaged, or larger than allowed.
        MissingDependencyError: Pillow is not installed.
    """
    head, tail = read_edges(content)
    form = detect_image_format(head)
    facts = _read_facts(content, head, form)
    if min(facts.width, facts.height) < 1:
        raise UnusableRecordError(f"is {facts.width} x {facts.height} pixels: it is empty")
    if facts.width * facts.height > limits.image_pixels:
        raise UnusableRecordError(
            f"has {facts.width:,} x {facts.height:,} pixels, more than the {limits.image_pixels:,} that are allowed "
            "(image_pixels): make it smaller, or allow more"
        )
    if form in _FORMATS_WITH_END and _has_end(form, content.size, head, tail):
        return facts
    # Headers of other formats show neither an end nor the orientation.
    width, height = decode_image(content).size
    return replace(facts, width=width, height=height)


def decode_image(content: MediaContent) -> Any:
    """Decode the first picture of an image to an upright RGB ``PIL.Image.Image``.

    Orientation and colours match transformers' ``load_image``, except that 16-bit pixels are scaled to 8 bits;
    Pillow's conversion would turn nearly all of them white.

    Raises:
        UnusableRecordError: the image cannot be decoded.
    """
    form = detect_image_format(content.read(0, 64))
    try:
        with _open_image(BytesContent(content.read(0, content.size)), form) as image:
            return _to_rgb(image)
    except UnusableRecordError:
        raise
    except _DECODE_ERRORS as error:
        raise _damaged_image_error(form, error) from error


def detect_image_format(head: bytes) -> str:
    """Detect the format from the first bytes of an image."""
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
    if head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS:
        return _AVIF_BRANDS[head[8:12]]
    raise UnusableRecordError(_describe_not_image(head))


def _describe_not_image(head: bytes) -> str:
    if not head:
        return "is empty (0 bytes)"
    if head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS:
        return "is a HEIF image (HEIC), which is not supported; convert it to JPEG"
    start = head[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<svg", b"<?xml")) and b"<svg" in head.lower():
        return "is an SVG drawing, not an image of pixels; render it to PNG"
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<script")):
        return "is an HTML page, not an image: perhaps an error page of a server; fetch it again"
    return f"begins with {head[:_MAX_SHOWN_BYTES]!r}, which is not the start of a supported image: {_READABLE_FORMATS}"


def _open_image(content: MediaContent, form: str) -> Any:
    """Open an image with Pillow's reader of this format only, at the header.

    ``Image.open`` would warn of large images through a process-wide filter.
    """
    try:
        from PIL import Image  # noqa: F401 - imported late, only for images
    except ImportError as error:
        raise MissingDependencyError("Images need Pillow: pip install 'batchloom[media]'.") from error
    import importlib

    module, name = _PILLOW_PLUGINS[form]
    reader = getattr(importlib.import_module(f"PIL.{module}"), name)
    return reader(open_content(content))


def _read_facts(content: MediaContent, head: bytes, form: str) -> ImageFacts:
    """Read facts from the first bytes if they suffice, else from the complete file."""
    candidates = [BytesContent(head), content] if form in ("JPEG", "BMP") else [content]
    for candidate in candidates:
        try:
            with _open_image(candidate, form) as image:
                return _make_facts(image, candidate, form)
        except _DECODE_ERRORS as error:
            if candidate is candidates[-1] or content.size <= len(head):
                raise _damaged_image_error(form, error) from error
    raise AssertionError("the last try gives facts or raises")


def _make_facts(image: Any, content: MediaContent, form: str) -> ImageFacts:
    width, height = image.size
    turned = form in _FORMATS_WITH_END and _read_orientation(image, content, form) in _ROTATED_ORIENTATIONS
    animated = form in _ANIMATED_FORMATS and bool(getattr(image, "is_animated", False))
    return ImageFacts(*((height, width) if turned else (width, height)), animated)


def _read_orientation(image: Any, content: MediaContent, form: str) -> int:
    # Pillow would decode a PNG to find EXIF, or text chunks with EXIF or XMP, after the pixels.
    if form == "PNG" and not _has_png_chunk(content, _METADATA_CHUNKS):
        return 1
    return int(image.getexif().get(_ORIENTATION_TAG, 1) or 1)


def _has_png_chunk(content: MediaContent, kinds: tuple[bytes, ...]) -> bool:
    offset = _PNG_HEADER_BYTES
    while len(start := content.read(offset, offset + 8)) == 8:
        if start[4:] in kinds:
            return True
        offset += int.from_bytes(start[:4], "big") + _PNG_CHUNK_BYTES
    return False


def _has_end(form: str, size: int, head: bytes, tail: bytes) -> bool:
    """Return whether a file ends as its format requires, so that it is not truncated."""
    if form == "JPEG":
        return tail.rstrip(b"\x00\r\n").endswith(b"\xff\xd9")
    if form == "PNG":
        return b"IEND\xaeB`\x82" in tail[-64:]
    if form == "GIF":
        return tail.rstrip(b"\x00").endswith(b";")
    if form == "WebP":
        return int.from_bytes(head[4:8], "little") + 8 <= size
    return False


def _damaged_image_error(form: str, error: BaseException) -> UnusableRecordError:
    message = str(error).strip().rstrip(".") or type(error).__name__
    return UnusableRecordError(
        f"begins as {form} but cannot be read as {form}: it is damaged or cut short ({message}); fetch or make it again"
    )


def _to_rgb(image: Any) -> Any:
    from PIL import ImageOps

    # In place: an image without rotation or conversion is not copied.
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return _from_16_bit_grayscale(image)
    if image.mode in ("I", "F"):
        raise UnusableRecordError(
            f"has 32-bit pixels (mode {image.mode}) of an unknown value range; convert it to 8 bits"
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit_grayscale(image: Any) -> Any:
    import numpy as np
    from PIL import Image

    high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
    return Image.fromarray(high, "L").convert("RGB")
