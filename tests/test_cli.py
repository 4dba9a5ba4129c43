"""The command line: quick without torch, forgiving in spelling, one line for every mistake."""

import json
import subprocess
import sys
from typing import get_type_hints

import pytest
import yaml

from raytraced.cli import COMMANDS, main, make_parser, read_arguments
from raytraced.commands.training import train
from raytraced.training.config import TrainConfig

# Arguments, and what the one line on stderr must contain.
MISTAKES = {
    ("trian",): "trian: no such command; did you mean train?",
    ("data", "lst"): "did you mean data list?",
    ("train", "--epoch", "3"): "--epoch: no such option; did you mean --epochs?",
    ("train", "--skip-bad"): "--skip_bad: no such option; did you mean --data-options.skip-bad?",
    ("train", "--tokenizer", "x"): "did you mean --data-options.tokenizer?",
    ("train", "--target_expetrs", "3"): "did you mean --target-experts?",
    ("train", "--schedule", "cosin"): "schedule=cosin: must be one of cosine, constant; did you mean cosine?",
    ("train", "--epochs", "many"): "epochs=many: must be a whole number",
    ("train", "--lr", "fast"): "lr=fast: must be a number",
    ("train", "--epochs", "-1"): "epochs=-1: must be at least 0",
    ("train", "--lr", "0"): "lr=0.0: must be positive",
    ("train", "--model", "mer"): "model=mer: no such model; did you mean mre?",
    ("train", "--data", "mnits"): "data=mnits: no such data set, nor such a path; did you mean mnist?",
    ("train", "-c", "no-such-file.yaml"): "no-such-file.yaml",
    ("train", "--name", "a/b"): "name='a/b': must be a plain folder name",
    ("resume", "no-such-run"): "no-such-run: is not a run folder",
    ("evaluate", "no-such-run"): "no-such-run: is not a run folder",
    ("evaluate", "no-such-run", "--split", "tset"): "did you mean test?",
    ("predict", "no-such-run"): "files",
    ("predict", "no-such-run", "no-such-image.png"): "no-such-image.png: there is no such file",
    ("compare", "no-such-run"): "no-such-run: is not a run folder",
    ("train", "surplus"): "surplus: no such option",
}
ANSWERS = [("--help",), ("--version",), ("data",), ("train", "--help"), ("train", "--print_config"), ("runs",)]

PROGRAM = """
import contextlib, io, json, sys
from raytraced.cli import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code or 0
    found.append((code, out.getvalue(), err.getvalue(), "torch" in sys.modules))
json.dump(found, sys.stdout)
"""


def answers_of_a_fresh_process(cases, folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(cases), capture_output=True, text=True, cwd=folder
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
    program = "import sys; from raytraced.cli import *; [c.function for c in COMMANDS.values()]; "
    subprocess.run([sys.executable, "-c", program + "sys.exit('torch' in sys.modules)"], check=True)


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in output
        assert command.summary in output


def test_help_of_train_tells_every_field_with_its_meaning(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    output = capsys.readouterr().out
    for name in TrainConfig.__dataclass_fields__:
        assert f"--{name}" in output
    assert "the mean number of experts" in output  # the docstring of a field


def read(*words: str) -> TrainConfig:
    return read_arguments("train", train, list(words))["config"]


def test_dash_and_underscore_mean_the_same():
    assert read("--target-experts", "3.5", "--model-options.train-select", "greedy") == read(
        "--target_experts=3.5", "--model_options.train_select=greedy"
    )
    assert read("--model-options.train-select", "greedy").model_options == {"train_select": "greedy"}


@pytest.mark.parametrize(("words", "value"), [(["--quiet"], True), (["--quiet", "false"], False), ([], False)])
def test_switch_needs_no_value(words, value):
    assert read(*words, "--epochs", "3").quiet is value


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("data: mnist\nlr: 0.25\nmodel_options: {dim: 4}\n")
    config = read("-c", str(file), "--model-options.num-experts", "5", "--batch-size", "7")
    preset = read("--data", "mnist")
    assert (config.data, config.lr, config.batch_size) == ("mnist", 0.25, 7)
    assert config.model_options == {"dim": 4, "num_experts": 5}
    assert config.epochs == preset.epochs
    assert preset.epochs != read("--data", "digits").epochs  # the preset depends on the data
    assert read("-c", str(file), "--lr", "0.125").lr == 0.125


def test_printed_configuration_gives_the_same_configuration(tmp_path, capsys):
    words = ["--data", "mnist", "--preset", "paper", "--target-experts", "3.25", "--model-options.dim", "4"]
    with pytest.raises(SystemExit):
        main(["train", *words, "--print_config"])
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert yaml.safe_load(file.read_text())["target_experts"] == 3.25
    assert read("-c", str(file)) == read(*words)


def test_every_command_leads_to_a_function():
    for command in COMMANDS.values():
        assert callable(command.function)


def test_every_option_of_every_command_is_told():
    for name, command in COMMANDS.items():
        function = command.function
        parser = make_parser(name, function, get_type_hints(function) | {"return": None})
        assert [action.dest for action in parser._actions if not action.help] == []
