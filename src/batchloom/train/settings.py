"""The settings of a run: the model's shape, the optimizer's course, the size of a step."""

import dataclasses
import json
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from batchloom.core.errors import InputMissingError, SettingsError
from batchloom.core.spec import from_plain, nearest, raise_problems


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The shape of the model in ``model.py``.

    Attributes:
        layers: transformer layers.
        heads: attention heads a layer.
        width: size of the residual stream; a multiple of ``2 * heads`` (rotary needs pairs).
        hidden: size of the SwiGLU's inside; None for 8/3 of the width, up to a multiple of 64.
        rotary_base: the longest rotary period, in tokens over 2 pi.
        vocab_size: None for the tokenizer's; stated only for data that names no tokenizer.
    """

    layers: int
    heads: int
    width: int
    hidden: int | None = None
    rotary_base: float = 10_000.0
    vocab_size: int | None = None

    def problems(self) -> list[str]:
        """What is wrong with these values, each problem with its path."""
        floors = {"layers": 1, "heads": 1, "width": 2, "hidden": 1, "vocab_size": 2}
        found = _too_small(floors, self)
        if self.heads > 0 and self.width % (2 * self.heads):
            found.append(
                f"width: {self.width} is not a multiple of {2 * self.heads} "
                f"(2 x {self.heads} heads)"
            )
        return [f"model.{problem}" for problem in found]


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW and the course of its learning rate: linear warm-up, then a cosine.

    Attributes:
        lr: the highest learning rate.
        final_lr_share: the learning rate of the last step, as a share of ``lr``.
        warmup_steps: steps until ``lr`` is reached.
        weight_decay: applied to matrices only, never to gains.
        beta1: decay of the gradient's mean.
        beta2: decay of the gradient's square.
        clip: gradients are scaled down to this norm.
    """

    lr: float = 1e-3
    final_lr_share: float = 0.1
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

    def problems(self) -> list[str]:
        """What is wrong with these values, each problem with its path."""
        found = _too_small({"warmup_steps": 0, "weight_decay": 0, "final_lr_share": 0}, self)
        found += [
            f"{name}: {getattr(self, name)} is not above 0"
            for name in ("lr", "clip")
            if not getattr(self, name) > 0
        ]
        found += [
            f"{name}: {getattr(self, name)} is not in [0, 1)"
            for name in ("beta1", "beta2")
            if not 0 <= getattr(self, name) < 1
        ]
        return [f"optim.{problem}" for problem in found]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides what a run computes.

    Attributes:
        model: the model's shape.
        optim: the optimizer's course.
        steps: optimizer steps of the whole run.
        seq_len: tokens of a sequence.
        global_batch_size: sequences of a step, over all ranks.
        batch_size: rows in one forward pass of one rank; None for the rank's whole share.
        packing: the plan's packing strategy.
        seed: of the order of the data and of the first weights.
        eval_interval: steps between two looks at the val subset; 0 for the end only.
        eval_batches: batches of ``global_batch_size`` sequences a look; None for the whole subset.
        save_interval: steps between two checkpoints; 0 for the end only.
        compile: whether the model goes through ``torch.compile``.
    """

    model: ModelSettings
    optim: OptimSettings = field(default_factory=OptimSettings)
    steps: int = 1000
    seq_len: int = 1024
    global_batch_size: int = 32
    batch_size: int | None = None
    packing: str = "best_fit"
    seed: int = 0
    eval_interval: int = 100
    eval_batches: int | None = 20
    save_interval: int = 200
    compile: bool = False

    def __post_init__(self) -> None:
        floors = {
            "steps": 1,
            "seq_len": 2,
            "global_batch_size": 1,
            "batch_size": 1,
            "eval_interval": 0,
            "eval_batches": 1,
            "save_interval": 0,
        }
        raise_problems(_too_small(floors, self) + self.model.problems() + self.optim.problems())


def _too_small(floors: dict[str, int], spec: object) -> list[str]:
    values = {name: getattr(spec, name) for name in floors}
    return [
        f"{name}: {value} is below {floors[name]}"
        for name, value in values.items()
        if value is not None and not value >= floors[name]
    ]


def model_names() -> list[str]:
    """The names of the configurations that ship with the package."""
    folder = resources.files("batchloom.train") / "configs"
    names = [file.name for file in folder.iterdir() if file.name.endswith(".json")]
    return sorted(name.removesuffix(".json") for name in names)


def named_config(name: str) -> dict[str, Any]:
    """The plain values of a configuration that ships with the package.

    Raises:
        SettingsError: there is none of that name.
    """
    names = model_names()
    if name not in names:
        raise SettingsError(
            [f"--model-name: {name!r} is none of {', '.join(names)}{nearest(name, names)}"]
        )
    text = (resources.files("batchloom.train") / "configs" / f"{name}.json").read_text("utf-8")
    return dict(json.loads(text))


def read_config(path: Path) -> dict[str, Any]:
    """The plain values of a configuration file, unchecked.

    Raises:
        InputMissingError: there is no such file.
        SettingsError: it is not a JSON object.
    """
    if not path.is_file():
        raise InputMissingError(
            f"{path}: no such file; --config-file takes a JSON file such as those that "
            f"--model-name names ({', '.join(model_names())})"
        )
    try:
        values = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise SettingsError([f"{path}: not JSON: {error}"]) from error
    if not isinstance(values, dict):
        raise SettingsError([f"{path}: holds {type(values).__name__}, not a JSON object"])
    return values


def settings_from(plain: dict[str, Any], changes: dict[str, Any], path: str = "") -> TrainSettings:
    """Settings from a configuration's plain values and what was asked for over them.

    Args:
        plain: as a configuration file holds it.
        changes: fields of TrainSettings to set, where the value is not None; ``lr`` goes
            to the optimizer's settings.
        path: named before every problem.

    Raises:
        SettingsError: unknown settings, missing ones, wrong types and impossible values.
    """
    settings = from_plain(TrainSettings, plain, path)
    given = {name: value for name, value in changes.items() if value is not None}
    lr = given.pop("lr", None)
    if lr is not None:
        given["optim"] = dataclasses.replace(settings.optim, lr=lr)
    return dataclasses.replace(settings, **given)


def accumulation(settings: TrainSettings, world_size: int) -> int:
    """Forward passes of one rank that make one step.

    Raises:
        SettingsError: the sizes do not divide; names sizes that do.
    """
    total = settings.global_batch_size
    if total % world_size:
        below, above = total // world_size * world_size, -(-total // world_size) * world_size
        fitting = " or ".join(str(n) for n in (below, above) if n)
        problem = f"{total} sequences cannot be shared by {world_size} ranks; {fitting} can"
        raise SettingsError([f"global_batch_size: {problem} (--global-batch-size)"])
    share = total // world_size
    rows = settings.batch_size or share
    if share % rows:
        fitting = ", ".join(str(n) for n in range(1, share + 1) if share % n == 0)
        problem = (
            f"a rank's {share} sequences a step ({total} over {world_size} ranks) cannot be cut "
            f"into passes of {rows}; --batch-size {fitting} can"
        )
        raise SettingsError([f"batch_size: {problem}"])
    return share // rows
