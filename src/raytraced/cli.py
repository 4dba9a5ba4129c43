"""The table of commands: `raytraced NAME …` calls one function, whose signature is the interface.

Nothing heavy is imported until a command's arguments have been read, so that help, the version and a typo answer at once.
"""

import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, NamedTuple

import jsonargparse
import yaml

from raytraced import __version__
from raytraced.training.config import preset_values
from raytraced.words import did_you_mean, type_words


class Command(NamedTuple):
    """Where a command lives ("file:function" of commands/, importable without torch) and what it does, in one line."""

    target: str
    summary: str

    @property
    def function(self) -> Callable[..., Any]:
        return typing.cast("Callable[..., Any]", resolve_name(f"raytraced.commands.{self.target}"))


COMMANDS = {
    "train": Command("training:train", "train a model; ends with its figures and the run folder"),
    "evaluate": Command("training:evaluate", "how good a trained model is, how sure, what it uses"),
    "calibrate": Command("training:calibrate", "how sure an answer must be for a model to stop there"),
    "predict": Command("training:predict", "what a trained model makes of files of one's own"),
    "generate": Command("generate:generate", "let a language model go on with a text"),
    "serve": Command("serve:serve", "answer over HTTP, with deadlines that are kept; and a page"),
    "explore": Command("explore:explore", "a page in which models run: see them think"),
    "export": Command("export:export", "a trained classifier for other runtimes: ONNX, torch.export"),
    "resume": Command("training:resume", "go on with a run that was stopped, exactly where it was"),
    "runs": Command("training:runs", "a table of past runs"),
    "compare": Command("training:compare", "curves and a table of several runs"),
    "models": Command("models:models", "every model: reference, parameters, multiply-adds"),
    "reproduce": Command("reproduce:reproduce", "the paper's tables, figures and claims, and more"),
    "benchmark": Command("benchmark:benchmark", "speed and memory as ratios, side by side"),
    "checks": Command("checks:checks", "versions, compiled operations, devices: for a bug report"),
    "data list": Command("data:list_data", "data sets: cached or not, size, source"),
    "data get": Command("data:get", "download and verify data sets"),
    "data show": Command("data:show", "a contact sheet with labels, and class counts"),
}

# What options mean that several commands have; the docstring of a command tells the others.
SHARED_OPTIONS = {
    "run": "A run folder, its name in the output folder, a model.safetensors file, or a shipped model's name.",
    "output": "Folder that run folders are in.",
    "weights": "Those a run ended with, or those of its best epoch so far (best), also of a run that is not over.",
    "device": "cpu, cuda, …",
    "data": "Data set (default: what it was trained on).",
    "data_root": "Where data sets are kept.",
    "root": "Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).",
    "max_experts": "At most so many experts a sample.",
    "sure": "Stop at the first answer whose probability reaches this, or what calibrate found (calibrated).",
    "look": "After what an answer is looked at: each layer, or each expert.",
    "json": "Print JSON in place of tables; of a list, one object a line.",
}

# Options by the names that other tools give them.
SYNONYMS = {
    "learning_rate": "lr", "dataset": "data", "arch": "model", "batch": "batch_size", "num_epochs": "epochs",
    "workers": "threads", "gpu": "device", "out": "output", "decay": "weight_decay", "image_size": "data_options.size",
    "augment": "data_options.augment", "skip_bad": "data_options.skip_bad", "colour": "data_options.colour",
    "context": "data_options.context", "tokenizer": "data_options.tokenizer",
}  # fmt: skip


SEE_HELP = "see --help"
# What the parser says of a file of options, and what we do.
NO_CONFIG = {
    "Unexpected config": "the file is empty, or holds no options",
    "Problems parsing config": "the file is no YAML",
    "codec can't decode": "the file is no text in UTF-8",
}


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
            print(f"raytraced {__version__}")
            return 0
        name, rest = find_command(words)
        if name is None:
            print(overview({key: command for key, command in COMMANDS.items() if key.startswith(words[0] + " ")}))
            return 0
        function = COMMANDS[name].function
        code = function(**read_arguments(name, function, rest))
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print("raytraced: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (head, less) has gone; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, RuntimeError, ModuleNotFoundError) as error:
        text = mistake_in(error)
        if text is None or os.environ.get("RAYTRACED_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")  # torchrun's: of many processes, say which
        print(f"raytraced{'' if rank == '0' else f' (process {rank})'}: {text}", file=sys.stderr)
        return 2


def mistake_in(error: Exception) -> str | None:
    """A user's mistake as one line, for a failed file operation the file first; None for what is no user's mistake."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
        return "pictures need matplotlib; install it with pip install 'raytraced[plots]'"
    words = ("allocate memory", "out of memory", "Storage size calculation overflowed", "numel: integer multiplication")
    is_out_of_memory = isinstance(error, MemoryError) or any(word in str(error) for word in words)
    return "not enough memory; make the model, the batch or the images smaller" if is_out_of_memory else None


def overview(commands: dict[str, Command]) -> str:
    """The text of `raytraced --help`."""
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    more = "raytraced COMMAND --help tells the options of one command; raytraced --version the version."
    return "\n".join(["usage: raytraced COMMAND [options]", "", *lines, "", more])


def find_command(words: list[str]) -> tuple[str | None, list[str]]:
    """Split the words into the command's name (of one or two words; None for help on a group) and its arguments."""
    first, *rest = words
    group = [name for name in COMMANDS if name.startswith(f"{first} ")]
    if group and (not rest or rest[0] in ("-h", "--help")):
        return None, []
    length = 2 if group else 1
    name = " ".join(words[:length])
    if name.replace("_", "-") not in COMMANDS:
        known = group or (key.split()[0] for key in COMMANDS)
        raise ValueError(f"{name}: no such command; {did_you_mean(name, known, SEE_HELP)}")
    return name.replace("_", "-"), words[length:]


def read_arguments(name: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Parse words by the function's signature; a parameter `config`, a dataclass, becomes flat options and `-c FILE`.

    Its defaults are those of the preset: flags win over the file, the file over the preset.
    """
    types = typing.get_type_hints(function)
    types.pop("return", None)
    config_type = types.get("config")
    options = types if config_type is None else typing.get_type_hints(config_type)
    words = list(normalise(words, options))
    parser = make_parser(name, function, types)
    try:
        if config_type is None:
            return plain(parser.parse_args(words))
        questions = ("-h", "--help", "--print_config")  # these end the parsing, and come second
        rest = [word for word in words if word.partition("=")[0] not in questions]
        if "--print_config" in words:  # what was set and nothing else: a preset still applies to other data
            given = plain(parser.parse_args(rest, defaults=False))
            print(yaml.safe_dump(given, sort_keys=False, allow_unicode=True), end="")
            sys.exit(0)
        chosen = plain(parser.parse_args(rest))
        parser.set_defaults(preset_values(chosen["preset"], chosen["data"], chosen["model"]))
        return {"config": config_type(**plain(parser.parse_args(words)))}
    except (jsonargparse.ArgumentError, UnicodeDecodeError) as error:
        files = re.findall(r"(?:^|\n)(?:-c|--config)[\n=](.+)", "\n".join(words))
        raise ValueError(f"{name}: {explain(str(error), options, ', '.join(files))}") from error


def normalise(words: list[str], options: dict[str, Any]) -> Iterable[str]:
    """Turn `--target-experts` into `--target_experts`, and a bare `--quiet` into `--quiet true`."""
    for word, following in pairwise([*words, ""]):
        if not word.startswith("--"):
            yield word
            continue
        flag, equals, value = word.partition("=")
        flag = "--" + flag[2:].replace("-", "_")
        yield flag + equals + value
        if options.get(flag[2:]) is bool and not equals and following.lower() not in ("true", "false"):
            yield "true"


def make_parser(name: str, function: Callable[..., Any], types: dict[str, Any]) -> jsonargparse.ArgumentParser:
    """The parser of one command: required parameters are positional, the others options."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=f"raytraced {name}",
        description=(inspect.getdoc(function) or "").partition("\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
        epilog="In option names - and _ mean the same.",
    )
    if "config" in types:
        parser.add_argument("-c", "--config", action="config", help="a YAML file of the options below")
        parser.add_class_arguments(types["config"])
    lists: set[str | int] = {key for key, kind in types.items() if kind in (list[str], list[str] | None)}
    parser.add_function_arguments(function, as_positional=True, skip=lists | {"config"})
    for key, parameter in inspect.signature(function).parameters.items():
        if key in lists:
            least, nargs = ("one", "+") if parameter.default is parameter.empty else ("none", "*")
            parser.add_argument(key, nargs=nargs, type=str, help=f"{least} or more")
    for action in parser._actions:
        action.help = action.help or SHARED_OPTIONS.get(action.dest)
    return parser


def plain(values: Any) -> dict[str, Any]:
    """A parsed namespace as a dict, without the parser's own entries."""
    return {key: value for key, value in values.as_dict().items() if key not in ("config", "print_config")}


def explain(text: str, options: dict[str, Any], files: str) -> str:
    """Turn the parser's message into one line that names the option or file, its value, the rule and the likely remedy."""
    key = re.search(r'Parser key "([^"]+)"', text)
    value = re.search(r"(?:Got value|Given value): (.*)", text)
    if key and value:
        kind = options.get(key[1].split(".")[0])
        if typing.get_origin(kind) is typing.Literal:
            choices = [str(choice) for choice in typing.get_args(kind)]
            meant = did_you_mean(value[1], choices, SEE_HELP)
            return f"{key[1]}={value[1]}: must be one of {', '.join(choices)}; {meant}"
        return f"{key[1]}={value[1]}: must be {type_words(kind)}"
    unknown = re.search(r"unrecognized arguments: (\S+)", text) or re.search(r"Option '([^']+)' is not accepted", text)
    if unknown:
        word = unknown[1].partition("=")[0]

        def shown(name: str) -> str:
            option = SYNONYMS.get(name, name)
            return f"--{option.replace('_', '-')}" if word.startswith("-") else option

        synonyms = (word for word, option in SYNONYMS.items() if option.partition(".")[0] in options)
        known = (*options, "help", "config", "print_config", *synonyms)
        return f"{word}: no such option; {did_you_mean(word.lstrip('-').split('.')[0], known, SEE_HELP, shown)}"
    for sign, told in NO_CONFIG.items():
        if sign in text:
            where = re.findall(r"line \d+, column \d+", text)[-1:]
            return f"-c {files}: {', '.join([told, *where])}; give a YAML file as --print_config prints it"
    return re.sub(r"\s+", " ", text.replace('Parser key "config":', "")).strip()


if __name__ == "__main__":
    sys.exit(main())
