"""Processors of transformers: files, accepted media, and computed features."""

import contextlib
import functools
import io
import math
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, final

import numpy as np
import orjson
from numpy.typing import NDArray

from batchloom.core.errors import (
    InputError,
    InputMissingError,
    MissingDependencyError,
    SettingsError,
    UnusableRecordError,
)
from batchloom.core.files import describe_os_error, read_regular_file, suggest_path
from batchloom.core.fingerprint import fingerprint
from batchloom.core.medium import MEDIUM_KINDS, AudioFacts, FrameFacts, ImageFacts, MediumFacts, MediumKind
from batchloom.core.settings import find_unknown_settings, quote_value, raise_problems
from batchloom.core.slow_loads import announce_load
from batchloom.media.audio import decode_audio
from batchloom.media.images import decode_image
from batchloom.media.media_content import MediaContent
from batchloom.media.processor_families import (
    PatchGridFamily,
    PlaceholderExpansion,
    ProcessorFamily,
    ProcessorParts,
    SplitFamily,
    find_known_family,
    get_model_traits,
)
from batchloom.media.video import decode_frames

# All files of a processor except its tokenizer, in the order in which transformers writes and reads them.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
# Limits of the pixels of an image after resizing, for processors that keep the aspect ratio.
PIXEL_LIMITS = ("min_pixels", "max_pixels")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_TOKEN_ATTRIBUTES = (
    "image_token",
    "audio_token",
    "video_token",
    "boi_token",
    "eoi_token",
    "fake_image_token",
    "global_image_token",
)
_MAX_BYTES = 16 << 20
_REMEDY = "give the folder that a processor's save_pretrained wrote"
# Errors that transformers raises for a folder that it cannot load.
_LOAD_ERRORS = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, RuntimeError)
# Errors that a processor may raise for a medium it does not accept.
_PROCESSOR_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    ZeroDivisionError,
    OverflowError,
    RuntimeError,
)
_OFFSETS_KEY = "text_replacement_offsets"
_PROBE_SIZES = ((28, 28), (336, 224), (37, 640), (1000, 50), (333, 777), (1280, 720), (7, 5))
_PROBE_SAMPLES = (480, 16_000, 16_001, 48_137, 479_999)


@final
@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """Serializable files of a processor.

    Attributes:
        name: class name in transformers.
        files: content of each file, by name.
    """

    name: str
    files: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Identity of the processor: 32 hex digits."""
        parsed = {name: orjson.loads(text) for name, text in self.files.items()}
        return fingerprint({"processor": self.name, "files": parsed})

    @property
    def config(self) -> dict[str, Any]:
        """Settings in ``processor_config.json``."""
        config: dict[str, Any] = orjson.loads(self.files.get(PROCESSOR_FILES[0], "{}"))
        return config

    def state(self) -> dict[str, Any]:
        """Return the plain values that a store saves."""
        return {
            "state_version": 1,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "files": dict(self.files),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore the files from ``state()``.

        Raises:
            InputError: the state is invalid, of another version, or was changed.
        """
        files = state.get("files")
        if state.get("state_version") != 1 or not isinstance(files, Mapping):
            raise InputError("This is not a processor state of version 1.")
        processor_files = cls(str(state.get("name")), {str(name): str(text) for name, text in files.items()})
        if unknown_names := set(processor_files.files) - set(PROCESSOR_FILES):
            raise InputError(f"The processor state holds an unknown file, {min(unknown_names)!r}.")
        if processor_files.fingerprint != state.get("fingerprint"):
            raise InputError("The processor state does not match its fingerprint: it was changed.")
        return processor_files

    def with_image_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return the files with other settings of the image processor."""
        if not settings:
            return self
        files = {}
        for name, text in self.files.items():
            content = orjson.loads(text)
            # Newer versions of transformers write the settings of all parts into processor_config.json.
            section = content.get("image_processor") if name == PROCESSOR_FILES[0] else content
            if isinstance(section, dict) and name != PROCESSOR_FILES[2]:
                if "size" in settings:
                    # Older files limit the size by these, and they would override it.
                    for limit in PIXEL_LIMITS:
                        section.pop(limit, None)
                section.update(settings)
            files[name] = orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()
        return type(self)(self.name, files)

    def write(self, folder: Path) -> None:
        """Write the files to a folder, for transformers to read."""
        for name, text in self.files.items():
            (folder / name).write_text(text, "utf-8")


@final
@dataclass(frozen=True, slots=True)
class MediaProcessor:
    """A processor and the families of media that it accepts.

    Attributes:
        files: files of the processor.
        families: family of each kind of media.
        notes: notes for the user, in sentences.
    """

    files: ProcessorFiles
    families: Mapping[MediumKind, ProcessorFamily]
    notes: tuple[str, ...] = ()


def is_tokenizer_folder(path: str) -> bool:
    """Return whether a folder holds a tokenizer and no processor."""
    folder = Path(path)
    has_tokenizer = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    return has_tokenizer and not any((folder / name).is_file() for name in PROCESSOR_FILES)


def read_processor_files(folder: Path) -> ProcessorFiles:
    """Read the files of a processor in a folder.

    Raises:
        InputMissingError: there is no such folder.
        InputError: the folder holds no processor, or damaged files.
    """
    if folder.is_file():
        raise InputError(f"{folder} is a file; {_REMEDY}.")
    if not folder.is_dir():
        raise InputMissingError(f"There is no folder {folder}: {_REMEDY}{suggest_path(str(folder))}")
    files = {}
    for file_name in PROCESSOR_FILES:
        if (path := folder / file_name).is_file():
            files[file_name] = _read_json_text(path)
    if not files:
        raise InputError(
            f"{folder} holds no processor: neither {PROCESSOR_FILES[0]} nor {PROCESSOR_FILES[1]}; {_REMEDY}."
        )
    names = [orjson.loads(text).get("processor_class") for text in files.values()]
    name: str | None = next((class_name for class_name in names if isinstance(class_name, str)), None)
    if name is None:
        raise InputError(f"{folder} does not name the class of its processor (processor_class); {_REMEDY}.")
    return ProcessorFiles(name, files)


def _read_json_text(path: Path) -> str:
    try:
        text = read_regular_file(path, _MAX_BYTES).decode()
        if isinstance(orjson.loads(text), dict):
            return text
        why = "it is not a JSON object"
    except OSError as error:
        why = describe_os_error(error)
    except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
        why = f"it is not JSON ({error})"
    raise InputError(f"{path} cannot be read: {why}; {_REMEDY}.")


def open_processor(
    folder: Path, tokenizer: Path | None = None, image_settings: Mapping[str, Any] = MappingProxyType({})
) -> MediaProcessor:
    """Open the processor in a folder and compare it with the installed transformers.

    No code in the folder is run, and nothing is downloaded.

    Args:
        folder: folder that ``save_pretrained`` wrote.
        tokenizer: folder of its tokenizer, if it is another.
        image_settings: settings of the image processor that override those in its files, as keywords of
            ``from_pretrained`` do.

    Raises:
        InputError: no processor, one that cannot be loaded, or one that accepts no media.
        SettingsError: ``image_settings`` that the image processor does not have.
        MissingDependencyError: transformers or Pillow is not installed.
    """
    files = read_processor_files(folder).with_image_settings(image_settings)
    if not image_settings:
        return _open_files(files, folder, tokenizer)
    with tempfile.TemporaryDirectory(prefix="batchloom-processor-") as changed_folder:
        for path in folder.iterdir():
            if path.name not in files.files:
                (Path(changed_folder) / path.name).symlink_to(path.absolute())
        files.write(Path(changed_folder))
        _check_image_settings(files, Path(changed_folder), image_settings)
        return _open_files(files, Path(changed_folder), tokenizer)


def _check_image_settings(files: ProcessorFiles, folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise SettingsError for settings that the image processor does not have."""
    image, why = _try_load(_import_transformers().AutoImageProcessor, folder)
    if image is None:
        raise SettingsError(
            [f"media.image_settings: {files.name} cannot be loaded with {quote_value(dict(settings))}: {why}"]
        )
    names = [
        name
        for name in getattr(getattr(image, "valid_kwargs", None), "__annotations__", {})
        if name in PIXEL_LIMITS or getattr(image, name, None) is not None
    ]
    problems = find_unknown_settings(settings, names, "media.image_settings.")
    size = getattr(image, "size", None) or {}
    least = size.get("shortest_edge", 0)
    most = size.get("longest_edge", math.inf)
    if not problems and set(settings) & set(PIXEL_LIMITS) and least > most:
        problems.append(
            f"media.image_settings.max_pixels: {most:,} is less than min_pixels, {least:,}; change one of them"
        )
    raise_problems(problems)


def _open_files(files: ProcessorFiles, folder: Path, tokenizer: Path | None) -> MediaProcessor:
    transformers = _import_transformers()
    processor, why = _try_load(transformers.AutoProcessor, folder)
    image, _ = _try_load(transformers.AutoImageProcessor, folder)
    sound, _ = _try_load(transformers.AutoFeatureExtractor, folder)
    tokens = _collect_tokens(transformers, processor, (folder, tokenizer))
    families = {}
    notes = []
    family, disagreement = _choose_family(files, folder, ProcessorParts(files.config, image, sound, tokens), processor)
    if family is not None and disagreement:
        notes.append(f"{files.name} is run once for each size of a medium: {disagreement}")
        family = None
    if family is not None:
        families[family.kind] = family
    for kind in MEDIUM_KINDS:
        if kind != "video" and kind not in families and getattr(processor, f"{kind}_token", None):
            families[kind] = probe_processor(processor, kind)
    _check_positions(files, families, image)
    if not families:
        why = why or "it supports neither"
        raise InputError(f"{folder} holds a {files.name}, which does not report the tokens of images or audio: {why}")
    return MediaProcessor(files, families, tuple(notes))


def _choose_family(
    files: ProcessorFiles, folder: Path, parts: ProcessorParts, processor: Any
) -> tuple[ProcessorFamily | None, str]:
    """Return the known family of a processor, and how the installed one differs."""
    try:
        family = find_known_family(files.name, parts)
        return family, "" if family is None else find_processor_disagreement(family, processor, parts.image)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise InputError(
            f"{folder} holds a {files.name} with invalid settings ({type(error).__name__}: {error}); {_REMEDY}."
        ) from error


def _check_positions(files: ProcessorFiles, families: Mapping[MediumKind, ProcessorFamily], image: Any) -> None:
    """Raise if the model needs patch positions that batchloom cannot compute."""
    grids = "image_grid_thw" in (getattr(image, "model_input_names", None) or ())
    has_known_positions = isinstance(families.get("image"), PatchGridFamily) and get_model_traits(files.name).mrope
    if "image" in families and grids and not has_known_positions:
        raise InputError(
            f"{files.name} returns grids of patches (image_grid_thw), from which its model computes positions in "
            "time, height and width. These positions are supported only for Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with "
            "settings that resize images."
        )


def _import_transformers() -> Any:
    try:
        with announce_load("transformers"):
            import transformers
    except ImportError as error:
        raise MissingDependencyError("Processors need transformers: pip install 'batchloom[media]'.") from error
    return transformers


def _try_load(auto: Any, folder: Path) -> tuple[Any, str]:
    """Load a folder with transformers; (None, reason) on failure."""
    try:
        # Suppress messages about missing parts, which are expected here.
        with announce_load("transformers"), contextlib.redirect_stderr(io.StringIO()):
            return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False), ""
    except _LOAD_ERRORS as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _collect_tokens(transformers: Any, processor: Any, folders: tuple[Path | None, ...]) -> dict[str, str]:
    """Return the special tokens of a processor's tokenizer, by attribute name."""
    tokenizer = getattr(processor, "tokenizer", None)
    for folder in () if tokenizer is not None else folders:
        if folder is not None and tokenizer is None:
            tokenizer, _ = _try_load(transformers.AutoTokenizer, folder)
    return {name: token for name in _TOKEN_ATTRIBUTES if isinstance(token := getattr(tokenizer, name, None), str)}


def collapse_expansion(text: str, token: str, grid: tuple[int, int, int] = (0, 0, 0)) -> PlaceholderExpansion:
    """Collapse each run of the token in a processor's text for one medium."""
    runs: list[int] = []

    def collapse_run(match: re.Match[str]) -> str:
        runs.append(len(match.group()) // len(token))
        return token

    text = re.sub(f"(?:{re.escape(token)})+", collapse_run, text)
    return PlaceholderExpansion(text, tuple(runs), grid)


def render_medium(processor: Any, kind: MediumKind, facts: MediumFacts) -> str:
    """Return the text that a processor writes for a medium of this size."""
    name = type(processor).__name__
    placeholder = getattr(processor, f"{kind}_token", None)
    if not placeholder:
        raise InputError(f"{name} has no token for {kind}: it does not support {kind}")
    try:
        arguments = make_blank_medium(processor, facts)
        output = processor(text=[placeholder], return_text_replacement_offsets=True, **arguments)
    except _PROCESSOR_ERRORS as error:
        raise UnusableRecordError(f"is rejected by {name}: {error}") from error
    if _OFFSETS_KEY not in output:
        raise InputError(
            f"{name} of the installed transformers does not report the text it writes for a medium: update transformers"
        )
    (replacement,) = output[_OFFSETS_KEY][0]
    text: str = replacement["replacement"]
    return text


def make_blank_medium(processor: Any, facts: MediumFacts) -> dict[str, Any]:
    """Return a blank medium as keyword arguments of a processor."""
    if isinstance(facts, ImageFacts):
        from PIL import Image

        return {"images": [Image.new("RGB", (facts.width, facts.height))]}
    extractor = getattr(processor, "feature_extractor", None) or processor.audio_processor
    rate = int(extractor.sampling_rate)
    silence = np.zeros(facts.samples_at(rate), np.float32)
    return {"audio": [silence], "sampling_rate": rate}


@final
@dataclass(frozen=True, slots=True)
class ProbedProcessor(ProcessorFamily):
    """Family of an unknown processor, which is run once per size of a medium."""

    render: Callable[[MediumFacts], str]

    def expand(self, facts: MediumFacts) -> PlaceholderExpansion:
        size: MediumFacts = (
            AudioFacts(facts.samples, facts.rate)
            if isinstance(facts, AudioFacts)
            else ImageFacts(facts.width, facts.height)
        )
        return collapse_expansion(self.render(size), self.token)


def probe_processor(processor: Any, kind: MediumKind) -> ProbedProcessor:
    placeholder: str = getattr(processor, f"{kind}_token")
    # The repeated token may differ from the placeholder.
    token_ids = getattr(processor, f"{kind}_token_ids", None) or [getattr(processor, f"{kind}_token_id", None)]
    token = placeholder if token_ids[0] is None else processor.tokenizer.convert_ids_to_tokens(token_ids[0])
    render = functools.lru_cache(maxsize=4096)(functools.partial(render_medium, processor, kind))
    return ProbedProcessor(placeholder, token, render, kind=kind)


def find_processor_disagreement(family: ProcessorFamily, processor: Any, image_processor: Any) -> str:
    """Describe where a family and the installed processor differ; "" if they agree.

    ``image_processor`` supplies grid or tiles if the complete processor cannot be loaded (None).
    """
    for facts in _make_probes(family):
        try:
            expansion = family.expand(facts)
        except UnusableRecordError:
            # A medium that the family refuses never reaches the processor.
            continue
        expected = make_full_text(family, expansion)
        if processor is not None:
            rendered_text = render_medium(processor, family.kind, facts)
            if rendered_text != expected:
                count = rendered_text.count(family.token)
                return f"{_describe_facts(facts)} is written with {count:,} tokens, not {sum(expansion.runs):,}"
        elif isinstance(family, SplitFamily) and isinstance(facts, ImageFacts):
            installed_tiles = _get_installed_tiles(image_processor, facts)
            expected_tiles = family.count_tiles(facts)
            if installed_tiles != (expected_tiles if family.splits else (0, 0)):
                became = f"becomes {installed_tiles} rows and columns of tiles, not {expected_tiles}"
                return f"{_describe_facts(facts)} {became}"
        elif isinstance(family, PatchGridFamily):
            grid = _get_installed_grid(image_processor, facts)
            if grid != expansion.grid:
                return f"{_describe_facts(facts)} becomes a grid of {grid}, not {expansion.grid}"
        else:
            return "the processor cannot be built completely, so it cannot be compared"
    return ""


def make_full_text(family: ProcessorFamily, expansion: PlaceholderExpansion) -> str:
    """Return the text for one medium with all its tokens."""
    segments = expansion.text.split(family.token)
    runs = (family.token * run for run in expansion.runs)
    return "".join(part for pair in zip(segments, (*runs, ""), strict=True) for part in pair)


def _make_probes(family: ProcessorFamily) -> list[MediumFacts]:
    if family.kind == "audio":
        return [AudioFacts(samples, 16_000) for samples in _PROBE_SAMPLES]
    return [ImageFacts(width, height) for width, height in _PROBE_SIZES]


def _get_installed_grid(image_processor: Any, facts: MediumFacts) -> tuple[int, int, int]:
    if not isinstance(facts, ImageFacts):
        raise TypeError("only images have a grid")
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    time, rows, columns = np.asarray(image_processor(images=[blank])["image_grid_thw"])[0].tolist()
    return time, rows, columns


def _get_installed_tiles(image_processor: Any, facts: ImageFacts) -> tuple[int, int]:
    blank = np.zeros((facts.height, facts.width, 3), np.uint8)
    output = image_processor(images=[blank], return_row_col_info=True)
    return int(output["rows"][0][0]), int(output["cols"][0][0])


def _describe_facts(facts: MediumFacts) -> str:
    if isinstance(facts, ImageFacts):
        return f"an image of {facts.width} x {facts.height}"
    return f"audio of {facts.samples:,} samples"


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
        import transformers

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
            part, why = _try_load(getattr(_import_transformers(), auto), Path(folder))
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
