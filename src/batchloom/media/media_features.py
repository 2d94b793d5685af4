"""Features that a processor computes from media, as arrays for its model."""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from batchloom.core.errors import InputError, UnusableRecordError
from batchloom.core.medium import AudioFacts, FrameFacts, ImageFacts, MediumFacts
from batchloom.media.audio import decode_audio
from batchloom.media.images import decode_image
from batchloom.media.media_content import MediaContent
from batchloom.media.processor import ProcessorFiles, load_processor_part
from batchloom.media.processor_families import get_model_traits
from batchloom.media.video import decode_frames

FeatureArrays = dict[str, NDArray[Any]]


@final
class FeatureExtractor:
    """Thread-safe feature extraction.

    Parts of the processor are loaded on first use, from the files in the store.

    Args:
        files: files of the processor.
    """

    def __init__(self, files: ProcessorFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._parts: dict[str, Any] = {}
        self._internal_outputs = get_model_traits(files.name).internal_outputs

    def extract(self, content: MediaContent, facts: MediumFacts) -> FeatureArrays:
        """Return the features of one medium; the first axis of each array counts media.

        Raises:
            UnusableRecordError: the medium cannot be decoded, or contradicts its header.
            InputError: the installed transformers cannot load the processor from its files.
            MissingDependencyError: the decoder of this medium is not installed.
        """
        if isinstance(facts, ImageFacts):
            picture = decode_image(content)
            if picture.size != (facts.width, facts.height):
                raise UnusableRecordError(
                    f"is {picture.size[0]} x {picture.size[1]} pixels, but its header said {facts.width} x "
                    f"{facts.height}; save it again"
                )
            return self._extract_image(picture)
        return self._extract_sound(content, facts)

    def extract_frames(self, content: MediaContent, facts: Sequence[FrameFacts]) -> list[FeatureArrays]:
        """Return image features of each video frame; raises as :meth:`extract`.

        ``facts`` must ascend by time.
        """
        return [self._extract_image(picture) for picture in decode_frames(content, facts)]

    def names(self, kind: str) -> list[str]:
        """Return the feature names of a kind of media."""
        part = self._get_part("AutoFeatureExtractor" if kind == "audio" else "AutoImageProcessor")
        return [name for name in part.model_input_names if name not in self._internal_outputs]

    def setting(self, auto: str, name: str) -> Any:
        """Return a setting of a part of the processor, such as ``AutoImageProcessor``."""
        return getattr(self._get_part(auto), name)

    def _extract_image(self, picture: Any) -> FeatureArrays:
        part = self._get_part("AutoImageProcessor")
        output = part(
            images=[picture],
            # The processors of torchvision return only tensors.
            return_tensors="np" if type(part).__name__.endswith("Pil") else "pt",
            **self._get_class_defaults("images_kwargs"),
        )
        return {name: _to_numpy(value) for name, value in output.items() if name not in self._internal_outputs}

    def _extract_sound(self, content: MediaContent, facts: AudioFacts) -> FeatureArrays:
        part = self._get_part("AutoFeatureExtractor")
        rate = int(part.sampling_rate)
        samples = decode_audio(content, facts, rate)
        output = part(
            [samples],
            sampling_rate=rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        features = {name: _to_numpy(value) for name, value in output.items()}
        # Qwen2-Audio's processor uses this name, because attention_mask is the mask of the text.
        if "attention_mask" in features:
            features["feature_attention_mask"] = features.pop("attention_mask")
        return features

    def _get_class_defaults(self, name: str) -> Mapping[str, Any]:
        """Return the defaults of the processor class, which override those of its parts."""
        import transformers  # noqa: PLC0415 - imported late, only for media

        defaults = getattr(getattr(transformers, self._files.name, None), name, {})
        return defaults if isinstance(defaults, Mapping) else {}

    def _get_part(self, auto: str) -> Any:
        part = self._parts.get(auto)
        if part is None:
            with self._lock:
                if auto not in self._parts:
                    self._parts[auto] = self._load_part(auto)
                part = self._parts[auto]
        return part

    def _load_part(self, auto: str) -> Any:
        with tempfile.TemporaryDirectory(prefix="batchloom-processor-") as folder:
            self._files.write(Path(folder))
            part, why = load_processor_part(auto, Path(folder))
        if part is None:
            raise InputError(f"The store's {self._files.name} cannot be built with the installed transformers: {why}")
        return part


def _to_numpy(value: Any) -> NDArray[Any]:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def join_features(features: Sequence[FeatureArrays]) -> FeatureArrays:
    """Concatenate features of several media, padding shorter ones with zeros."""
    names = dict.fromkeys(name for arrays in features for name in arrays)
    return {name: stack_padded([arrays[name] for arrays in features if name in arrays]) for name in names}


def stack_padded(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate arrays along axis 0, padding all other axes with zeros."""
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1:
        return np.concatenate(arrays)
    largest = tuple(max(sides) for sides in zip(*shapes, strict=True))
    total = sum(len(array) for array in arrays)
    stacked = np.zeros((total, *largest), arrays[0].dtype)
    offset = 0
    for array in arrays:
        region = (slice(offset, offset + len(array)), *(slice(0, side) for side in array.shape[1:]))
        stacked[region] = array
        offset += len(array)
    return stacked
