"""The command line: fast without torch, forgiving in spelling, one line for every mistake."""

import json
import subprocess
import sys

import pytest
import yaml

from raytraced.cli.main import COMMANDS, GROUPS, main, read_command, run_command
from raytraced.cli.parsing import options_of
from raytraced.models.card import OLD_NAMES
from raytraced.training.config import TrainConfig, make_config

# Arguments, and what the one line on stderr must contain.
MISTAKES = {
    ("trian",): "trian: no such command; did you mean train?",
    ("reproduce",): "reproduce: no such command; see --help",
    ("--foo",): "unrecognized arguments: --foo; see --help",
    ("help", "trian"): "trian: no such command; did you mean train?",
    ("data", "lst"): "did you mean data list?",
    ("train", "--epoch", "3"): "--epoch: no such option; did you mean --epochs?",
    ("train", "--skip-bad"): "--skip-bad: no such option; did you mean --data-options.skip-bad?",
    ("train", "--tokenizer", "x"): "did you mean --data-options.tokenizer?",
    ("train", "--target_expetrs", "3"): "did you mean --target-experts?",
    ("train", "--output", "x"): "--output: no such option; did you mean --runs-dir?",
    ("train", "--schedule", "cosin"): "schedule=cosin: must be one of cosine, constant; did you mean cosine?",
    ("train", "--epochs", "many"): "epochs=many: must be a whole number",
    ("train", "--lr", "fast"): "lr=fast: must be a number",
    ("train", "--lr", "1e-3", "--epochs", "many"): "epochs=many: must be a whole number",
    ("train", "--quiet", "maybe"): "unrecognized arguments: maybe",
    ("train", "--epochs"): "--epochs: expected one argument",
    ("train", "--epochs", "-1"): "epochs=-1: must be at least 0",
    ("train", "--lr", "0"): "lr=0.0: must be positive",
    ("train", "--model", "mer"): "model=mer: no such model; did you mean mre?",
    ("train", "--data", "mnits"): "data=mnits: no such data set, file or folder; did you mean mnist?",
    ("train", "-c", "no-such-file.yaml"): "no-such-file.yaml: No such file or directory",
    ("train", "--name", "a/b"): "name='a/b': must be a plain folder name",
    ("train", "--threads", "1000000"): "threads=1000000: must lie in 1 … 1024",
    ("resume", "no-such-run", "--threads", "1000000"): "threads=1000000: must lie in 1 … 1024",
    ("serve", "--threads", "1000000"): "threads=1000000: must lie in 1 … 1024",
    ("resume", "no-such-run"): "no-such-run: is not a run folder",
    ("evaluate", "no-such-run"): "no-such-run: is neither a run folder",
    ("evaluate", "no-such-run", "--split", "tset"): "did you mean test?",
    ("evaluate", "no-such-run", "--print_config"): "evaluate: --print-config: no such option; see --help",
    ("export", "no-such-run", "--print-config=x"): "export: --print-config: no such option; see --help",
    ("runs", "--config", "x.yaml"): "runs: --config: no such option; see --help",
    ("runs", "-c", "x.yaml"): "runs: -c: no such option; see --help",
    ("train", "--print-confg"): "--print-confg: no such option; did you mean --print-config?",
    (
        "evaluate",
        "no-such-run",
        "--confidence",
        "high",
    ): "confidence=high: must be a number or one of calibrated or null",
    ("predict", "no-such-run"): "predict: the following arguments are required: files",
    ("predict", "no-such-run", "no-such-image.png"): "no-such-image.png: there is no such file",
    ("compare", "no-such-run"): "no-such-run: is not a run folder",
    ("train", "surplus"): "unrecognized arguments: surplus",
}
ANSWERS = [
    (), ("--help",), ("help",), ("--version",), ("data",), ("data", "--help"), ("train", "--help"), ("help", "train"),
    ("help", "data", "show"), ("train", "--print_config"), ("train", "--print-config"), ("runs",),
]  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
from raytraced.cli.main import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    found.append((code, out.getvalue(), err.getvalue(), "torch" in sys.modules))
json.dump(found, sys.stdout)
"""


def answers_of_a_fresh_process(cases, folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(map(tuple, cases), json.loads(done.stdout), strict=True))


def test_every_mistake_is_one_line_with_code_2_and_never_loads_torch(tmp_path):
    answers = answers_of_a_fresh_process(list(MISTAKES), tmp_path)
    for words, expected in MISTAKES.items():
        code, _, error, loaded_torch = answers[words]
        assert code == 2, (words, error)
        assert len(error.splitlines()) == 1, error
        assert error.startswith("raytraced: ")
        assert expected in error
        assert not loaded_torch, words


def test_help_version_and_tables_never_load_torch(tmp_path):
    for words, (code, output, error, loaded_torch) in answers_of_a_fresh_process(ANSWERS, tmp_path).items():
        assert code == 0, error
        assert output
        assert not loaded_torch, words


def test_no_command_loads_torch_to_be_parsed():
    program = "import sys; from raytraced.cli.main import *; [c.function for c in COMMANDS.values()]; "
    subprocess.run([sys.executable, "-c", program + "sys.exit('torch' in sys.modules)"], check=True, timeout=100)


def printed(capsys, *words: str) -> str:
    """What a command prints, without line breaks."""
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_overview_lists_every_command(capsys):
    overview = printed(capsys, "--help")
    for group, summary in GROUPS.items():
        assert f" {group} {summary}" in overview
        overview += printed(capsys, group)
    for name, command in COMMANDS.items():
        assert f" {name.split()[-1]} {command.summary}" in overview


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_describes_it_once_and_every_option(name, capsys):
    text = printed(capsys, *name.split(), "--help")
    assert text == printed(capsys, "help", *name.split())
    function = COMMANDS[name].function
    summary = " ".join(function.__doc__.partition("\n")[0].split())
    assert text.count(summary) == 1
    assert "none or more" not in text
    for option in options_of(function):
        assert option.help, (name, option.name)
        flag = option.name if option.is_positional else "--" + option.name.replace("_", "-")
        assert f"{flag} " in text
        assert " ".join(option.help.split()) in text


def test_help_of_train_says_that_the_mean_comes_near_the_target(capsys):
    assert "the mean comes near this number, not exactly to it" in printed(capsys, "train", "--help")


def test_one_name_means_one_thing_in_all_commands():
    """--runs-dir: the folder of run folders; --data-root: the cache of data sets; --output: what the command writes."""
    for name, command in COMMANDS.items():
        for option in options_of(command.function):
            assert option.name not in ("root", "folder", "file", "picture"), name
            if option.name == "runs_dir":
                assert option.default == "runs"
            if option.name == "output":
                assert "to write" in option.help, name
            if option.name == "data_root":
                assert option.default is None


def read(*words: str) -> TrainConfig:
    return read_command(["train", *words])[1]["config"]


def test_dash_and_underscore_mean_the_same():
    assert read("--target-experts", "3.5", "--model-options.train-select", "greedy") == read(
        "--target_experts=3.5", "--model_options.train_select=greedy"
    )
    assert read("--model-options.train-select", "greedy").model_options == {"train_select": "greedy"}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--quiet"], True),
        (["--quiet", "false"], False),
        (["--quiet=true"], True),
        (["--quiet=false"], False),
        ([], False),
    ],
)
def test_switch_needs_no_value(words, value):
    assert read(*words, "--epochs", "3").quiet is value


def test_switch_does_not_take_the_word_after_it():
    values = read_command(["evaluate", "--json", "one"])[1]
    assert (values["json"], values["run"]) == (True, "one")


def test_options_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("data: mnist\nlr: 0.25\nmodel_options: {dim: 4}\n")
    config = read("-c", str(file), "--model-options.num-experts", "5", "--batch-size", "7")
    preset = read("--data", "mnist")
    assert (config.data, config.lr, config.batch_size) == ("mnist", 0.25, 7)
    assert config.model_options == {"dim": 4, "num_experts": 5}
    assert config.epochs == preset.epochs
    assert preset.epochs != read("--data", "digits").epochs  # the preset depends on the data
    assert read("-c", str(file), "--lr", "0.125").lr == 0.125


@pytest.mark.parametrize("flag", ["--print_config", "--print-config"])
def test_printed_configuration_is_whole_and_gives_the_same_configuration(flag, tmp_path, capsys):
    words = ["--data", "mnist", "--preset", "paper", "--target-experts", "3.25", "--model-options.dim", "4"]
    assert main(["train", *words, flag]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    values = yaml.safe_load(file.read_text())
    assert values.keys() == TrainConfig.__dataclass_fields__.keys()
    assert (values["target_experts"], values["lr"]) == (3.25, 0.001)  # an option, and a value of the preset
    assert read("-c", str(file)) == read(*words)


def test_configuration_of_an_earlier_version_is_read():
    old_name = {new: old for old, new in OLD_NAMES.items()}["exit_loss"]
    assert make_config({"output": "here", old_name: 0.5}) == TrainConfig(runs_dir="here", exit_loss=0.5)


def test_an_option_of_an_earlier_version_names_its_successor(capsys):
    old_name = {new: old for old, new in OLD_NAMES.items()}["confidence"]
    assert main(["evaluate", "mre-digits", f"--{old_name}", "0.9"]) == 2
    assert f"--{old_name}: no such option; did you mean --confidence?" in capsys.readouterr().err


def greet(name: str, files: list[str] = [], times: int = 1, loud: bool = False) -> int:  # noqa: B006
    """Greet somebody.

    Args:
        name: Whom.
        files: Where.
        times: How often.
        loud: With an exclamation mark.
    """
    if times < 0:
        raise ValueError(f"times={times}: must not be negative")
    print(" ".join([name + "!" * loud, *files] * times))
    return 3


def test_a_function_is_run_as_a_program_with_the_same_errors(capsys):
    assert run_command(greet, ["you", "a", "b", "--times", "2", "--loud"], "greet") == 3
    assert capsys.readouterr().out == "you! a b you! a b\n"
    for words, expected in {
        ("you", "--tmes", "2"): "greet: --tmes: no such option; did you mean --times?\n",
        ("you", "--times", "x"): "greet: times=x: must be a whole number\n",
        ("you", "--times", "-1"): "greet: times=-1: must not be negative\n",
        (): "greet: the following arguments are required: name\n",
    }.items():
        assert run_command(greet, list(words), "greet") == 2
        assert capsys.readouterr().err == expected
    assert run_command(greet, ["--help"], "greet") == 0
    assert "Greet somebody." in capsys.readouterr().out


def test_help_of_the_package_lists_every_public_name():
    import pydoc
    import re

    import raytraced as rt

    listed = pydoc.plain(pydoc.render_doc(rt)).partition("PACKAGE CONTENTS")[0]
    assert {*rt.__all__} - {"__version__"} <= {*re.findall(r"\w+", listed)}
