"""The table of commands: `raytraced NAME …` calls one function, whose signature and docstring are its interface.

Nothing heavy is imported until a command's arguments have been read, so that help, the version and a typo answer at once.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, NamedTuple, cast

from jsonargparse import ArgumentError, ArgumentParser

from raytraced import __version__
from raytraced.cli.parsing import PLUGIN_HELP, SEE_HELP, describe, make_parser, read_arguments
from raytraced.errors import did_you_mean, install_extra, printable
from raytraced.plugins import load_plugin


class Command(NamedTuple):
    """Where a command is ("file:function" of cli/, importable without torch) and what it does, in one line."""

    target: str
    summary: str

    @property
    def function(self) -> Callable[..., Any]:
        return cast("Callable[..., Any]", resolve_name(f"raytraced.cli.{self.target}"))


COMMANDS = {
    "train": Command("training:train", "train a model; prints its results and the run folder"),
    "resume": Command("training:resume", "continue a run that was stopped, or train a complete one further"),
    "sweep": Command("sweep:sweep", "search training options with Optuna; prints a table and draws a picture"),
    "evaluate": Command("training:evaluate", "measure a trained model: accuracy or bits, experts, macs"),
    "calibrate": Command(
        "training:calibrate", "find the confidence threshold for early exit, and the table of budgets"
    ),
    "predict": Command("training:predict", "predict the class of image files"),
    "generate": Command("generate:generate", "continue a text with a language model"),
    "paths": Command("paths:paths", "print which experts each word of a language model runs, in which order"),
    "serve": Command("serve:serve", "serve models over HTTP, with deadlines, and a web page"),
    "explore": Command("explore:explore", "write a web page that runs models and shows their experts"),
    "export": Command("export:export", "export a trained classifier to ONNX or torch.export"),
    "store": Command("store:store", "write a model whose experts are read from disk when they are needed"),
    "runs": Command("training:runs", "list past runs"),
    "compare": Command("training:compare", "draw curves of several runs and print their results"),
    "models": Command("models:models", "list all models: reference, parameters, macs"),
    "checks": Command("checks:checks", "print versions, compiled kernels and devices, for a bug report"),
    "data list": Command("data:list_data", "list data sets: cached or not, size, source"),
    "data get": Command("data:get", "download and verify data sets"),
    "data show": Command("data:show", "draw a contact sheet with labels and count the classes"),
}
GROUPS = {"data": "list, download and show data sets"}


def main(arguments: list[str] | None = None) -> int:
    """Run `raytraced` and return its exit code.

    Args:
        arguments: The words after the program's name (default: those of this process).

    Returns:
        0, or what the command returned; 2 for a user's mistake, after one line on stderr; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guard("raytraced", lambda: call(*read_command(words)))


def run_command(function: Callable[..., Any], arguments: list[str] | None = None, prog: str = "raytraced") -> int:
    """Run one function as a program: its signature and docstring are the options, mistakes are reported as by `raytraced`.

    Args:
        function: What to call; what it returns is the exit code if it is an int.
        arguments: The words after the program's name (default: those of this process).
        prog: The program's name in help and error messages.

    Returns:
        The exit code, as that of `main`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(prog=prog, description=describe(function))
    return guard(prog, lambda: call(function, read_arguments(parser, function, words)))


def call(function: Callable[..., Any], values: dict[str, Any]) -> int:
    """Call a command's function; what is not an exit code counts as success."""
    code = function(**values)
    return code if isinstance(code, int) else 0


def guard(prog: str, run: Callable[[], int]) -> int:
    """Run a program and return its exit code; a user's mistake is one line on stderr and code 2."""
    # Before torch is imported: with several threads a step is many short parallel parts, and a thread that sleeps between them
    # takes longer to wake than the part takes (paper-mnist, batch 1,024, two threads: 13.9 ms per step, 4.4 ms with this).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000000")
    try:
        return run()
    except SystemExit as stop:  # help, the version and --print-config end the parser
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (head, less) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MemoryError, RuntimeError, ModuleNotFoundError) as error:
        text = describe_mistake(error)
        if text is None or os.environ.get("RAYTRACED_TRACEBACK"):
            raise
        rank = os.environ.get("RANK", "0")  # set by torchrun: name the process
        print(f"{prog}{'' if rank == '0' else f' (process {rank})'}: {printable(text)}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # details, such as each source that failed
            print(printable(note), file=sys.stderr)
        return 2


def describe_mistake(error: Exception) -> str | None:
    """A user's mistake as one line, for a failed file operation the file first; None for any other error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name == "matplotlib":
        return f"pictures need matplotlib; install it with {install_extra('plots')}"
    words = ("allocate memory", "out of memory", "Storage size calculation overflowed", "numel: integer multiplication")
    is_out_of_memory = isinstance(error, MemoryError) or any(word in str(error) for word in words)
    return "not enough memory; make the model, the batch or the images smaller" if is_out_of_memory else None


def read_command(words: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Parse a whole command line; help and the version end the process.

    Args:
        words: Such as ["train", "--epochs", "3"], or ["help", "train"].

    Returns:
        The command's function and its keyword arguments.
    """
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or (len(words) == 1 and words[0] in GROUPS):
        words = [*words, "--help"]
    words, files = split_plugins(words)
    name = find_command(words)
    if files:
        import_module("raytraced.models.registry")  # these refuse names that the package has
        import_module("raytraced.tasks.registry")
    for file in files:
        load_plugin(file)
    parsers = build_parsers()
    if name is None:
        try:
            parsers[""].parse_args(words)
        except ArgumentError as error:
            raise ValueError(f"{' '.join(str(error).split())}; {SEE_HELP}") from error
        raise ValueError(f"{' '.join(words)}: names no command; {SEE_HELP}")
    function, command = COMMANDS[name].function, tuple(name.split())
    parsers[name].description = describe(function)
    return function, read_arguments(parsers[name], function, words[len(command) :], parsers[""], command)


def split_plugins(words: list[str]) -> tuple[list[str], list[str]]:
    """Take `--plugin FILE`, which every command has, out of the words; what follows `--` stays."""
    end = words.index("--") if "--" in words else len(words)
    kept, files = [], []
    remaining = iter(words[:end])
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag != "--plugin":
            kept.append(word)
            continue
        file = value if equals else next(remaining, "")
        if not file or file.startswith("-"):
            raise ValueError("--plugin: needs the path of a Python file; see docs/guides/extending.md")
        files.append(file)
    if files and not kept:
        raise ValueError(f"--plugin {files[0]}: name a command first; {SEE_HELP}")
    return kept + words[end:], files


def find_command(words: list[str]) -> str | None:
    """The name of the command that words begin with; None where an option of the program or of a group comes first."""
    first = words[0].replace("_", "-")
    if first.startswith("-") or (first in GROUPS and (len(words) == 1 or words[1].startswith("-"))):
        return None
    name = f"{first} {words[1]}" if first in GROUPS else first
    if name not in COMMANDS:
        known = [key for key in COMMANDS if key.startswith(f"{first} ")] if first in GROUPS else [*COMMANDS, *GROUPS]
        raise ValueError(f"{name}: no such command; {did_you_mean(name, known, SEE_HELP)}")
    return name


def build_parsers() -> dict[str, ArgumentParser]:
    """The program's parser (""), with those of all commands and groups by name; none of them has its options yet."""
    top = make_parser(prog="raytraced", description="Train, evaluate and serve Mixtures of Raytraced Experts.")
    top.add_argument("-V", "--version", action="version", version=f"raytraced {__version__}", help="Print the version.")
    help_on = "`raytraced COMMAND --help` or `raytraced help COMMAND` describes the options of one command."
    top.epilog = f"{help_on} {PLUGIN_HELP}"
    parsers = {"": top}
    subcommands = {"": add_commands(top)}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in subcommands:
            parsers[group] = make_parser(description=GROUPS[group].capitalize() + ".")
            subcommands[""].add_subcommand(group, parsers[group], help=GROUPS[group])
            parsers[group].prog = f"raytraced {group}"
            subcommands[group] = add_commands(parsers[group])
        parsers[name] = make_parser()
        subcommands[group].add_subcommand(last, parsers[name], help=command.summary)
        parsers[name].prog = f"raytraced {name}"
    return parsers


def add_commands(parser: ArgumentParser) -> Any:
    """Let a parser have commands; returns what they are added to."""
    return parser.add_subcommands(required=False, dest="command", title="commands", description="", metavar="COMMAND")


if __name__ == "__main__":
    sys.exit(main())
