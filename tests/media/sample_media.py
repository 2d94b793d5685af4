"""Generated images and sounds, and conversations about them."""

import io
import json

import numpy as np
from PIL import Image


def make_image(width=30, height=20, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def encode_image(image, form="JPEG", **settings):
    buffer = io.BytesIO()
    image.save(buffer, form, **settings)
    return buffer.getvalue()


def make_noise(samples=16_000, channels=1, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, (samples, channels)).astype(np.float32)


def make_sound(samples=16_000, rate=16_000, channels=1, form="WAV", subtype=None, seed=0):
    import soundfile

    buffer = io.BytesIO()
    data = make_noise(samples, channels, seed)
    soundfile.write(buffer, data, rate, format=form, subtype=subtype)
    return buffer.getvalue()


def make_messages(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_images(folder, count=8):
    """Write conversations and their images, of several sizes; return the file."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number in range(count):
        names = [f"pictures/{number}_{k}.jpg" for k in range(1 + number % 3)]
        for k, name in enumerate(names):
            size = (20 + 31 * number % 190, 25 + 17 * (number + k) % 150)
            (folder / name).write_bytes(encode_image(make_image(*size, seed=number), quality=90))
        question = " and ".join("<image>" for _ in names) + f" Who is number {number}?"
        rows.append({"messages": make_messages(question, f"It is cat {number}."), "images": names})
    rows.append({"messages": make_messages("Who is nobody?", "Nobody is here.")})
    file = folder / "talks.json"
    file.write_text(json.dumps(rows))
    return file


def write_sounds(folder, count=5):
    """Write conversations and their sounds, of several formats; return the file."""
    (folder / "sounds").mkdir(parents=True)
    formats = [
        ("WAV", None, "wav"),
        ("FLAC", None, "flac"),
        ("OGG", "VORBIS", "ogg"),
        ("MP3", None, "mp3"),
    ]
    rows = []
    for number in range(count):
        form, subtype, ending = formats[number % len(formats)]
        rate = (16_000, 44_100, 8_000, 22_050)[number % 4]
        name = f"sounds/{number}.{ending}"
        data = make_sound(4_000 + 3_001 * number, rate, 1 + number % 2, form, subtype, seed=number)
        (folder / name).write_bytes(data)
        rows.append({"messages": make_messages("<audio>What is it?", f"It is sound {number}."), "audios": [name]})
    file = folder / "talks.json"
    file.write_text(json.dumps(rows))
    return file
