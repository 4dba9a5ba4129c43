"""Code blocks and commands of README.md and docs/ run, links resolve, tables agree with the code and with results/.

`make tables` rewrites the tables that are computed from the code or from results/.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache, partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import numpy as np
import pytest
import torch
from docstring_parser import parse_from_object
from PIL import Image

import raytraced as rt
from experiments.reproduce.claims import shorter_gain
from experiments.reproduce.command import find_plan
from experiments.reproduce.image_aims import points_ahead
from experiments.reproduce.plan import FULL, OWN_FOLDERS, TEXT_PARTS, every_run
from experiments.reproduce.reading_aims import agrees, compare_final_loss, compare_longer, difference, in_percent
from experiments.reproduce.records import Record, Results, Store, spread
from experiments.reproduce.report import wide_results
from experiments.reproduce.tables import (
    ACCURACY,
    USE,
    equal_cost_table,
    final_loss_table,
    frontier_table,
    gain_over_fixed,
    search_table,
    second_recipe_table,
)
from experiments.reproduce.text import aims_table as path_aims
from experiments.reproduce.text import dial_table, pair_aims_table, pair_dial_table, read_seconds, seconds_table
from experiments.reproduce.text import text_table as models_on_text
from experiments.reproduce.text_aims import dial_levels, frontier, gap, make_level, model_level
from experiments.reproduce.variants import DATA_NAMES, MRE_PAPER, MRE_PAPER_LONG, READING_VARIANTS
from experiments.reproduce.wide import against_table
from raytraced import plugins
from raytraced.cli.main import COMMANDS, find_command, main, read_command
from raytraced.cli.parsing import make_parser, read_arguments
from raytraced.models.registry import MODELS, complete_options
from raytraced.training.config import TrainConfig, preset_values

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = runpy.run_path(str(DOCS / "reference.py"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent != DOCS / "reference"),
]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LANGUAGES = ("python", "bash", "text")  # text: the output of a command, or the content of a file
WIDTH = 100
pytestmark = pytest.mark.skipif("RAYTRACED_KERNELS" in os.environ, reason="pages run once, with the default kernels")
PLACEHOLDERS = {"NAME": "mnist", "FOLDER": "folder/of/classes", "FILE": "own.txt"}  # a fixture makes RUN and image.png
# Options of ARGS="…" are those of these functions.
EXPERIMENTS = {
    "reproduce": "experiments.reproduce.command:reproduce",
    "bench": "experiments.benchmark.command:benchmark",
}


TEXT_RUN = (
    "--data", "shakespeare", "--model", "gpt-mre", "--data_options", "{context: 16, steps: 2, eval_tokens: 256}",
    "--model_options", "{dim: 8, num_heads: 2, hidden: 8, num_experts: 2}",
)  # fmt: skip


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str


def read_blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, each.start()) + 1, each[1], each[2]) for each in found]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> list[str]:
    """The command lines of a page: those of its blocks, and those in backticks in its sentences."""
    shell = [block.text.replace("\\\n", " ") for block in read_blocks(text) if block.language == "bash"]
    blocks = [line for block in shell for line in block.splitlines()]
    inline = re.findall(r"`((?:raytraced|make|torchrun|python|pip) [^`]+)`", without_blocks(text).replace("\n", " "))
    mentioned = [f"raytraced {name}" for name in COMMANDS]  # by its name alone
    lines = [*blocks, *(line for line in inline if line not in mentioned)]
    return [command for line in lines for command in split_line(line)]


def split_line(line: str) -> list[str]:
    """The commands of a line, separated by semicolons, without comments."""
    words = shlex.shlex(line, posix=False, punctuation_chars=";")
    words.whitespace_split, words.commenters = True, "#"
    parts = groupby(words, key=lambda word: word == ";")
    return [" ".join(part) for is_separator, part in parts if not is_separator]


# Each command once, with the page that has it last.
COMMAND_LINES = {
    command: name
    for name, page in zip(NAMES, PAGES, strict=True)
    for command in commands_of(page.read_text(encoding="utf-8"))
}


PLUGIN_FILE = r"# (\w+\.py)\n"  # the first line of a block that is a file of its own


@contextlib.contextmanager
def plugins_as_before() -> Iterator[None]:
    """Forget the plugins that were registered, and the data sets that they added."""
    from raytraced.tasks.images.catalog import CATALOG

    tables = [(table, dict(table)) for table in (*plugins._registered.values(), CATALOG)]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for name in [name for name in sys.modules if name.startswith("raytraced_plugin_")]:
            del sys.modules[name]


@pytest.fixture(scope="session")
def things(tmp_path_factory) -> Path:
    """What the pages refer to: finished runs, an image, a folder with one sub-folder of images per class, a text."""
    folder = tmp_path_factory.mktemp("docs")
    random = np.random.default_rng(0)
    for number in range(12):
        path = folder / "folder/of/classes" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    shutil.copy(path, folder / "image.png")
    (folder / "sweeps/mine").mkdir(parents=True)
    (folder / "sweeps/mine/best.yaml").write_text("batch_size: 512\n")
    (folder / "own.txt").write_text("a text of one's own, line by line\n" * 400)
    for block in read_blocks((DOCS / "guides/extending.md").read_text(encoding="utf-8")):
        if file := re.match(PLUGIN_FILE, block.text):
            (folder / file[1]).write_text(block.text)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), plugins_as_before():
        assert main(["train", "--epochs", "1", "--batch-size", "512", "--quiet", "--name", "RUN"]) == 0
        assert main(["train", *TEXT_RUN, "--epochs", "1", "--quiet", "--name", "plays"]) == 0
        assert main(["store", "plays", "plays.safetensors"]) == 0
        custom = ["--plugin", "positive.py", "--model", "positive"]
        assert main(["train", *custom, "--epochs", "1", "--batch-size", "512", "--quiet", "--name", "mine"]) == 0
    return folder


@pytest.fixture
def workplace(things, tmp_path, monkeypatch) -> Path:
    """A fresh copy of these things as the working folder."""
    shutil.copytree(things, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def as_before(monkeypatch) -> Iterator[None]:
    """Remove what a page adds to the package, in tables and in files."""
    from raytraced.kernels import OPERATIONS

    for operation in OPERATIONS.values():
        monkeypatch.setattr(operation, "implementations", operation.implementations)
    with plugins_as_before():
        yield


SLOW_PAGES = {"docs/guides/export.md"}  # tests/io/test_export.py exports a smaller model, and tries more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_PAGES else name for name in NAMES]
)
def test_python_of_a_page_runs_from_top_to_bottom(name, workplace, as_before):
    page = PAGES[NAMES.index(name)]
    namespace = {"__name__": "page"}
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        if not re.match(PLUGIN_FILE, block.text):  # a file, which a fixture has written
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            for expression, shape in re.findall(r"^(\w[^\s=]*) +# (\([\d, ]+\))", block.text, re.MULTILINE):
                value = eval(expression, namespace)
                assert str(tuple(getattr(value, "shape", value))) == shape, expression


@pytest.mark.parametrize("command", COMMAND_LINES, ids=[f"{page}: {line}" for line, page in COMMAND_LINES.items()])
def test_command_of_a_page_is_one(command, workplace, as_before, monkeypatch):
    for name in ("callbacks.draw_pictures", "trackers.tensorboard.write_event"):  # would take longer than the training
        monkeypatch.setattr(f"raytraced.training.{name}", lambda *_: None)
    run_command([PLACEHOLDERS.get(word, word) for word in shlex.split(command) if word != "…"])


def run_command(words: list[str]) -> None:
    """Run a command that takes seconds; parse the arguments of any other."""
    while re.match(r"[A-Z_]+=", words[0]):  # the environment
        words = words[1:]
    program, *rest = words
    if program not in PROGRAMS:
        pytest.fail(f"{program}: not in PROGRAMS of this test; add a function that checks it")
    PROGRAMS[program](rest)


def check_make(words: list[str]) -> None:
    """The target exists, and ARGS="…" are options of the command that it runs."""
    target, *variables = words
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"
    for variable in variables if target in EXPERIMENTS else ():
        words = shlex.split(variable.removeprefix("ARGS="))
        read_arguments(make_parser(prog=target), resolve_name(EXPERIMENTS[target]), words)


def check_torchrun(words: list[str]) -> None:
    """The options of torchrun and of the command that it starts can be parsed."""
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words)
    assert read.module
    import_module(read.training_script)
    run_or_read(read.training_script_args, only_read=True)


def check_python(words: list[str]) -> None:
    """The file or the module exists."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
    else:
        assert (ROOT / words[0]).is_file(), words[0]


def check_pip(words: list[str]) -> None:
    """`.` or `'.[extra]'` with an extra that exists, a repository, or a wheel: there is no page on an index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    if words[1:] in (["git+ADDRESS"], ["FILE.whl"]):
        return
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[1])
    assert found, words[1]
    assert set((found[1] or "plots").split(",")) <= set(extras), words[1]


def check_source(words: list[str]) -> None:
    assert words == [".venv/bin/activate"]


def check_pre_commit(words: list[str]) -> None:
    assert words == ["install"]
    assert (ROOT / ".pre-commit-config.yaml").is_file()


def run_or_read(words: list[str], only_read: bool = False) -> None:
    """Run a `raytraced` command, training and writing little; or parse its arguments."""
    if not words or words[0].startswith("-") or {"--help", "--print-config"} & {*words}:
        assert code_of(words) == 0
        return
    name = find_command(words)
    if name is None:
        assert code_of(words) == 0
        return
    _, read = read_command(words)
    if only_read or not takes_seconds(name, read):
        return
    short = SHORT.get(name, []) if name != "resume" or "--epochs" in words else []
    if name == "train" and read["config"].model.startswith("gpt"):
        short = [*short, "--data-options.steps", "5"]
    assert code_of([*words, *short]) == 0


# The last value of an option counts: what a page trains or writes for longer takes seconds here.
SHORT = {"train": ["--epochs", "1", "--quiet"], "resume": ["--epochs", "3"], "generate": ["--length", "20"]}
PROGRAMS = {
    "raytraced": run_or_read,
    "make": check_make,
    "torchrun": check_torchrun,
    "python": check_python,
    "pip": check_pip,
    "source": check_source,
    "pre-commit": check_pre_commit,
}


def takes_seconds(name: str, read: dict) -> bool:
    """Whether a command runs in seconds without a download; fails on names that do not exist."""
    if name == "train":
        config = read["config"]
        of_decoder = (
            "depth",
            "num_heads",
            "routing_input",
            "routing_dim",
            "path_tokens",
        )  # options of a decoder, not of its layers
        layer_options = {key: value for key, value in config.model_options.items() if key not in of_decoder}
        complete_options(config.model, layer_options)
        # Libraries of trackers take seconds to import: tests/training/test_trackers.py trains with them.
        return config.tracker is None and (config.data == "digits" or Path(config.data).exists())
    if name == "data get":
        from raytraced.tasks.registry import catalog

        assert set(read["names"]) <= set(catalog()), read["names"]
        return False
    if name == "sweep":
        return False  # tests/training/test_sweep_file.py reads the file of the page
    if name == "serve":
        return False  # runs until it is stopped
    if name == "data show":
        return read["name"] == "digits" or Path(read["name"]).exists()
    if name == "export":
        return False
    if name == "evaluate":
        return read["run"] in ("RUN", "mre-digits") and read["data"] is None
    return True


def code_of(words: list[str]) -> int:
    """The exit code of a command; pytest shows its output if a test fails."""
    try:
        return main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("name", NAMES)
def test_code_is_in_blocks_that_say_what_they_are(name):
    text = PAGES[NAMES.index(name)].read_text(encoding="utf-8")
    for block in read_blocks(text):
        assert block.language in LANGUAGES, f"line {block.line}: {block.language or 'no language'}"
        if block.language == "text":
            assert not re.search(r"^(raytraced|make|torchrun|pip) ", block.text, re.MULTILINE), f"line {block.line}"
    assert not re.search(
        r"^(?: {4}|\t)(raytraced|make|torchrun|python|import|from) ", without_blocks(text), re.MULTILINE
    )


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_a_page_are_short(name):
    lines = PAGES[NAMES.index(name)].read_text(encoding="utf-8").splitlines()
    # a row of a table cannot be wrapped
    long = [f"{number}: {line}" for number, line in enumerate(lines, 1) if len(line) > WIDTH and line[:1] != "|"]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("name", NAMES)
def test_links_and_names_of_a_page_lead_somewhere(name):
    page = PAGES[NAMES.index(name)]
    text = without_blocks(page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target
    for path in re.findall(r"`((?:src|tests|docs|results|benchmarks|experiments)/[\w./-]+)`", text):
        made = ("results/quick", "results/runs", "benchmarks/quick", "benchmarks/gpu")  # by a command
        assert (ROOT / path).exists() or path.rstrip("/") in made, path
    for dotted in re.findall(r"`raytraced((?:\.\w+)+)", text):
        find_name(dotted)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def find_name(dotted: str) -> None:
    """Follow .module.Class.attribute from the package on."""
    path, value = "raytraced", import_module("raytraced")
    for part in dotted.removeprefix(".").split("."):
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif part not in getattr(value, "__annotations__", {}):
            value = import_module(path)


# Tables that are computed from the code or from results/, between a comment that names them and <!-- end -->.


def options_table() -> list[str]:
    """Every option of a run."""
    meanings = {one.arg_name: one.description for one in parse_from_object(TrainConfig).params}
    sets = [preset_values("best", data, model) for data in ("digits", "mnist") for model in ("mre", "top-k")]
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for one in fields(TrainConfig):
        default = one.default if one.default is not MISSING else one.default_factory()  # type: ignore[misc]
        shown = "" if default in (None, {}) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        by_preset = "preset" if any(one.name in values for values in sets) else shown
        rows.append(f"| `--{one.name.replace('_', '-')}` | {by_preset} | {meanings[one.name]} |")
    return rows


def target_table() -> list[str]:
    """Accuracy and experts of MRE trained with several targets, from the runs in results/."""
    summary = json.loads((ROOT / "results/summary.json").read_text())
    names = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "union": "union"}
    rows = [f"| target | {' | '.join(names.values())} |", "|---|" + "---:|" * len(names)]
    for target in ("2", "6", "12"):
        found = [summary[data].get("mre" if target == "6" else f"mre-target-{target}") for data in names]
        cells = [
            "" if one is None else f"{100 * one['accuracy_mean']:.1f} ({one['experts_mean']:.1f})" for one in found
        ]
        rows.append(f"| {target} | {' | '.join(cells)} |")
    return rows


def reading_table() -> list[str]:
    """The paper's tables beside the runs of mre-paper and of the literal readings in results/, with the verdict of rule 1."""
    results = Results(Store(ROOT / "results/records").records.values())
    paper = [f"{mean} ± {deviation}, {USE[data][2]}" for data, (mean, deviation) in ACCURACY["mre-paper"].items()]
    rows = [["test images", *(DATA_NAMES[data] for data in USE), "agrees on"], ["---"] * 5, ["the paper", *paper, ""]]
    readings = [("main", MRE_PAPER.label), *(("reading", one.label) for one in (*READING_VARIANTS, MRE_PAPER_LONG))]
    for group, label in readings:
        found = {data: runs for data in USE if (runs := results.of(data, label, group))}
        agreeing = [DATA_NAMES[data] for data, runs in found.items() if agrees_on(data, runs)]
        cells = [reading_cell(found[data]) if data in found else "" for data in USE]
        rows.append([f"`{label}`", *cells, ", ".join(agreeing) or "none"])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def reading_cell(runs: list[Record]) -> str:
    """Accuracy in percent and experts, each with its standard deviation, as the paper reports it."""
    accuracy, experts = spread(100 * one.accuracy for one in runs), spread(one.experts for one in runs)
    return f"{accuracy.mean:.1f} ± {accuracy.std:.1f}, {experts.mean:.1f} ± {experts.std:.1f}"


def agrees_on(data: str, runs: list[Record]) -> bool:
    """Rule 1 of benchmarks/aims-readings.md."""
    accuracy, experts = (spread(getattr(one, name) for one in runs).mean for name in ("accuracy", "experts"))
    return agrees(100 * accuracy, experts, ACCURACY["mre-paper"][data], USE[data][2])


def final_loss_rows() -> list[str]:
    """MRE without a loss on exits beside the best baseline of its cost and beside threshold."""
    return final_loss_table(Results(Store(ROOT / "results/records").records.values())).lines()


def second_recipe_rows() -> list[str]:
    """The rules of benchmarks/aims-images.md and what the runs say."""
    folder = ROOT / "results"
    return second_recipe_table(Store(folder / "records").results(every_run(find_plan(FULL, folder)))).lines()


def equal_cost_rows() -> list[str]:
    """The two recipes at equal multiply-adds."""
    folder = ROOT / "results"
    return equal_cost_table(Store(folder / "records").results(every_run(find_plan(FULL, folder)))).lines()


def wide_rows() -> list[str]:
    """Every model on the union at width 128."""
    return frontier_table(wide_results(ROOT / "results"), "union").lines()


def machine_time() -> list[str]:
    """The seconds of all recorded runs, as hours on one core."""
    folders = {"images": "results", "images, wide": "results/wide", "text, bytes": "results/text"}
    folders |= {"text, words": "results/text-words", "text, main size": "results/text-main"}
    folders |= {"text, old form": "results/text-old"}
    rows = ["| records | runs | hours on one core | on two |", "|---|---:|---:|---:|"]
    total = [0, 0.0]
    for name, folder in folders.items():
        paths = sorted((ROOT / folder / "records").glob("*.jsonl"))
        lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
        hours = sum(json.loads(line).get("seconds", 0.0) for line in lines) / 3600
        rows.append(f"| {name}, `{folder}/records` | {len(lines)} | {hours:.1f} | {hours / 2:.1f} |")
        total = [total[0] + len(lines), total[1] + hours]
    return [*rows, f"| together | {total[0]} | {total[1]:.1f} | {total[1] / 2:.1f} |"]


AIMS = {"mnist": "97.3, 1.6", "fashion-mnist": "88.2, 2.2", "cifar10": "65.0, 2.5", "union": "76.3, 3"}


def aims_table() -> list[str]:
    """The aims of benchmarks/aims.md beside the records."""
    store = Store(ROOT / "results/records")
    ranks = {row.split("|")[1].strip(): row.split("|")[2:4] for row in difficulty_rows()}
    head = ["", "to the end", "early exit", "aim", "against one depth", "against eight dense blocks"]
    rows = [[*head, "rank, early exit", "rank, to the end"], ["---"] * 8]
    for data, aim in AIMS.items():
        ours, dense = (
            [store.records[f"main-{data}-{name}-s{seed}"] for seed in range(5)] for name in ("mre", "dense-8-exits")
        )
        points = [one.early_exit["points"][1] for one in ours]
        assert {point["within"] for point in points} == {0.1}
        whole = f"{100 * spread(one.accuracy for one in ours).mean:.2f}, {spread(one.experts for one in ours).mean:.2f}"
        stopped = [spread(point[name] for point in points).mean for name in ("accuracy", "experts")]
        gains = [100 * gain_over_fixed(one.early_exit, 0.1) for one in ours]
        differences = [in_points(gains), str(points_ahead(ours, dense))]
        rank = [cell.strip() for cell in ranks[DATA_NAMES[data]]]
        rows.append([DATA_NAMES[data], whole, f"{100 * stopped[0]:.2f}, {stopped[1]:.2f}", aim, *differences, *rank])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def in_points(values: list[float]) -> str:
    """The mean over seeds and its standard error."""
    one = spread(values)
    return f"{one.mean:+.2f} ± {one.error:.2f}"


def exits_table() -> list[str]:
    """MRE against all baselines that were trained with exits, at MRE's macs."""
    store = Store(ROOT / "results/records")
    baselines = ("dense-4", "dense-8", "multi-exit", "top-1", "top-k", "threshold")
    rows = [["MRE against", *baselines], ["---"] * (1 + len(baselines))]
    for data in AIMS:
        seeds = {label: [store.records.get(f"main-{data}-{label}-s{seed}") for seed in range(5)] for label in
                 ("mre", *(f"{name}-exits" for name in baselines))}  # fmt: skip
        known = {label: [one for one in found if one is not None] for label, found in seeds.items()}
        rows.append(
            [DATA_NAMES[data], *(str(points_ahead(known["mre"], known[f"{name}-exits"])) for name in baselines)]
        )
    return [f"| {' | '.join(cells)} |" for cells in rows]


def exit_seconds_table() -> list[str]:
    """Milliseconds of 1,000 images, from the measured tables in benchmarks/early-exit-seconds.md."""
    text = (ROOT / "benchmarks/early-exit-seconds.md").read_text(encoding="utf-8")
    shown = ("mre", "mre, no early exit", "dense-8-exits, no early exit")
    rows = [["data set", "1,000 images, early exit", "1,000 images, to the end", "eight dense blocks, to the end"],
            ["---", "---:", "---:", "---:"]]  # fmt: skip
    for part in text.split("### ")[1:]:
        name, *lines = part.splitlines()
        cells = (line.strip("| ").split(" | ") for line in lines if line.startswith("| "))
        found = {row[0]: row[4] for row in cells}
        rows.append([name, *(f"{found[label]} ms" for label in shown)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def old_texts() -> dict[str, Results]:
    """The language models of the old form, by text."""
    results = Results(Store(ROOT / "results/text-old/records").records.values())
    return {data: results for data in results.data()}


def elastic_table() -> list[str]:
    """`mre-elastic` of the old form with at most so many experts per block, beside the line of the baselines at equal MACs."""
    rows = [["text", "experts per block, at most", "MACs", "bits per byte", "above the baselines"],
            ["---", "---:", "---:", "---:", "---:"]]  # fmt: skip
    for data, results in old_texts().items():
        labels = [label for label in results.labels(data) if not label.startswith("mre")]
        line = frontier(model_level(label, results.of(data, label)) for label in labels)
        records = results.of(data, "mre-elastic")
        for most in (1, 2, 4, 8):
            budgets = [one.budgets[most] for one in records]
            level = make_level("", ((row["bits_per_byte"], row["macs"], row["experts"]) for row in budgets))
            cells = (f"{level.macs / 1000:.0f}", f"{level.bits:.3f} ± {level.error:.3f}", gap(level, line).figure)
            rows.append([DATA_NAMES[data], f"{most}", *cells])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def text_table() -> list[str]:
    """Bits per byte of every language model of the old form, the cheapest first; their decoders have two blocks."""
    known = old_texts()
    head, rule = ["", "experts", "multiply-adds"], ["---", "---:", "---:"]
    rows = [[*head, *(DATA_NAMES[data] for data in known)], [*rule, *["---:"] * len(known)]]
    data, results = next(iter(known.items()))
    levels = {label: model_level(label, results.of(data, label)) for label in results.labels(data)}
    for label in sorted(levels, key=lambda label: levels[label].macs):
        found = [spread(one.bits for one in results.of(data, label)) for data, results in known.items()]
        bits = [f"{one.mean:.3f} ± {one.error:.3f} ({one.num})" if one.num else "–" for one in found]
        experts = spread(one.experts for one in results.of(data, label)).mean / 2
        rows.append([f"`{label}`", f"{experts:.1f}", f"{levels[label].macs / 1000:.0f}", *bits])
    return [f"| {' | '.join(cells)} |" for cells in rows]


@cache
def path_tables(part: str) -> dict[str, list[str]]:
    """The tables of one comparison of paths on enwik8, from its records, as lines."""
    folder, scale = ROOT / "results" / OWN_FOLDERS[part], TEXT_PARTS[part]
    results, seconds = Store(folder / "records").results(every_run(find_plan(scale, folder))), read_seconds(folder)
    tables = {
        "pair dials": pair_dial_table(results, "enwik8", scale),
        "pair aims": pair_aims_table(results, "enwik8", scale),
        "models": models_on_text(results, "enwik8", seconds),
        "dials": dial_table(results, "enwik8", scale),
        "aims": path_aims(results, "enwik8", seconds, scale),
        "seconds": seconds_table(seconds),
        "searches": search_table(results, lambda score: f"{-score:.3f}", ""),
    }
    return {name: table.lines() for name, table in tables.items()}


def difficulty_rows() -> list[str]:
    """The rows of the table in benchmarks/difficulty.md."""
    lines = (ROOT / "benchmarks/difficulty.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ")][2:]


def readme_table() -> list[str]:
    """The table that `make reproduce` writes for README."""
    return (ROOT / "results/table.md").read_text(encoding="utf-8").splitlines()


def budgets_table() -> list[str]:
    """Test accuracy, or bits per byte, when every sample runs at most so many experts."""
    images, texts = Store(ROOT / "results/records"), Store(ROOT / "results/text-old/records")
    budgets = (0, 1, 2, 3, 4)
    rows = [["experts, at most", *(str(budget) for budget in budgets), "no limit"], ["---", *["---:"] * 6]]
    for data in AIMS:
        runs = [images.records[f"main-{data}-mre-s{seed}"] for seed in range(5)]
        means = [100 * spread(run.budgets[budget]["accuracy"] for run in runs).mean for budget in (*budgets, -1)]
        rows.append([DATA_NAMES[data], *(f"{mean:.1f} %" for mean in means)])
    for label, name in (("mre", "enwik8"), ("mre-elastic", "enwik8, `--anytime-loss 0.25`")):
        runs = [texts.records[f"main-enwik8-{label}-s{seed}"] for seed in range(3)]
        means = [spread(run.budgets[budget]["bits_per_byte"] for run in runs).mean for budget in (*budgets, -1)]
        rows.append([name, *(f"{mean:.2f} bits" for mean in means)])
    return [f"| {' | '.join(cells)} |" for cells in rows]


WRITTEN = {
    "<!-- results/table.md -->\n": readme_table,
    "<!-- options: make tables writes this table -->\n": options_table,
    "<!-- reading: make tables writes this table -->\n": reading_table,
    "<!-- final loss: make tables writes this table -->\n": final_loss_rows,
    "<!-- second recipe: make tables writes this table -->\n": second_recipe_rows,
    "<!-- equal cost: make tables writes this table -->\n": equal_cost_rows,
    "<!-- wide: make tables writes this table -->\n": wide_rows,
    "<!-- wide, ours: make tables writes this table -->\n": lambda: against_table(
        wide_results(ROOT / "results")
    ).lines(),
    "<!-- machine time: make tables writes this table -->\n": machine_time,
    "<!-- aims: make tables writes this table -->\n": aims_table,
    "<!-- exits: make tables writes this table -->\n": exits_table,
    "<!-- exit seconds: make tables writes this table -->\n": exit_seconds_table,
    "<!-- text: make tables writes this table -->\n": text_table,
    "<!-- elastic: make tables writes this table -->\n": elastic_table,
    "<!-- targets: make tables writes this table -->\n": target_table,
    "<!-- budgets: make tables writes this table -->\n": budgets_table,
}
# part of the plan → the first word of its tables' names, and which of them are shown
PATH_TABLES = {
    "text": ("path", ("models", "dials", "aims", "pair dials", "pair aims", "seconds", "searches")),
    "words": ("word", ("models", "dials", "aims", "searches")),
    "main": ("main", ("models", "dials", "aims", "pair dials", "pair aims", "seconds", "searches")),
}
WRITTEN |= {
    f"<!-- {word} {name}: make tables writes this table -->\n": partial(
        lambda part, name: path_tables(part)[name], part, name
    )
    for part, (word, names) in PATH_TABLES.items()
    for name in names
}


def rewritten(text: str) -> str:
    """A page with its tables as computed now."""
    for start, make in WRITTEN.items():
        before, found, rest = text.partition(start)
        if found:
            text = before + start + "\n".join([*make(), "<!-- end -->"]) + rest.partition("<!-- end -->")[2]
    return text


@pytest.mark.parametrize("name", NAMES)
def test_written_tables_are_up_to_date(name):
    text = PAGES[NAMES.index(name)].read_text(encoding="utf-8")
    assert text == rewritten(text), "run `make tables`"


def test_every_written_table_is_in_a_page():
    together = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(together.count(start) == 1 for start in WRITTEN)


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose header begins with a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_arguments_of_the_layer_are_those_of_its_class():
    from raytraced import RaytracedExperts

    documented = {name.strip("`"): default.strip("`") for name, default, _ in table_rows("guides/layer.md", "argument")}
    known = [one for one in inspect.signature(RaytracedExperts).parameters.values() if one.kind is not one.VAR_KEYWORD]
    shown = {one.name: "" if one.default is one.empty else str(one.default) for one in known}
    shown |= {one.name: str(one.default) for one in fields(RaytracedExperts.config_type)}
    assert documented == shown


def test_table_of_models_is_that_of_the_code():
    rows = {row[0].strip("`"): row[1:] for row in table_rows("guides/models.md", "name")}
    assert list(rows) == list(MODELS)
    for name, (_, options, adaptive, anytime) in rows.items():
        assert (adaptive, anytime) == tuple(
            "yes" if flag else "" for flag in (MODELS[name].adaptive, MODELS[name].anytime)
        )
        defaults = complete_options(name, {})
        for option, value in re.findall(r"`(\w+)=([^`]+)`", options):
            assert str(defaults[option]) == value, (name, option)


def test_a_new_layer_runs_as_many_experts_as_its_page_says():
    text = (DOCS / "guides/layer.md").read_text(encoding="utf-8").replace("\n", " ")
    stated = int(re.search(r"runs about (\d+) of its 32 experts", text)[1])
    means = []
    for seed in range(20):
        torch.manual_seed(seed)
        layer = rt.RaytracedExperts(dim=16, num_layers=4, num_experts=8).eval()
        means.append(layer(torch.randn(256, 16)).route.num_active.float().mean())
    assert round(float(torch.stack(means).mean())) == stated


def test_the_figures_of_the_readme_are_those_of_the_records():
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    store = Store(ROOT / "results/records")
    mnist, fashion = (
        [store.records[f"main-{data}-mre-s{seed}"] for seed in range(5)] for data in ("mnist", "fashion-mnist")
    )
    plain, results = " ".join(text.split()), Results(store.records.values())
    along = [100 * spread(run.budgets[budget]["accuracy"] for run in mnist).mean for budget in (1, 2, 4)]
    dense = [100 * results.point("mnist", f"dense-{num}").accuracy.mean for num in (1, 2, 4)]
    assert f"1, 2, 4 experts: {', '.join(f'{mean:.1f}' for mean in along)} %" in plain
    assert f"trained for 1, 2, 4: {', '.join(f'{mean:.1f}' for mean in dense)} %" in plain
    stopped = [exit_experts(runs) for runs in (fashion, results.of("fashion-mnist", "threshold-exits"))]
    assert f"at most 0.1 points: {stopped[0]} (a threshold: {stopped[1].replace('experts ', '')})" in plain
    with_target, without = (
        spread(100 * shorter_gain(run) for run in runs)
        for runs in (fashion, results.of("fashion-mnist", "mre-final-loss"))
    )
    assert f"{with_target.mean:.1f} ± {with_target.error:.1f} points better" in plain
    assert f"without, {without.mean:.1f} ± {without.error:.1f}" in plain
    leads = [
        difference(
            in_percent(results.point(data, label).accuracy), in_percent(results.point(data, "mre-final-loss").accuracy)
        )
        for data in ("mnist", "fashion-mnist", "union")
        for label in ("top-k", "dense-8")
    ]
    assert {one.verdict for one in leads} == {"ahead"}
    lowest, highest = (f"{choose(one.mean for one in leads):.1f}" for choose in (min, max))
    assert f"lead by {lowest} to {highest} points on three of four sets" in plain
    texts = Results(Store(ROOT / "results/text-main/records").records.values())
    labels = ("mre-range", "mre-range-pair", "hash-1", "hash-2", "top-2-balance", "top-4-balance")
    levels = {label: model_level(label, texts.of("enwik8", label)) for label in labels}
    shown = {label: f"{level.bits:.3f} ± {level.error:.3f}" for label, level in levels.items()}
    mre = levels["mre-range"]
    pair = f"(paths of two tokens: {shown['mre-range-pair']})"
    assert f"MRE {shown['mre-range']} with {mre.experts:.1f} experts per block {pair}" in plain
    assert f"balanced top-4 {shown['top-4-balance']}" in plain
    assert f"random tables {shown['hash-1']} with one, {shown['hash-2']} with two" in plain
    for label in ("top-2-balance", "top-4-balance"):  # "beats"
        assert levels[label].bits - mre.bits > 2 * math.hypot(levels[label].error, mre.error)
    assert abs(levels["hash-1"].bits - mre.bits) < 2 * math.hypot(levels["hash-1"].error, mre.error)  # "as good"
    dial = dial_levels(texts.of("enwik8", "mre-range"))
    fewest = min(dial, key=lambda level: level.experts)
    rest = {f"{one.bits:.2f}" for one in dial if one.experts >= mre.experts}
    found = f"{fewest.experts:.1f} experts {fewest.bits:.2f}, {mre.experts:.1f} {', '.join(rest)}"
    assert f"One checkpoint: {found}." in plain


def exit_experts(runs: list[Record]) -> str:
    """The experts per image with early exit and without, where it loses at most 0.1 points on test images, too."""
    points = [run.early_exit["points"][1] for run in runs]
    lost = spread(100 * (run.accuracy - point["accuracy"]) for run, point in zip(runs, points, strict=True))
    assert lost.mean < 0.1
    early, whole = spread(point["experts"] for point in points), spread(run.experts for run in runs)
    return f"{early.mean:.1f} experts of {whole.mean:.1f}"


def test_the_numbers_of_experts_on_harder_data_are_those_of_the_records():
    paper = " ".join((DOCS / "paper/paper.md").read_text(encoding="utf-8").split())
    results = Results(Store(ROOT / "results/records").records.values())
    easy, middle, hard = (
        [one.experts for one in results.of(data, "mre-paper")] for data in ("mnist", "fashion-mnist", "cifar10")
    )
    assert f"{spread(easy).mean:.2f} and {spread(middle).mean:.2f} experts" in paper
    between = spread(after - before for before, after in zip(easy, middle, strict=True))
    assert f"a difference of {between.mean:.2f} ± {between.error:.2f} (standard error, paired by seed)" in paper
    more = [spread(after - before for before, after in zip(some, hard, strict=True)) for some in (easy, middle)]
    assert "CIFAR-10 runs " + " and ".join(f"{one.mean:.1f} ± {one.error:.1f}" for one in more) + " more" in paper
    assert f"correlate at {statistics.correlation(easy, middle):.2f}," in paper


def test_what_the_pages_say_of_the_final_loss_and_of_sixty_epochs_is_what_the_records_say():
    results = Results(Store(ROOT / "results/records").records.values())
    readme, paper = (
        " ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in ("README.md", "docs/paper/paper.md")
    )
    found = {data: compare_final_loss(results, data) for data in AIMS}
    above = {data: one.against(one.threshold) for data, one in found.items()}
    assert [data for data, one in above.items() if one.verdict == "behind"] == ["mnist", "union"]
    assert {one.verdict for one in above.values()} == {"behind", "level"}
    behind = {data: f"{-one.mean:.2f} ± {one.error:.2f}" for data, one in above.items()}
    assert f"by {behind['union']} points on the union and {behind['mnist']} on MNIST, level on the others" in readme
    longer = compare_longer(results)
    assert not longer.little
    long, short = (
        f"{100 * one.accuracy.mean:.1f} ± {100 * one.accuracy.error:.1f} % with {one.experts:.1f}"
        for one in (longer.long, longer.short)
    )
    assert (
        f"{long} experts in place of {short}, which is {longer.accuracy.mean:.1f} ± {longer.accuracy.error:.1f} points"
        in paper
    )


def test_the_environment_is_activated_before_a_command_needs_it():
    for name in ("README.md", "docs/index.md"):
        commands = [line for block in read_blocks((ROOT / name).read_text(encoding="utf-8")) if block.language == "bash"
                    for line in block.text.splitlines()]  # fmt: skip
        programs = [shlex.split(command, comments=True)[:2] for command in commands]
        activated = programs.index(["source", ".venv/bin/activate"])
        assert programs.index(["make", "demo"]) < activated
        assert activated < min(place for place, words in enumerate(programs) if words[0] == "raytraced")


def test_no_page_says_that_budgets_of_text_need_no_training():
    texts = [" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES]
    assert not any("no training of their own" in text for text in texts)
    guide = " ".join((DOCS / "guides/text.md").read_text(encoding="utf-8").split())
    assert "A hard limit, `max_experts`, costs accuracy unless" in guide


def test_curl_gets_bodies_from_a_pipe_or_a_file():
    """An image inside the command line would be too long for the system."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if "curl -" in line]
    bodies = [word for line in lines for word in re.findall(r"--data(?:-binary)? (\S+)", line)]
    assert bodies
    assert all(word.startswith("@") for word in bodies)


@pytest.mark.parametrize("path", [*REFERENCE["rendered"]()], ids=lambda path: path.stem)
def test_the_reference_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == REFERENCE["rendered"]()[path], "run `make reference`"


def test_every_public_name_is_in_the_reference():
    listed = {name for page in REFERENCE["PAGES"].values() for _, name in REFERENCE["listed"](page)}
    functions = {name for name in rt.__all__ if callable(getattr(rt, name))}
    assert not functions - listed


def test_every_argument_of_the_layer_is_in_the_reference():
    text = (DOCS / "reference/layer.md").read_text(encoding="utf-8").partition("\n## ")[2].partition("\n## ")[0]
    names = {*inspect.signature(rt.RaytracedExperts).parameters} - {"options"}
    names |= {one.name for one in fields(rt.RaytracedExperts.config_type)}
    assert not [name for name in sorted(names) if f"**`{name}`**" not in text]


# What the pages and the code called things before 0.2.0; a path is still looked up, and files and studies have tell().
OLD_WORDS = re.compile(
    r"\b(?:looks|looked(?![- ]up)|look_loss|num_looks|LookAt|CountLooks|sure|until_sure|answer_when_sure|sight|sight_rank"
    r"|judged?|rivals?|nobody|everybody|everyone|told|Told|Traced|(?<!\.)tell(?=\()|SameDraws|DrawsFrom|each_of"
    r"|who_is_seen|multiply_adds|why_unfit|why_unreadable|why_unpackable)(?!\w)"
)
# These read models and versions from before 0.2.0, or are this list.
WITH_OLD_WORDS = {
    "src/raytraced/models/card.py", "tests/io/test_saving.py", "tests/integrations/test_transformers.py",
    "experiments/versions.py", "tests/test_docs.py",
}  # fmt: skip
SOURCE_SUFFIXES = {".py", ".h", ".inl", ".cpp", ".js", ".css", ".html", ".md"}


def old_words(paths: Iterable[Path]) -> dict[str, list[str]]:
    """The old words of each file that has some, by the file's name."""
    found = {path.relative_to(ROOT).as_posix(): OLD_WORDS.findall(path.read_text(encoding="utf-8")) for path in paths}
    return {name: sorted(set(words)) for name, words in found.items() if words and name not in WITH_OLD_WORDS}


def test_old_words_are_gone_from_the_pages():
    assert not old_words(PAGES)


@pytest.mark.parametrize("folder", ["src", "tests", "experiments"])
def test_old_words_are_gone_from_the_code(folder):
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SOURCE_SUFFIXES and path.is_file()]
    assert not old_words(files)


def test_every_file_that_may_have_old_words_has_some():
    assert not [name for name in WITH_OLD_WORDS if not OLD_WORDS.search((ROOT / name).read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(rewritten(each.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit()
