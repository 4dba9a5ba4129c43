"""The file of a sweep: which options are searched, in which ranges, and which are fixed. Needs neither torch nor Optuna.

trials: 20
options: {data: digits, epochs: 10}
ranges:
  lr: {from: 1e-4, to: 1e-1, log: true}
  batch_size: {from: 16, to: 128, step: 16}
  optimizer: [adam, adamw]
  model_options.num_experts: [4, 8]
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from raytraced.errors import did_you_mean, fits, type_words
from raytraced.training.config import PRIVATE_FIELDS, TrainConfig, preset_values

Sampler = Literal["tpe", "random", "grid"]
NESTED = ("model_options", "data_options")
"""options that are tables: their own options are named with a dot"""
SCALARS = (bool, int, float, str)
LARGEST = 1e15  # of the ends of a range: beyond it, floats have no whole numbers in between
OWN = ("runs_dir", "name", "quiet", "seed")
"""options that a sweep sets itself; its seed is an entry of the file"""


@dataclass(frozen=True)
class Range:
    """The values that a sweep tries for one option.

    Args:
        name: The option; one of a model or of the data has a dot, such as model_options.k.
        choices: The values, or None for an interval.
        low: Lower end of the interval.
        high: Upper end of the interval, which is included.
        log: Whether values are spread evenly on a logarithmic scale.
        step: Distance between two values; None: any value.
    """

    name: str
    choices: tuple[Any, ...] | None = None
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return all(isinstance(value, int) for value in (self.low, self.high))

    @property
    def samples(self) -> tuple[Any, ...]:
        """Values that stand for the range: all choices, or both ends."""
        return self.choices if self.choices is not None else (self.low, self.high)


@dataclass(frozen=True)
class Sweep:
    """What the file of a sweep says.

    Args:
        ranges: The options that are searched.
        options: The options that all trials share.
        trials: Number of trials.
        seed: Seed of the sampler, and of the training of every trial.
        sampler: How values are chosen: tpe learns from the trials so far, random does not, grid tries all combinations.
        prune: Whether trials are ended early that are worse than the median of the others after as many epochs.
    """

    ranges: tuple[Range, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    trials: int = 20
    seed: int = 0
    sampler: Sampler = "tpe"
    prune: bool = True

    def configure(self, values: Mapping[str, Any], **own: Any) -> TrainConfig:
        """The configuration of a trial: its preset, the shared options, then the values of the ranges.

        Args:
            values: Value of each range, by its name.
            own: Further fields, such as the name of the run.

        Returns:
            The configuration; refuses values out of range.
        """
        given = join_tables({**self.options, **values})
        model, data = given.get("model", TrainConfig.model), given.get("data", TrainConfig.data)
        preset = given.get("preset", TrainConfig.preset)
        for name, value in (("model", model), ("data", data), ("preset", preset)):
            if not isinstance(value, str):
                raise ValueError(f"{name}={value!r:.60}: must be {type_words(str)}")
        return TrainConfig(**preset_values(preset, data, model) | {"quiet": True, "seed": self.seed} | given | own)


def join_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"model_options.k": 4} as {"model_options": {"k": 4}}."""
    joined: dict[str, Any] = {}
    for name, value in values.items():
        table, dot, key = name.partition(".")
        if dot:
            joined[table] = {**joined.get(table, {}), key: value}
        else:
            joined[name] = {**joined.get(name, {}), **value} if isinstance(value, dict) else value
    return joined


def read_sweep(path: Path) -> Sweep:
    """Read the file of a sweep; a mistake in it is one line.

    Args:
        path: A YAML file.

    Returns:
        What it says.
    """
    content = read_yaml(path)
    kinds = typing.get_type_hints(Sweep) | {"ranges": dict, "options": dict}
    try:
        for name, value in content.items():
            refuse_unknown(str(name), kinds)
            if not fits(value, kinds[name]):
                raise ValueError(f"{name}={value!r}: must be {type_words(kinds[name])}")
        if not content.get("ranges"):
            raise ValueError("ranges: there are none; give at least one option to search, such as lr: [0.001, 0.01]")
        options = content.get("options", {})
        for name in options:
            check_option(str(name), OWN)
        ranges = tuple(read_range(str(name), value, options) for name, value in content["ranges"].items())
        sweep = Sweep(**content | {"ranges": ranges})
        check_sweep(sweep)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return sweep


def read_yaml(path: Path) -> dict[str, Any]:
    """The table of a YAML file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), ScientificLoader)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text; give a YAML file") from None
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply; give a table with the entry ranges") from None
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        where = f", line {place.line + 1}, column {place.column + 1}" if place else ""
        raise ValueError(f"{path}: is not valid YAML{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is not the file of a sweep; it needs a table with the entry ranges")
    return content


class ScientificLoader(yaml.SafeLoader):
    """Reads 1e-4 as a number; YAML 1.1 has it as text because of the missing point. Refuses aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As in PyYAML, without aliases: a table could contain itself, or a few lines could stand for a billion."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"*{self.peek_event().anchor}: a sweep has no aliases; write the value out")
        return super().compose_node(parent, index)


ScientificLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def refuse_unknown(name: str, known: Mapping[str, Any]) -> None:
    """Refuse an entry that the file of a sweep does not have."""
    if name not in known:
        raise ValueError(f"{name}: no such entry; {did_you_mean(name, known)}")


def check_option(name: str, unknown: tuple[str, ...]) -> None:
    """Refuse what is not an option of training, or one of those that a sweep does not take here."""
    known = [one.name for one in fields(TrainConfig) if one.name not in unknown]
    table, dot, _ = name.partition(".")
    if table not in known or (dot and table not in NESTED):
        raise ValueError(f"{name}: no such option of a sweep; {did_you_mean(name, known)}")


def read_range(name: str, value: Any, options: Mapping[str, Any]) -> Range:
    """A range from a list of choices, or from a table with from, to, log and step."""
    check_option(name, (*OWN, *PRIVATE_FIELDS, "preset"))
    if name in NESTED:
        raise ValueError(f"ranges.{name}: is a table; name one of its options, such as {name}.NAME")
    if name in join_names(options):
        raise ValueError(f"ranges.{name}: stands in options, too; leave it out of one of them")
    if isinstance(value, list):
        if len(value) < 2 or not all(isinstance(one, SCALARS) or one is None for one in value):
            raise ValueError(f"ranges.{name}={value}: must be at least two numbers or words")
        return Range(name, tuple(value))
    if not isinstance(value, dict) or not {"from", "to"} <= value.keys():
        example = "{from: 1e-4, to: 1e-1, log: true}"
        raise ValueError(f"ranges.{name}={value}: is not a range; give a list of choices, or {example}")
    for key in value:
        if key not in ("from", "to", "log", "step"):
            raise ValueError(
                f"ranges.{name}.{key}: no such entry; {did_you_mean(str(key), ('from', 'to', 'log', 'step'))}"
            )
    low, high, log, step = value["from"], value["to"], value.get("log", False), value.get("step")
    numbers = [low, high, *([] if step is None else [step])]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers) or not isinstance(
        log, bool
    ):
        raise ValueError(f"ranges.{name}={value}: from, to and step must be numbers, log true or false")
    if not all(abs(one) <= LARGEST for one in numbers):  # NaN too
        raise ValueError(f"ranges.{name}={value!r:.60}: from, to and step must be finite, at most {LARGEST:g}")
    if not low < high:
        raise ValueError(f"ranges.{name}: from={low} must be below to={high}")
    if log and low <= 0:
        raise ValueError(f"ranges.{name}: from={low} must be above 0 on a logarithmic scale")
    if step is not None and (step <= 0 or log):
        raise ValueError(f"ranges.{name}: step={step} must be above 0, and has no logarithmic scale")
    return Range(name, None, low, high, log, step)


def join_names(options: Mapping[str, Any]) -> set[str]:
    """The names of options, with those inside tables."""
    inside = (f"{table}.{key}" for table in NESTED if isinstance(options.get(table), dict) for key in options[table])
    return {*options, *inside}


def check_sweep(sweep: Sweep) -> None:
    """Refuse numbers out of range, and values that training would refuse."""
    if sweep.trials < 1:
        raise ValueError(f"trials={sweep.trials}: must be at least 1")
    if not 0 <= sweep.seed < 2**32:
        raise ValueError(f"seed={sweep.seed}: must lie in 0 … 2**32 - 1")
    if sweep.sampler == "grid":
        for one in sweep.ranges:
            if one.choices is None and one.step is None:
                raise ValueError(f"ranges.{one.name}: sampler=grid needs choices or a step")
    try:
        sweep.configure({})
    except ValueError as error:
        raise ValueError(f"options: {error}") from error
    for one in sweep.ranges:
        for value in one.samples:
            try:
                sweep.configure({one.name: value})
            except ValueError as error:
                raise ValueError(f"ranges.{one.name}: {error}") from error
