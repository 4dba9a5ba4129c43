"""The file of a sweep: what it may say, and one line for every mistake."""

from dataclasses import fields
from pathlib import Path

import pytest

from raytraced.training.sweep_file import Range, Sweep, read_sweep


def read(tmp_path, text):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path)


def test_every_kind_of_range_is_read(tmp_path):
    sweep = read(
        tmp_path,
        """
trials: 7
seed: 3
sampler: random
prune: false
options: {data: digits, epochs: 4, model_options: {num_layers: 2}}
ranges:
  lr: {from: 1e-4, to: 1.5E-1, log: true}
  batch_size: {from: 16, to: 64, step: 16}
  optimizer: [adam, sgd]
  model_options.num_experts: [3, 4]
""",
    )
    assert (sweep.trials, sweep.seed, sweep.sampler, sweep.prune) == (7, 3, "random", False)
    assert sweep.ranges == (
        Range("lr", None, 1e-4, 0.15, True),
        Range("batch_size", None, 16, 64, False, 16),
        Range("optimizer", ("adam", "sgd")),
        Range("model_options.num_experts", (3, 4)),
    )
    config = sweep.configure({"lr": 0.01, "batch_size": 32, "optimizer": "sgd", "model_options.num_experts": 3})
    assert (config.lr, config.batch_size, config.optimizer, config.epochs, config.seed) == (0.01, 32, "sgd", 4, 3)
    assert config.model_options == {"num_layers": 2, "num_experts": 3}
    assert config.exit_loss == 0.5  # of the preset, as on the command line


def test_the_file_of_the_guide_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs/guides/sweep.md").read_text(encoding="utf-8")
    sweep = read(tmp_path, page.partition("```text\n")[2].partition("```")[0])
    assert [one.name for one in sweep.ranges][:2] == ["lr", "weight_decay"]
    entries = [one.name for one in fields(Sweep)]
    assert {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")} == {*entries}


LR = "ranges: {lr: [0.1, 0.2]}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ranges: [", "is not valid YAML, line 1, column 10"),
        ("- lr", "is not the file of a sweep; it needs a table with the entry ranges"),
        ("trials: 3", "ranges: there are none; give at least one option to search, such as lr: [0.001, 0.01]"),
        (f"{LR}\ntrails: 3", "trails: no such entry; did you mean trials?"),
        (f"{LR}\ntrials: many", "trials='many': must be a whole number"),
        (f"{LR}\ntrials: 0", "trials=0: must be at least 1"),
        (f"{LR}\nseed: -1", "seed=-1: must lie in 0 … 2**32 - 1"),
        (f"{LR}\nsampler: best", "sampler='best': must be one of tpe, random, grid"),
        (f"{LR}\noptions: {{epoch: 3}}", "epoch: no such option of a sweep; did you mean epochs?"),
        (f"{LR}\noptions: {{epochs: x}}", "options: epochs='x': must be a whole number"),
        (f"{LR}\noptions: {{lr: 0.1}}", "ranges.lr: stands in options, too; leave it out of one of them"),
        ("ranges: {learning: [1, 2]}", "learning: no such option of a sweep; must be one of"),
        ("ranges: {threads: [1, 2]}", "threads: no such option of a sweep; must be one of"),
        ("ranges: {model_options: [1, 2]}", "ranges.model_options: is a table; name one of its options, such as"),
        ("ranges: {lr: [0.1]}", "ranges.lr=[0.1]: must be at least two numbers or words"),
        (
            "ranges: {lr: 0.1}",
            "ranges.lr=0.1: is not a range; give a list of choices, or {from: 1e-4, to: 1e-1, log: true}",
        ),
        ("ranges: {lr: {from: 1, to: 2, lgo: true}}", "ranges.lr.lgo: no such entry; did you mean log?"),
        ("ranges: {lr: {from: a, to: 2}}", "ranges.lr={'from': 'a', 'to': 2}: from, to and step must be numbers"),
        ("ranges: {lr: {from: 2, to: 1}}", "ranges.lr: from=2 must be below to=1"),
        ("ranges: {lr: {from: 0, to: 1, log: true}}", "ranges.lr: from=0 must be above 0 on a logarithmic scale"),
        ("ranges: {lr: {from: 1, to: 2, step: 0}}", "ranges.lr: step=0 must be above 0, and has no logarithmic scale"),
        ("ranges: {lr: {from: -1, to: 1}}", "ranges.lr: lr=-1: must be positive and finite"),
        (
            "ranges: {optimizer: [adam, adagrad]}",
            "ranges.optimizer: optimizer='adagrad': must be one of adam, adamw, sgd",
        ),
        (
            "ranges: {batch_size: {from: 1.5, to: 4}}",
            "ranges.batch_size: batch_size=1.5: must be a whole number or null",
        ),
        ("ranges: {lr: {from: 0.1, to: 0.2}}\nsampler: grid", "ranges.lr: sampler=grid needs choices or a step"),
        (f"{LR}\noptions: {{model: 3}}", "options: model=3: must be text"),
        (f"{LR}\noptions: {{data: [a]}}", "options: data=['a']: must be text"),
        ("ranges: {lr: {from: 1, to: .inf}}", "ranges.lr={'from': 1, 'to': inf}: from, to and step must be finite"),
        (
            "ranges: {lr: {from: 1, to: 2, step: .nan}}",
            "ranges.lr={'from': 1, 'to': 2, 'step': nan}: from, to and step must",
        ),
        (
            f"{LR}\noptions: &o {{model_options: *o}}",
            "is not valid YAML (*o: a sweep has no aliases; write the value out)",
        ),
        ("[" * 5000, "is nested too deeply; give a table with the entry ranges"),
        (f"{LR}\nx: !!python/object/apply:os.mkdir [ran]", "is not valid YAML, line 2, column 4"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, text, line):
    with pytest.raises(ValueError, match="sweep") as error:
        read(tmp_path, text)
    found = str(error.value)
    assert found.startswith(f"{tmp_path / 'sweep.yaml'}: {line}")
    assert "\n" not in found
