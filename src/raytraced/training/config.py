"""The configuration of a run: one frozen dataclass whose fields are the options of `raytraced train`, and its presets."""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from raytraced.errors import check_threads, fits, require, type_words
from raytraced.models.card import translate_old_names

Preset = Literal["best", "paper", "quick"]

# Where and how a run is made, not what is made: these may differ between two runs that give the same model.
PRIVATE_FIELDS = (
    "data_root", "runs_dir", "name", "quiet", "device", "threads", "checkpoint_seconds", "checkpoint_steps",
    "tracker",
)  # fmt: skip

# Fields that had other names before version 0.2: runs that were started then can still be resumed.
OLD_FIELDS = {"output": "runs_dir"}


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run."""

    data: str = "digits"
    """data set: see `raytraced data list`; or a path: a folder of class folders, an .npz file, a text or a folder of texts"""
    model: str = "mre"
    """model: see `raytraced models`"""
    preset: Preset = "best"
    """the defaults of all options below: our best recipe for this data set, the paper's, or a short one"""
    model_options: dict[str, Any] = field(default_factory=dict)
    """options of the model, for example --model_options.train_select greedy"""
    data_root: str | None = None
    """cache folder of data sets (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder)"""
    data_options: dict[str, Any] = field(default_factory=dict)
    """options of the data, for example --data_options.augment true or --data_options.size 64"""

    epochs: int = 40
    """passes over the training data"""
    batch_size: int | None = None
    """samples per step, over all processes together (default: the preset's; for custom data by the number of samples)"""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """the optimizer (sgd: with momentum 0.9)"""
    lr: float = 5e-3
    """learning rate"""
    lr_routing: float | None = None
    """learning rate of the entry gate and the routing network (default: lr)"""
    lr_experts: float | None = None
    """learning rate of the experts (default: lr)"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """schedule of the learning rate: down to 0 along a half cosine, or constant"""
    warmup: float = 0.0
    """epochs over which the learning rate rises from 0 at the start"""
    weight_decay: float = 0.0
    """weight decay (adamw: decoupled from the gradient)"""
    clip: float | None = None
    """largest norm of the gradient; larger gradients are scaled down to it"""
    label_smoothing: float = 0.0
    """share of the target that is spread over all classes"""
    patience: int | None = None
    """stop after this many epochs without a better figure on validation data, and use the best weights"""
    target_experts: float | None = None
    """mean number of experts per sample that training steers towards; the mean comes near this number, not exactly to it"""
    anytime_loss: float = 0.0
    """share (0 to 1) of the loss that is computed on answers along the sequence instead of the last one"""
    exit_loss: float = 0.0
    """share (0 to 1) of the loss that is computed on the exits (after no layer, after the first, …), for early exit"""

    select: Literal["greedy", "sample"] = "greedy"
    """how experts are chosen on validation and test data"""
    seed: int = 0
    """seed of the weights, the order of the data and all draws"""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one"""
    threads: int | None = None
    """CPU threads (null: PyTorch's choice; wide experts gain from more); another number may change the last bits"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """precision of the matrix products; weights and firing rates stay in float32"""
    compile: bool = False
    """compile the model first: takes a while, worthwhile for large models only"""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """under torchrun: a copy of the model per process (ddp), or a shard (fsdp)"""

    runs_dir: str = "runs"
    """folder that run folders are made in"""
    name: str | None = None
    """name of the run folder (default: time, data and model)"""
    checkpoint_seconds: float = 60.0
    """write a checkpoint at least this often; there is one after every epoch, too"""
    checkpoint_steps: int | None = None
    """write a checkpoint after every so many steps, too"""
    tracker: str | None = None
    """also log to wandb, trackio or mlflow, several with commas; TensorBoard's events are written if it is installed"""
    quiet: bool = False
    """print nothing but the run folder"""

    def __post_init__(self) -> None:
        """Refuse values out of range, in one line."""
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not one.default and not fits(value, one.type):  # fast: plans make thousands of these
                raise ValueError(f"{one.name}={value!r}: must be {type_words(one.type)}")
        at_least = {"epochs": 0, "batch_size": 1, "seed": 0, "patience": 1, "checkpoint_steps": 1}
        at_least |= {"warmup": 0, "weight_decay": 0, "checkpoint_seconds": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"must be at least {least}")
        check_threads(self.threads)
        for name in ("lr", "lr_routing", "lr_experts", "clip", "target_experts"):
            value = getattr(self, name)
            require(value is None or 0 < value < float("inf"), name, value, "must be positive and finite")
        require(
            0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "must lie in 0 … 1 (1 excluded)"
        )
        for name in ("anytime_loss", "exit_loss"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must lie in 0 … 1")
        require(self.warmup <= self.epochs, "warmup", self.warmup, f"must not exceed epochs={self.epochs}")
        require(self.seed < 2**63, "seed", self.seed, "must be below 2**63")
        if self.name is not None:
            is_plain = Path(self.name).name == self.name and not self.name.startswith(".") and bool(self.name)
            require(is_plain, "name", repr(self.name), "must be a plain folder name; --runs-dir sets where it is made")

    def public(self) -> dict[str, Any]:
        """The fields that decide what the model becomes; a shared card holds these and no local paths."""
        return {name: value for name, value in asdict(self).items() if name not in PRIVATE_FIELDS}


def preset_values(preset: Preset, data: str, model: str) -> dict[str, Any]:
    """The options that a preset sets.

    Args:
        preset: Name of the preset.
        data: Name or path of the data set.
        model: Name of the model.

    Returns:
        Names and values; all other options keep their defaults.
    """
    digits = data == "digits"
    # A step of the paper's small models takes milliseconds: threads gain little, and wait for each other where another
    # process keeps a core busy (digits: 10 s with one thread, minutes with two).
    threads = {"threads": 1}
    if model.startswith("gpt-"):  # found on validation bytes of the bundled text: docs/lab/text.md
        text = {"batch_size": 16, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip": 1.0}
        text |= {"lr_routing": 3e-4} if model == "gpt-mre" else {}  # slow gates: docs/lab/paths.md
        return threads | text | {"epochs": 2 if preset == "quick" else 10}
    if preset == "paper":
        paper = {"epochs": 40, "batch_size": 256, "lr": 1e-3, "schedule": "constant"}
        return threads | paper | ({"select": "sample"} if model == "mre-paper" else {})
    best: dict[str, Any] = {"epochs": 60, "batch_size": 64} if digits else {"epochs": 40, "batch_size": 256}
    if is_custom_data(data):  # the number of samples is known when they are loaded
        best["batch_size"] = None
    best |= {"optimizer": "adamw", "weight_decay": 0.1}  # better for every model: docs/lab/recipe.md
    if model == "mre":  # good early answers, and short sequences for easy samples: docs/lab/recipe.md
        best |= {"exit_loss": 0.5, "target_experts": 6.0}
    return threads | best | ({"epochs": 5 if digits else 2} if preset == "quick" else {})


def is_custom_data(data: str) -> bool:
    """Whether a data set is a path and not a name of the catalogue."""
    from raytraced.tasks.registry import is_catalogued

    return Path(data).expanduser().exists() and not is_catalogued(data)


def write_config(config: TrainConfig) -> str:
    """Format a configuration as the text of config.yaml."""
    return str(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))


def make_config(values: dict[str, Any]) -> TrainConfig:
    """A configuration from plain values, written by this version or by an earlier one."""
    values = translate_old_names(values)
    return TrainConfig(**{OLD_FIELDS.get(name, name): value for name, value in values.items()})


def read_config(path: str | os.PathLike[str]) -> TrainConfig:
    """Read a configuration from config.yaml."""
    try:
        return make_config(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not the configuration of a run ({str(error).splitlines()[0]})") from error
