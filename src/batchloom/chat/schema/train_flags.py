"""Train flags of messages, of the parts of their contents, and of text segments.

``TRAIN_FLAGS`` lists the flags of other libraries. A *switch* says whether a turn is trained. A *weight* does, too, and
weights its loss. A *factor* weights a turn that is trained anyway, without its stop token. *Ranges* are characters of
the content.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from batchloom.core.document import ContentRange, TrainFlag, TurnWeight
from batchloom.core.errors import UnusableRecordError
from batchloom.core.loss_weights import parse_loss_weight
from batchloom.core.settings import as_int
from batchloom.core.wording import describe_json_type

_ASSISTANT = "assistant"
_DETAIL_KEYS = ("begin_offset", "end_offset", "train")


class FlagRule(NamedTuple):
    """Meaning of a flag."""

    library: str
    kind: Literal["switch", "inverted switch", "weight", "factor", "ranges"]
    # Whether the flag of another turn can only exclude it, because the library trains only assistant turns.
    is_assistant_only: bool = False
    # Whether parts of a content may have it, too.
    is_for_parts: bool = True


TRAIN_FLAGS: dict[str, FlagRule] = {
    "train": FlagRule("axolotl and batchloom", "switch"),
    "training": FlagRule("axolotl", "switch"),
    "loss": FlagRule("ms-swift", "switch", is_assistant_only=True),
    "masked": FlagRule("torchtune", "inverted switch", is_for_parts=False),
    "weight": FlagRule("OpenAI and Mistral", "weight", is_assistant_only=True),
    "loss_weight": FlagRule("LLaMA-Factory", "weight"),
    "loss_scale": FlagRule("ms-swift", "factor", is_assistant_only=True),
    "train_detail": FlagRule("axolotl", "ranges", is_for_parts=False),
}
PART_FLAGS = frozenset(name for name, rule in TRAIN_FLAGS.items() if rule.is_for_parts)
SEGMENT_FLAGS = {
    "label": FlagRule("axolotl", "switch"),
    **{name: rule for name, rule in TRAIN_FLAGS.items() if rule.kind != "ranges"},
}


class _Flags(NamedTuple):
    """Flags of a message or part: whether it is trained, and weights of its loss."""

    trained: bool | None
    # Weight of the content.
    weight: float
    # Weight of the stop token, which has no factor.
    stop_weight: float


class _Selection(NamedTuple):
    """Trained ranges of a content (None: all of it), and its message's own flag."""

    ranges: tuple[ContentRange, ...] | None
    trained: bool | None


def read_train_flag(message: Mapping[str, Any], field_path: str) -> TrainFlag:
    """Return what the flags of a message and of its parts say; None if it has none.

    A content with flagged parts must be joined to one text afterwards (:func:`join_flagged_parts`).
    """
    content, detail = message.get("content"), message.get("train_detail")
    flags = _read_flags(message, field_path, is_assistant=message["role"] == _ASSISTANT)
    selection = _Selection(None, None)
    if isinstance(content, list) and has_part_flags(content):
        join_flagged_parts(content, f"{field_path}.content")
        selection = _read_part_flags(content, f"{field_path}.content")
    if detail is not None:
        if selection.ranges is not None:
            raise UnusableRecordError(f"{field_path} has train_detail and flags of parts; leave one out")
        selection = _read_train_detail(detail, content, f"{field_path}.train_detail")
    if flags.trained is False and selection.trained:
        raise UnusableRecordError(
            f"{field_path} is marked as not trained, but a part of its content as trained; leave one of the two out"
        )
    trained = selection.trained if flags.trained is None else flags.trained
    if trained is False or not flags.weight or selection.ranges == ():
        return False
    stop_weight = None if flags.stop_weight == flags.weight else flags.stop_weight
    if flags.weight == 1 and stop_weight is None and selection.ranges is None:
        return trained
    return TurnWeight(trained, flags.weight, selection.ranges or (), stop_weight)


def read_segment_weight(segment: Mapping[str, Any], field_path: str) -> float:
    """Return the weight of the loss of a text segment, 0 if it is not trained."""
    flags = _read_flags(segment, field_path, SEGMENT_FLAGS, is_assistant=True)
    return 0.0 if flags.trained is False else flags.weight


def has_part_flags(content: list[Any]) -> bool:
    """Return whether a part of a content has a flag."""
    return any(
        isinstance(part, dict) and any(part.get(name) is not None for name in PART_FLAGS & part.keys())
        for part in content
    )


def join_flagged_parts(content: Any, field_path: str) -> Any:
    """Join text parts to one text if any has a flag; return others unchanged."""
    if not isinstance(content, list) or not has_part_flags(content):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise UnusableRecordError(
                f"{field_path}[{number}] is no text, and another part has a train flag: flags of parts are for "
                "contents of text alone; flag the message instead"
            )
    return "".join(part["text"] for part in content)


def _read_flags(
    values: Mapping[str, Any], field_path: str, rules: Mapping[str, FlagRule] = TRAIN_FLAGS, *, is_assistant: bool
) -> _Flags:
    """Read switches, weights and factors, and refuse those that contradict each other."""
    trained: dict[str, bool] = {}
    weights: dict[str, float] = {}
    factor = 1.0
    for name, rule in rules.items():
        value = values.get(name)
        if value is None or rule.kind == "ranges":
            continue
        if rule.kind.endswith("switch"):
            if not isinstance(value, bool):
                raise UnusableRecordError(f"{field_path}.{name} is {value!r:.40}; it can be true or false")
            trained[name] = value != (rule.kind == "inverted switch")
            continue
        weight = parse_loss_weight(value, f"{field_path}.{name}")
        if rule.kind == "factor":
            factor *= weight if is_assistant else 1
        else:
            trained[name] = weight > 0
            if weight and (is_assistant or not rule.is_assistant_only):
                weights[name] = weight
    if len(set(trained.values())) > 1:
        raise _make_contradiction_error(values, trained, field_path)
    if len(set(weights.values())) > 1:
        raise _make_contradiction_error(values, weights, field_path)
    if not is_assistant:
        trained = {name: flag for name, flag in trained.items() if not flag or not rules[name].is_assistant_only}
    weight = next(iter(weights.values()), 1.0)
    return _Flags(next(iter(trained.values()), None), weight * factor, weight)


def _make_contradiction_error(
    values: Mapping[str, Any], names: Mapping[str, object], field_path: str
) -> UnusableRecordError:
    flag_list = " and ".join(f"{name} {values[name]}" for name in names)
    return UnusableRecordError(f"{field_path} has {flag_list}, which contradict each other; leave one out")


def _read_part_flags(content: list[Any], field_path: str) -> _Selection:
    """Return the weights of text parts.

    As in axolotl, a part without a flag is trained if the message is, and a switch of any part selects the message.
    """
    ranges: list[ContentRange] = []
    trained, offset = None, 0
    for number, part in enumerate(content):
        flags = _read_flags(part, f"{field_path}[{number}]", is_assistant=True)
        stop = offset + len(part["text"])
        weight = 0.0 if flags.trained is False else flags.weight
        if weight and stop > offset:
            ranges.append(ContentRange(offset, stop, weight))
        if flags.trained is not None:
            trained = True
        offset = stop
    return _Selection(tuple(ranges), bool(ranges) if trained else None)


def _read_train_detail(value: object, content: object, field_path: str) -> _Selection:
    """Return the trained ranges of ``train_detail``, whose ends are included."""
    if not isinstance(value, list):
        raise UnusableRecordError(f"{field_path} holds {describe_json_type(value)}, not a list of ranges")
    if not isinstance(content, str):
        raise UnusableRecordError(f"{field_path} counts characters of a text, but the content is no text")
    ranges = []
    for number, detail in enumerate(value):
        item_path = f"{field_path}[{number}]"
        if not isinstance(detail, dict) or any(detail.get(key) is None for key in _DETAIL_KEYS):
            raise UnusableRecordError(f"{item_path} is not an object with {', '.join(_DETAIL_KEYS)}")
        begin, end = as_int(detail["begin_offset"]), as_int(detail["end_offset"])
        if not isinstance(detail["train"], bool):
            raise UnusableRecordError(f"{item_path}.train is {detail['train']!r:.40}; it can be true or false")
        if begin is None or end is None or not 0 <= begin <= end or begin >= len(content):
            raise UnusableRecordError(
                f"{item_path} is from {detail['begin_offset']!r:.40} to {detail['end_offset']!r:.40}; offsets count "
                f"the {len(content):,} characters of the content from 0, and the end is included"
            )
        if detail["train"]:
            ranges.append(ContentRange(begin, min(end + 1, len(content)), 1.0))
    return _Selection(tuple(ranges), bool(ranges))
