"""The table of commands: `raytraced NAME …` calls one function, whose signature is the interface.

Nothing heavy is imported until a command's arguments have been read, so that help, the version and a typo answer at once.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jsonargparse


@dataclass(frozen=True)
class Command:
    """Where a command lives ("module:function", importable without torch) and what it does, in one line."""

    target: str
    summary: str


COMMANDS = {
    "train": Command("raytraced.commands.training:train", "train a model; ends with its figures and the run folder"),
    "evaluate": Command("raytraced.commands.training:evaluate", "how good a trained model is, how sure, what it uses"),
    "predict": Command("raytraced.commands.training:predict", "what a trained model makes of files of one's own"),
    "resume": Command("raytraced.commands.training:resume", "go on with a run that was stopped, exactly where it was"),
    "runs": Command("raytraced.commands.training:runs", "a table of past runs"),
    "compare": Command("raytraced.commands.training:compare", "curves and a table of several runs"),
    "models": Command("raytraced.commands.models:models", "every model: reference, parameters, multiply-adds"),
    "reproduce": Command("raytraced.commands.reproduce:reproduce", "the paper's tables, figures and claims, and more"),
    "benchmark": Command("raytraced.commands.benchmark:benchmark", "speed and memory as ratios, side by side"),
    "data list": Command("raytraced.commands.data:list_data", "data sets: cached or not, size, source"),
    "data get": Command("raytraced.commands.data:get", "download and verify data sets"),
    "data show": Command("raytraced.commands.data:show", "a contact sheet with labels, and class counts"),
}


# Options by the names that other tools give them.
SYNONYMS = {
    "learning_rate": "lr", "dataset": "data", "arch": "model", "batch": "batch_size", "num_epochs": "epochs",
    "workers": "threads", "gpu": "device", "out": "output", "decay": "weight_decay", "image_size": "data_options.size",
    "augment": "data_options.augment",
}  # fmt: skip


class UsageError(ValueError):
    """A mistake on the command line, told in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one line on stderr and code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Before torch is imported: with several threads a step is many short parallel parts, and a thread that sleeps between them
    # takes longer to wake than the part takes (paper-mnist, batch 1,024, two threads: 13.9 ms a step, 4.4 ms with this).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000000")
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview(COMMANDS))
            return 0
        if words[0] in ("-V", "--version"):
            print(f"raytraced {installed_version()}")
            return 0
        name, rest = find_command(words)
        if name is None:
            print(overview({key: command for key, command in COMMANDS.items() if key.startswith(words[0] + " ")}))
            return 0
        function = import_target(COMMANDS[name].target)
        code = function(**read_arguments(name, function, rest))
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print("raytraced: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("RAYTRACED_TRACEBACK"):
            raise
        return tell(describe(error))
    except (MemoryError, RuntimeError) as error:
        if os.environ.get("RAYTRACED_TRACEBACK") or not is_out_of_memory(error):
            raise
        return tell("not enough memory; make the model, the batch or the images smaller")


def tell(text: str) -> int:
    """One line on stderr, and the exit code of a mistake."""
    rank = os.environ.get("RANK", "0")  # torchrun's: of many processes, say which
    print(f"raytraced{'' if rank == '0' else f' (process {rank})'}: {text}", file=sys.stderr)
    return 2


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is torch's or Python's word for memory that is not to be had."""
    words = ("allocate memory", "out of memory", "Storage size calculation overflowed", "numel: integer multiplication")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def overview(commands: dict[str, Command]) -> str:
    """The text of `raytraced --help`."""
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    more = "raytraced COMMAND --help tells the options of one command; raytraced --version the version."
    return "\n".join(["usage: raytraced COMMAND [options]", "", *lines, "", more])


def installed_version() -> str:
    """The version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raytraced")
    except PackageNotFoundError:
        return "(not installed)"


def find_command(words: list[str]) -> tuple[str | None, list[str]]:
    """Split the words into the command's name (of one or two words; None for help on a group) and its arguments."""
    first = words[0].replace("_", "-")
    if first in COMMANDS:
        return first, words[1:]
    group = [name for name in COMMANDS if name.startswith(first + " ")]
    if not group:
        raise UsageError(f"{words[0]}: no such command{suggestion(first, (key.split()[0] for key in COMMANDS))}")
    if len(words) == 1 or words[1] in ("-h", "--help"):
        return None, []
    name = f"{first} {words[1].replace('_', '-')}"
    if name not in COMMANDS:
        raise UsageError(f"{first} {words[1]}: no such command{suggestion(name, group)}")
    return name, words[2:]


def import_target(target: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = target.partition(":")
    return typing.cast("Callable[..., Any]", getattr(importlib.import_module(module), function))


def read_arguments(name: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Parse words by the function's signature; a parameter that is a dataclass becomes flat options and `-c FILE`.

    A dataclass with a method `preset_values(chosen)` decides its own defaults from what was chosen so far:
    flags win over the file, the file over the preset.
    """
    types = typing.get_type_hints(function)
    types.pop("return", None)
    config_name = next((key for key, kind in types.items() if is_dataclass(kind)), None)
    options = dict(types)
    if config_name is not None:
        config_type = options.pop(config_name)
        options |= typing.get_type_hints(config_type)
    words = [token for word in normalise(words, options) for token in word]
    parser = make_parser(name, function, types, config_name)
    try:
        if config_name is None:
            return plain(parser.parse_args(words))
        questions = ("-h", "--help", "--print_config")  # these end the parsing, and come second
        rest = [word for word in words if word.partition("=")[0] not in questions]
        if "--print_config" in words:
            print_given(plain(parser.parse_args(rest, defaults=False)))
        if hasattr(config_type, "preset_values"):
            parser.set_defaults(config_type.preset_values(plain(parser.parse_args(rest))))
        values = plain(parser.parse_args(words))
    except jsonargparse.ArgumentError as error:
        raise UsageError(f"{name}: {explain(str(error), options)}") from error
    own = {field.name for field in fields(config_type)}
    config = config_type(**{key: value for key, value in values.items() if key in own})
    return {config_name: config} | {key: value for key, value in values.items() if key in types}


def print_given(values: dict[str, Any]) -> typing.NoReturn:
    """Print what was set and nothing else, as a file for `-c`: a preset still applies to other data, then end."""
    import yaml

    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    sys.exit(0)


def normalise(words: list[str], options: dict[str, Any]) -> Iterable[list[str]]:
    """Turn `--expert-cost` into `--expert_cost`, and a bare `--quiet` into `--quiet true`."""
    for position, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            yield [word]
            continue
        flag, equals, value = word.partition("=")
        flag = "--" + flag[2:].replace("-", "_")
        following = words[position + 1] if position + 1 < len(words) else ""
        is_bare = not equals and following.lower() not in ("true", "false")
        yield [flag, "true"] if options.get(flag[2:]) is bool and is_bare else [flag + equals + value]


def make_parser(
    name: str, function: Callable[..., Any], types: dict[str, Any], config_name: str | None
) -> jsonargparse.ArgumentParser:
    """The parser of one command: required parameters are positional, the others options."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"raytraced {name}",
        description=(inspect.getdoc(function) or "").partition("\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
        epilog="In option names - and _ mean the same.",
    )
    if config_name is not None:
        parser.add_argument("-c", "--config", action="config", help="a YAML file of the options below")
        parser.add_class_arguments(types[config_name])
    lists = [key for key, kind in types.items() if kind == list[str] and is_required(function, key)]
    skipped = {*lists, config_name} - {None}
    parser.add_function_arguments(function, as_positional=True, skip=typing.cast("set[str | int]", skipped))
    for key in lists:
        parser.add_argument(key, nargs="+", type=str, help="one or more")
    return parser


def is_required(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a parameter has no default."""
    return inspect.signature(function).parameters[parameter].default is inspect.Parameter.empty


def plain(values: Any) -> dict[str, Any]:
    """A parsed namespace as a dict, without the parser's own entries."""
    return {key: value for key, value in values.as_dict().items() if key not in ("config", "print_config")}


def explain(text: str, options: dict[str, Any]) -> str:
    """Turn the parser's message into one line that names the option, its value, the rule and the likely remedy."""
    key = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)", text)
    if key and value:
        kind = options.get(key[1].split(".")[0])
        if typing.get_origin(kind) is typing.Literal:
            choices = [str(choice) for choice in typing.get_args(kind)]
            return f"{key[1]}={value[1]}: must be one of {', '.join(choices)}{suggestion(value[1], choices)}"
        return f"{key[1]}={value[1]}: must be {type_name(kind)}"
    unknown = re.search(r"unrecognized arguments: (\S+)", text) or re.search(r"Option '([^']+)' is not accepted", text)
    if unknown:
        known = {name: name for name in (*options, "help", "config", "print_config")} | SYNONYMS
        word = unknown[1].partition("=")[0]
        return f"{word}: no such option{suggestion(word.lstrip('-').split('.')[0], known, prefix=word.startswith('-'))}"
    if "Unexpected config" in text:
        return "-c: the file is empty, or holds no options; give a YAML file as --print_config prints it"
    return re.sub(r"\s+", " ", text.replace('Parser key "config":', "")).strip()


def type_name(kind: Any) -> str:
    """A type in a user's words."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}
    members = typing.get_args(kind) if kind not in names and typing.get_origin(kind) not in (list, dict) else ()
    return " or ".join(type_name(member) for member in members) if members else names.get(kind, str(kind))


def suggestion(word: str, known: Iterable[str] | dict[str, str], prefix: bool = False) -> str:
    """The end of an error message: what was probably meant, else what there is to see."""
    names = known if isinstance(known, dict) else {name: name for name in known}
    meant = {key.replace("-", "_"): name for key, name in names.items()}
    close = difflib.get_close_matches(word.replace("-", "_"), meant, n=1)
    if not close:
        return "; see --help"
    return f"; did you mean {'--' + meant[close[0]].replace('_', '-') if prefix else meant[close[0]]}?"


def describe(error: Exception) -> str:
    """An error as one line: for a failed file operation the file first, then what happened."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
