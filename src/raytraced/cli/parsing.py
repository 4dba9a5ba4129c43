"""Options of a command from its function's signature and docstring; jsonargparse reads them.

Where jsonargparse refuses the words of a command, `explain` finds out which of them is wrong and says it in one line: what
was wrong, its value, the rule and the remedy. Importing this file does not import torch.
"""

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from docstring_parser import parse, parse_from_object
from jsonargparse import ArgumentError, ArgumentParser

from raytraced.errors import did_you_mean, type_words
from raytraced.models.card import OLD_NAMES
from raytraced.training.config import preset_values

# One name means one thing in all commands. The docstring of a command describes its other options.
SHARED_OPTIONS = {
    "run": "A run folder, its name in the runs folder, a model.safetensors file, or a shipped model's name.",
    "runs_dir": "Folder that holds run folders.",
    "data": "Data set, by name or path (default: the one that the model was trained on).",
    "data_root": "Cache folder of data sets (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache).",
    "skip_bad": "Leave out files that cannot be read, and say how many.",
    "weights": "last: of the end of training; best: of the best epoch so far, also of a run that is not complete.",
    "device": "cpu, cuda, …; auto uses a GPU if there is one.",
    "threads": "Number of CPU threads.",
    "max_experts": "Largest number of experts per sample.",
    "stop": "How much the output node's rate counts when the next expert is chosen; smaller values run more experts.",
    "experts": "Mean number of experts per sample or token; for a model that was calibrated.",
    "effort": "Share of the full cost, up to 1; for a model that was calibrated.",
    "confidence": "Exit at the first answer whose probability reaches this threshold, or the calibrated one.",
    "exit_every": "Where the model can exit: after every layer or after every expert.",
    "memory": "Most memory for the experts of a store (`raytraced store`), such as 2GB (default: all of them).",
    "json": "Print JSON instead of tables; lists are printed with one object per line.",
}

# Names that other tools, or earlier versions of this one, give to options.
SYNONYMS = OLD_NAMES | {
    "learning_rate": "lr", "dataset": "data", "arch": "model", "batch": "batch_size", "num_epochs": "epochs",
    "workers": "threads", "gpu": "device", "decay": "weight_decay",
    "out": "output", "file": "output", "picture": "output", "output": "runs_dir", "folder": "runs_dir", "root": "data_root",
    "image_size": "data_options.size", "augment": "data_options.augment", "skip_bad": "data_options.skip_bad",
    "colour": "data_options.colour", "context": "data_options.context", "tokenizer": "data_options.tokenizer",
}  # fmt: skip

SEE_HELP = "see --help"
PLUGIN_HELP = "--plugin FILE, after the command and as often as needed, loads routers, tasks, data sets or kernels."
LISTS = (list[str], list[str] | None)
OF_ALL = ("help",)
OF_CONFIGS = ("help", "config", "print_config")
"""options that the parser adds to those of a function: of any one, and of one with a parameter `config`"""


class Option(NamedTuple):
    """A parameter of a command's function, or a field of its configuration."""

    name: str
    kind: Any
    default: Any
    help: str

    @property
    def is_positional(self) -> bool:
        """Whether it is given without its name: what has no default, and lists."""
        return self.default is inspect.Parameter.empty or self.kind in LISTS


def options_of(function: Callable[..., Any]) -> list[Option]:
    """The options of a command; those of a function with a parameter `config` are the fields of its dataclass."""
    kinds = typing.get_type_hints(function)
    if config := kinds.get("config"):
        documented = {one.arg_name: one.description or "" for one in parse_from_object(config).params}
        defaults = {name: value.default for name, value in inspect.signature(config).parameters.items()}
        # signature() shows a placeholder where a field makes its default by a function
        defaults |= {one.name: one.default_factory() for one in fields(config) if callable(one.default_factory)}
        kinds = typing.get_type_hints(config)
    else:
        documented = {one.arg_name: one.description or "" for one in parse(inspect.getdoc(function) or "").params}
        defaults = {name: value.default for name, value in inspect.signature(function).parameters.items()}
    return [
        Option(name, kinds[name], default, documented.get(name) or SHARED_OPTIONS.get(name, ""))
        for name, default in defaults.items()
    ]


def describe(function: Callable[..., Any]) -> str:
    """The first sentence of a function's docstring."""
    return parse(inspect.getdoc(function) or "").short_description or ""


def make_parser(**settings: Any) -> ArgumentParser:
    """A parser that raises its errors and takes no abbreviations, without options."""
    return ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config="--print-config", **settings)


def add_options(parser: ArgumentParser, function: Callable[..., Any]) -> list[Option]:
    """Add a function's options to a parser; a configuration can also be given as a YAML file."""
    options = options_of(function)
    if "config" in inspect.signature(function).parameters:
        parser.add_argument("-c", "--config", action="config", help="YAML file of the options below")
    for option in options:
        flag = option.name if option.is_positional else "--" + option.name.replace("_", "-")
        settings: dict[str, Any] = {"type": option.kind, "help": option.help}
        if option.kind in LISTS:
            is_required = option.default is inspect.Parameter.empty
            settings |= {"type": str, "nargs": "+"} if is_required else {"type": str, "nargs": "*", "default": []}
        elif not option.is_positional:
            settings["default"] = option.default
        if option.kind is bool:
            settings |= {"nargs": "?", "const": True}
        parser.add_argument(flag, **settings)
    parser.epilog = f"In option names - and _ mean the same. {PLUGIN_HELP}"
    return options


def read_arguments(
    parser: ArgumentParser,
    function: Callable[..., Any],
    words: list[str],
    top: ArgumentParser | None = None,
    command: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Parse the words of a command.

    Args:
        parser: The parser of the command; the function's options are added to it.
        function: What the command calls. The defaults of its configuration are those of the preset: options win over the
            file, the file over the preset.
        words: The words that follow the command.
        top: The parser that has `parser` as a sub-command (default: there is none).
        command: The words that lead from `top` to `parser`.

    Returns:
        The function's keyword arguments.
    """
    options = add_options(parser, function)
    config_type = typing.get_type_hints(function).get("config")
    words = list(normalise(words, options))
    try:
        if config_type is not None:
            # Help and --print-config end the parsing and show the defaults: the preset is applied before.
            endings = ("-h", "--help", "--print-config")
            chosen = parser.parse_args([word for word in words if word.partition("=")[0] not in endings])
            parser.set_defaults(preset_values(chosen.preset, chosen.data, chosen.model))
        found = (top or parser).parse_args([*command, *words])
    except (ArgumentError, UnicodeDecodeError) as error:
        built_in = OF_ALL if config_type is None else OF_CONFIGS
        text = explain(words, options, built_in) or " ".join(str(error).replace(".".join((*command, "")), "").split())
        raise ValueError(": ".join([*command[-1:], text])) from error
    for word in command:
        found = found[word]
    values = {option.name: found[option.name] for option in options}
    return values if config_type is None else {"config": config_type(**values)}


def normalise(words: list[str], options: Iterable[Option]) -> Iterator[str]:
    """Turn `--target_experts` into `--target-experts`, `--x.a-b` into `--x.a_b`, a bare `--quiet` into `--quiet=true`."""
    switches = {option.name for option in options if option.kind is bool}
    for word, following in pairwise([*words, ""]):
        if not word.startswith("--") or word == "--":
            yield word
            continue
        flag, equals, value = word.partition("=")
        name, dot, key = flag.removeprefix("--").partition(".")
        flag = "--" + name.replace("_", "-") + dot + key.replace("-", "_")
        if name.replace("-", "_") in switches and not equals and following.lower() not in ("true", "false"):
            equals, value = "=", "true"
        yield flag + equals + value


def explain(words: list[str], options: list[Option], built_in: tuple[str, ...]) -> str | None:
    """Find what is wrong with words that the parser refused; None if it is not an option, its value or a file of options."""
    kinds = {option.name: option.kind for option in options}
    for flag, value in options_in(words):
        name = "config" if flag == "-c" else flag.lstrip("-").partition(".")[0].replace("-", "_")
        if (flag == "-c" or flag.startswith("--")) and name not in (*kinds, *built_in):
            return unknown_option(flag, kinds, built_in)
        problem = None
        if name == "config" and value is not None:
            problem = explain_file(value, kinds)
        elif name in kinds and value is not None and "." not in flag:
            problem = wrong_value(name, value, kinds[name])
        if problem is not None:
            return problem
    return None


def options_in(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """The options among words, each with its value if it has one."""
    for word, following in pairwise([*words, "--"]):
        if word == "--":
            return
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            yield flag, value if equals else None if following.startswith("--") else following


def unknown_option(flag: str, kinds: dict[str, Any], built_in: tuple[str, ...] = ()) -> str:
    """Say that there is no such option, and which one was probably meant."""

    def show(name: str) -> str:
        option = name if name in kinds else SYNONYMS.get(name, name)
        return f"--{option.replace('_', '-')}" if flag.startswith("-") else option

    synonyms = (word for word, option in SYNONYMS.items() if option.partition(".")[0] in kinds)
    name = flag.lstrip("-").partition(".")[0]
    return f"{flag}: no such option; {did_you_mean(name, (*kinds, *built_in, *synonyms), SEE_HELP, show)}"


def wrong_value(name: str, value: Any, kind: Any) -> str | None:
    """Say what an option must be, if the parser does not take this value; a word is read as on the command line."""
    if kind in LISTS:
        return None
    probe = make_parser()
    probe.add_argument("--value", type=kind)
    try:
        probe.parse_args([f"--value={value}"]) if isinstance(value, str) else probe.parse_object({"value": value})
    except ArgumentError:
        choices = [str(choice) for choice in typing.get_args(kind)] if is_choice(kind) else []
        meant = f"; {did_you_mean(str(value), choices, SEE_HELP)}" if choices else ""
        return f"{name}={value}: must be {type_words(kind)}{meant}"
    return None


def is_choice(kind: Any) -> bool:
    """Whether an annotation is a list of words."""
    return typing.get_origin(kind) is typing.Literal


def explain_file(path: str, kinds: dict[str, Any]) -> str | None:
    """Say what is wrong with a file of options, None if nothing is."""
    remedy = "give a YAML file as --print-config prints it"
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return f"-c {path}: {error.strerror}; {remedy}"
    except UnicodeDecodeError:
        return f"-c {path}: is not UTF-8 text; {remedy}"
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        where = f", line {place.line + 1}, column {place.column + 1}" if place else ""
        return f"-c {path}: is not valid YAML{where}; {remedy}"
    except yaml.YAMLError as error:
        return f"-c {path}: is not valid YAML ({' '.join(str(error).split())}); {remedy}"
    if not isinstance(content, dict) or not content:
        return f"-c {path}: holds no options; {remedy}"
    for name, value in content.items():
        problem = wrong_value(name, value, kinds[name]) if name in kinds else unknown_option(str(name), kinds)
        if problem is not None:
            return f"-c {path}: {problem}"
    return None
