"""What a run is made of: one frozen dataclass whose fields are the options of `raytraced train`, and its presets."""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from raytraced.words import fits, require, type_words

Preset = Literal["best", "paper", "quick"]

# What two runs may differ in without being different runs: where they were made, not what was made.
PRIVATE_FIELDS = (
    "data_root", "output", "name", "quiet", "device", "threads", "checkpoint_seconds", "checkpoint_steps",
)  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run."""

    data: str = "digits"
    """data set: see `raytraced data list`; or a path: a folder of class folders, an .npz file, a text or a folder of texts"""
    model: str = "mre"
    """model: see `raytraced models`"""
    preset: Preset = "best"
    """the defaults of all options below: our best recipe for this data set, the paper's, or one that is over soon"""
    model_options: dict[str, Any] = field(default_factory=dict)
    """options of the model, one by one: --model_options.train_select greedy"""
    data_root: str | None = None
    """where data sets are looked for and kept (default: RAYTRACED_HOME or the user's cache folder)"""
    data_options: dict[str, Any] = field(default_factory=dict)
    """options of the data, one by one: --data_options.augment true, --data_options.size 64"""

    epochs: int = 40
    """passes over the training data"""
    batch_size: int = 256
    """samples a step, over all processes together"""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """how gradients move the weights (sgd: momentum 0.9)"""
    lr: float = 5e-3
    """learning rate"""
    lr_routing: float | None = None
    """learning rate of the entry gate and the routing network (default: lr)"""
    lr_experts: float | None = None
    """learning rate of the experts (default: lr)"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """how the learning rate moves: down to 0 along a half cosine, or not at all"""
    warmup: float = 0.0
    """epochs over which the learning rate first rises from 0"""
    weight_decay: float = 0.0
    """pull of the weights to 0 (adamw: decoupled from the gradient)"""
    clip: float | None = None
    """largest norm of the gradient; a larger one is scaled down"""
    label_smoothing: float = 0.0
    """share of the target that is spread over all answers"""
    patience: int | None = None
    """stop after this many epochs without a better figure on validation data, and keep the best weights"""
    target_experts: float | None = None
    """the mean number of experts that sequences learn to end at, fewer for what is easy and more for what is hard"""
    anytime_loss: float = 0.0
    """share (0 to 1) of the loss that is asked of the answers along the sequence, not only of the last one"""
    look_loss: float = 0.0
    """share (0 to 1) of the loss that is asked of the answers after no layer, after the first, …, for who stops when sure"""

    select: Literal["greedy", "sample"] = "greedy"
    """how experts are chosen when the model is judged, on validation and test data"""
    seed: int = 0
    """of the weights, the order of the data and all draws"""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one"""
    threads: int | None = None
    """CPU threads (null: torch's choice; give more for wide experts); another number may change the last bits"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """of the matrix products; weights and firing rates stay in float32"""
    compile: bool = False
    """compile the model first: takes a while, pays for large models only"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """under torchrun: a whole model in each process, or a shard"""

    output: str = "runs"
    """folder that run folders are made in"""
    name: str | None = None
    """name of the run folder (default: time, data and model)"""
    checkpoint_seconds: float = 60.0
    """a checkpoint at least this often; there is one after every epoch anyway"""
    checkpoint_steps: int | None = None
    """a checkpoint every so many steps too"""
    quiet: bool = False
    """print nothing but the run folder"""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not one.default and not fits(value, one.type):  # plans make thousands of these
                raise ValueError(f"{one.name}={value!r}: must be {type_words(one.type)}")
        at_least = {"epochs": 0, "batch_size": 1, "seed": 0, "patience": 1, "threads": 1, "checkpoint_steps": 1}
        at_least |= {"warmup": 0, "weight_decay": 0, "checkpoint_seconds": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"must be at least {least}")
        for name in ("lr", "lr_routing", "lr_experts", "clip", "target_experts"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), name, value, "must be positive and finite")
        require(
            0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "must lie in 0 … 1 (1 excluded)"
        )
        for name in ("anytime_loss", "look_loss"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must lie in 0 … 1")
        require(self.warmup <= self.epochs, "warmup", self.warmup, f"must not exceed epochs={self.epochs}")
        require(self.seed < 2**63, "seed", self.seed, "must be below 2**63")
        if self.name is not None:
            is_plain = Path(self.name).name == self.name and not self.name.startswith(".") and bool(self.name)
            require(is_plain, "name", repr(self.name), "must be a plain folder name; --output sets where it is made")

    def public(self) -> dict[str, Any]:
        """What makes a run this run, and may be told to who gets its model."""
        return {name: value for name, value in asdict(self).items() if name not in PRIVATE_FIELDS}


def preset_values(preset: Preset, data: str, model: str) -> dict[str, Any]:
    """The options that a preset sets for this data set and model; the others keep their own defaults."""
    digits = data == "digits"
    # A step of the paper's small models takes milliseconds: threads gain little, and where other work keeps a core
    # busy they wait for one another (digits: 10 s with one thread, minutes with two).
    threads = {"threads": 1}
    if model.startswith("gpt-"):  # found on validation bytes of the bundled text: docs/text.md
        text = {"batch_size": 16, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip": 1.0}
        text |= {"target_experts": 8.0} if model == "gpt-mre" else {}
        return threads | text | {"epochs": 2 if preset == "quick" else 10}
    if preset == "paper":
        paper = {"epochs": 40, "batch_size": 256, "lr": 1e-3, "schedule": "constant"}
        return threads | paper | ({"select": "sample"} if model == "mre-paper" else {})
    best: dict[str, Any] = {"epochs": 60, "batch_size": 64} if digits else {"epochs": 40, "batch_size": 256}
    best |= {"optimizer": "adamw", "weight_decay": 0.1}  # every model gains by it: docs/recipe.md
    if model == "mre":  # answers early, and ends early where that is easy: docs/recipe.md
        best |= {"look_loss": 0.5, "target_experts": 6.0}
    return threads | best | ({"epochs": 5 if digits else 2} if preset == "quick" else {})


def write_config(config: TrainConfig) -> str:
    """The configuration as the text of config.yaml."""
    return str(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))


def read_config(path: str | os.PathLike[str]) -> TrainConfig:
    """The configuration that a run folder's config.yaml holds."""
    try:
        return TrainConfig(**yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not the configuration of a run ({str(error).splitlines()[0]})") from error
