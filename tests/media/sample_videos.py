"""Generated videos whose frames differ in colour."""

import io
from fractions import Fraction

import numpy as np


def make_frames(frames, width, height):
    """Return smooth frames of different grey, uint8 [frames, height, width, 3].

    Codecs keep smooth pictures, so that frames can be distinguished after decoding.
    """
    across = np.linspace(0, 90, width)[None, :] + np.linspace(0, 60, height)[:, None]
    shades = (np.arange(frames) * 97 // max(frames, 1))[:, None, None] + across[None]
    return np.repeat(shades.astype(np.uint8)[..., None], 3, axis=3)


def make_video(frames=50, rate=25, size=(64, 48), form="mp4", codec="mpeg4", times=None, gop=12, options=None):
    """Return a video as bytes; ``times`` are the frames' times in milliseconds."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form, options=options or {}) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(make_frames(frames, *size)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def make_audio_only_file(seconds=1):
    """Return an MP4 file that holds only audio."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=16_000)
        for _ in range(seconds * 16):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.sample_rate = 16_000
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def decode_all_frames(data):
    """Return all frames of a video, as PyAV decodes them."""
    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]
