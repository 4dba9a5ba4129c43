"""Every code block and command of README.md and docs/ works, every link leads somewhere, every table of options is true.

`python tests/test_docs.py` writes the tables that follow from the code or from results/ anew.
"""

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from docstring_parser import parse_from_object
from PIL import Image

from raytraced.cli import COMMANDS, find_command, main, read_arguments
from raytraced.models.table import FAMILIES, MODELS, complete_options
from raytraced.reproduce.records import Record, Store, spread
from raytraced.reproduce.tables import ACCURACY, USE, gain_over_fixed
from raytraced.reproduce.text import tell_bits
from raytraced.reproduce.variants import DATA_NAMES
from raytraced.training.config import TrainConfig, preset_values

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.name for page in PAGES]
LANGUAGES = ("python", "bash", "text")  # text is what a command prints, or a file's content
WIDTH = 100
pytestmark = pytest.mark.skipif("RAYTRACED_OPERATIONS" in os.environ, reason="pages are run once, as a reader would")
PLACEHOLDERS = {
    "NAME": "mnist",
    "FOLDER": "folder/of/classes",
    "FILE": "own.txt",
}  # RUN and image.png are made by a fixture


TEXT_RUN = (
    "--data", "shakespeare", "--model", "gpt-mre", "--data_options", "{context: 16, steps: 2, judged: 256}",
    "--model_options", "{dim: 8, num_heads: 2, hidden: 8, num_layers: 2, num_experts: 2}",
)  # fmt: skip


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    text: str


def read_blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, each.start()) + 1, each[1], each[2]) for each in found]


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> list[str]:
    """The command lines of a page: those of its blocks, and those between backticks in its sentences."""
    shell = [block.text.replace("\\\n", " ") for block in read_blocks(text) if block.language == "bash"]
    blocks = [line for block in shell for line in block.splitlines()]
    inline = re.findall(r"`((?:raytraced|make|torchrun|python) [^`]+)`", without_blocks(text).replace("\n", " "))
    mentioned = [f"raytraced {name}" for name in COMMANDS]  # by its name alone
    lines = [*blocks, *(line for line in inline if line not in mentioned)]
    return [command for line in lines for command in split_line(line)]


def split_line(line: str) -> list[str]:
    """What a shell would run one after the other, without comments."""
    words = shlex.shlex(line, posix=False, punctuation_chars=";")
    words.whitespace_split, words.commenters = True, "#"
    parts = groupby(words, key=lambda word: word == ";")
    return [" ".join(part) for is_separator, part in parts if not is_separator]


# Each command once, with the page that has it last.
COMMAND_LINES = {command: page.name for page in PAGES for command in commands_of(page.read_text(encoding="utf-8"))}


@pytest.fixture(scope="session")
def things(tmp_path_factory) -> Path:
    """What the pages speak of: a finished run, an image, a folder with a folder of images for each class."""
    folder = tmp_path_factory.mktemp("docs")
    random = np.random.default_rng(0)
    for number in range(12):
        path = folder / "folder/of/classes" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    shutil.copy(path, folder / "image.png")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        # large batches: a page goes on with this run for 60 epochs
        assert main(["train", "--epochs", "1", "--batch-size", "512", "--quiet", "--output", ".", "--name", "RUN"]) == 0
        assert main(["train", *TEXT_RUN, "--epochs", "1", "--quiet", "--output", ".", "--name", "plays"]) == 0
    return folder


@pytest.fixture
def workplace(things, tmp_path, monkeypatch) -> Path:
    """A folder of one's own with all of that."""
    shutil.copytree(things, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def as_before(monkeypatch, tmp_path) -> Iterator[None]:
    """Whatever a page adds to the package, in tables and in files, is gone afterwards."""
    from raytraced.operations import OPERATIONS
    from raytraced.tasks.images.catalog import CATALOG
    from raytraced.tasks.table import TASKS

    tables = [(table, dict(table)) for table in (MODELS, FAMILIES, TASKS, CATALOG)]
    for operation in OPERATIONS.values():
        monkeypatch.setattr(operation, "implementations", operation.implementations)
    yield
    for table, before in tables:
        table.clear()
        table.update(before)
    for name, module in list(sys.modules.items()):
        if tmp_path in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_python_of_a_page_runs_from_top_to_bottom(name, workplace, as_before, monkeypatch):
    page = PAGES[NAMES.index(name)]
    namespace = {"__name__": "page"}
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.language != "python":
            continue
        if file := re.match(r"# src/raytraced/([\w/]+)/(\w+\.py)\n", block.text):  # a new file, as if it lay there
            (workplace / file[2]).write_text(block.text)
            package = import_module(f"raytraced.{file[1].replace('/', '.')}")
            monkeypatch.setattr(package, "__path__", [*package.__path__, str(workplace)])
        else:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
            for expression, shape in re.findall(r"^(\w[^\s=]*) +# (\([\d, ]+\))", block.text, re.MULTILINE):
                value = eval(expression, namespace)
                assert str(tuple(getattr(value, "shape", value))) == shape, expression


@pytest.mark.parametrize("command", COMMAND_LINES, ids=[f"{page}: {line}" for line, page in COMMAND_LINES.items()])
def test_command_of_a_page_is_one(command, workplace, monkeypatch):
    for name in ("draw_pictures", "write_event"):  # would take longer than the training
        monkeypatch.setattr(f"raytraced.training.loop.{name}", lambda *_: None)
    run_command([PLACEHOLDERS.get(word, word) for word in shlex.split(command) if word != "…"])


def run_command(words: list[str]) -> None:
    """Run a command that takes seconds, read any other to its end."""
    while re.match(r"[A-Z_]+=", words[0]):  # the environment
        words = words[1:]
    program, *rest = words
    if program == "raytraced":
        run_or_read(rest)
    elif program == "make":
        target, *variables = rest
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"
        for variable in variables:
            run_or_read([target, *shlex.split(variable.removeprefix("ARGS="))])
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        read = get_args_parser().parse_args(rest)
        assert (read.module, read.training_script) == (True, "raytraced.cli")
        run_or_read(read.training_script_args, only_read=True)
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), rest[0]
    else:
        pytest.fail(f"{program}: this test does not know the program; teach it")


def run_or_read(words: list[str], only_read: bool = False) -> None:
    """Run a command of ours in small: training for one epoch, reproduction as a plan; or read its words to the end."""
    if not words or words[0].startswith("-") or {"--help", "--print_config"} & {*words}:
        assert code_of(words) == 0
        return
    name, rest = find_command(words)
    if name is None:
        assert code_of(words) == 0
        return
    read = read_arguments(name, COMMANDS[name].function, rest)
    if only_read or not takes_seconds(name, read):
        return
    small = {"train": ["--epochs", "1", "--quiet"], "reproduce": ["--dry-run"]}
    assert code_of(words + small.get(name, [])) == 0


def takes_seconds(name: str, read: dict) -> bool:
    """Whether a command needs neither minutes nor a data set that may not be there; refuses words that lead nowhere."""
    if name == "train":
        config = read["config"]
        complete_options(config.model, config.model_options)
        return config.data == "digits" or Path(config.data).exists()
    if name == "benchmark":
        from raytraced.benchmark.results import chosen

        chosen(read["only"])
        return False
    if name == "data get":
        from raytraced.tasks.table import catalog

        assert set(read["names"]) <= set(catalog()), read["names"]
        return False
    if name == "serve":
        return False  # until it is told to end
    if name == "data show":
        return read["name"] == "digits" or Path(read["name"]).exists()
    if name == "export":
        return False
    if name == "evaluate":
        return read["run"] in ("RUN", "mre-digits") and read["data"] is None
    return True


def code_of(words: list[str]) -> int:
    """The exit code of a command; what it prints is shown where a test fails."""
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
            assert not re.search(r"^(raytraced|make|torchrun) ", block.text, re.MULTILINE), f"line {block.line}: bash"
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
    for path in re.findall(r"`((?:src|tests|docs|results|benchmarks)/[\w./-]+)`", text):
        made = ("results/quick", "results/runs", "benchmarks/quick", "benchmarks/gpu")  # by a command
        assert (ROOT / path).exists() or path.rstrip("/") in made, path
    for dotted in re.findall(r"`raytraced((?:\.\w+)+)", text):
        find_name(dotted)


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
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


# Tables that follow from the code or from results/, between a comment that says so and <!-- end -->.


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
    """What MRE gives when it is trained for fewer or more experts, from the runs in results/."""
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
    """The paper's tables beside the runs of mre-paper in results/."""
    summary, rows = json.loads((ROOT / "results/summary.json").read_text()), [["the paper"], ["`mre-paper`"]]
    for data, (_, _, experts) in USE.items():
        found, (accuracy, deviation) = summary[data]["mre-paper"], ACCURACY["mre-paper"][data]
        rows[0].append(f"{accuracy} ± {deviation}, {experts}")
        ours = f"{100 * found['accuracy_mean']:.1f} ± {100 * found['accuracy_std']:.1f}"
        rows[1].append(f"{ours}, {found['experts_mean']:.1f}")
    head = ["test images", *(DATA_NAMES[data] for data in USE)]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


AIMS = {"mnist": "97.3, 1.6", "fashion-mnist": "88.2, 2.2", "cifar10": "65.0, 2.5", "union": "76.3, 3"}


def aims_table() -> list[str]:
    """What benchmarks/aims.md asks for, and what the records say."""
    store = Store(ROOT / "results/records")
    ranks = {row.split("|")[1].strip(): row.split("|")[2:4] for row in difficulty_rows()}
    head = [
        "",
        "to the end",
        "stopped when sure",
        "aim",
        "against one depth",
        "against eight dense blocks",
        "rank, sure",
    ]
    rows = [[*head, "rank, own end"], ["---"] * 8]
    for data, aim in AIMS.items():
        ours, dense = (
            [store.records[f"main-{data}-{name}-s{seed}"] for seed in range(5)] for name in ("mre", "dense-8-sure")
        )
        points = [one.sure["points"][1] for one in ours]
        assert {point["within"] for point in points} == {0.1}
        whole = f"{100 * spread(one.accuracy for one in ours).mean:.2f}, {spread(one.experts for one in ours).mean:.2f}"
        stopped = [spread(point[name] for point in points).mean for name in ("accuracy", "experts")]
        gains = [100 * gain_over_fixed(one.sure, 0.1) for one in ours]
        told = [in_points(gains), in_points(points_ahead(ours, dense))]
        rank = [cell.strip() for cell in ranks[DATA_NAMES[data]]]
        rows.append([DATA_NAMES[data], whole, f"{100 * stopped[0]:.2f}, {stopped[1]:.2f}", aim, *told, *rank])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def in_points(values: list[float]) -> str:
    """The mean over seeds and its standard error."""
    one = spread(values)
    return f"{one.mean:+.2f} ± {one.std / one.num**0.5:.2f}"


def points_ahead(ours: list[Record], rival: list[Record]) -> list[float]:
    """Seed by seed: ours, stopped within 0.1 points, above the line through the other's points at the same multiply-adds."""
    ahead = []
    for one, other in zip(ours, rival, strict=False):
        point = one.sure["points"][1]
        line = sorted((row["macs"], row["accuracy"]) for row in other.sure["points"])
        ahead.append(100 * (point["accuracy"] - np.interp(point["macs"], *zip(*line, strict=True))))
    return ahead


def exits_table() -> list[str]:
    """Ours against everyone else who was trained to be stopped, at our multiply-adds."""
    store, rivals = Store(ROOT / "results/records"), ("dense-4", "dense-8", "multi-exit", "top-1", "top-k", "threshold")
    rows = [["MRE against", *rivals], ["---"] * (1 + len(rivals))]
    for data in AIMS:
        seeds = {label: [store.records.get(f"main-{data}-{label}-s{seed}") for seed in range(5)] for label in
                 ("mre", *(f"{rival}-sure" for rival in rivals))}  # fmt: skip
        known = {label: [one for one in found if one is not None] for label, found in seeds.items()}
        rows.append(
            [DATA_NAMES[data], *(in_points(points_ahead(known["mre"], known[f"{rival}-sure"])) for rival in rivals)]
        )
    return [f"| {' | '.join(cells)} |" for cells in rows]


def text_table() -> list[str]:
    """Bits a byte of every language model in results/text, the cheapest first."""
    summary = json.loads((ROOT / "results/text/summary.json").read_text(encoding="utf-8"))
    head, rule = ["", "experts", "multiply-adds"], ["---", "---:", "---:"]
    rows = [[*head, *(DATA_NAMES[data] for data in summary)], [*rule, *["---:"] * len(summary)]]
    first = next(iter(summary.values()))
    for label in sorted(first, key=lambda label: first[label]["macs_mean"]):
        found = [summary[data].get(label) for data in summary]
        bits = ["–" if one is None else f"{tell_bits(one)} ({one['seeds']})" for one in found]
        experts, macs = first[label]["experts_mean"], first[label]["macs_mean"] / 1000
        rows.append([f"`{label}`", f"{experts:.1f}", f"{macs:.0f}", *bits])
    return [f"| {' | '.join(cells)} |" for cells in rows]


def difficulty_rows() -> list[str]:
    """The rows of the table in benchmarks/difficulty.md."""
    lines = (ROOT / "benchmarks/difficulty.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ")][2:]


def readme_table() -> list[str]:
    """What `raytraced reproduce` wrote for README."""
    return (ROOT / "results/table.md").read_text(encoding="utf-8").splitlines()


WRITTEN = {
    "<!-- results/table.md -->\n": readme_table,
    "<!-- options: python tests/test_docs.py writes this table -->\n": options_table,
    "<!-- reading: python tests/test_docs.py writes this table -->\n": reading_table,
    "<!-- aims: python tests/test_docs.py writes this table -->\n": aims_table,
    "<!-- exits: python tests/test_docs.py writes this table -->\n": exits_table,
    "<!-- text: python tests/test_docs.py writes this table -->\n": text_table,
    "<!-- targets: python tests/test_docs.py writes this table -->\n": target_table,
}


def rewritten(text: str) -> str:
    """A page with its written tables as they should be now."""
    for start, make in WRITTEN.items():
        before, found, rest = text.partition(start)
        if found:
            text = before + start + "\n".join([*make(), "<!-- end -->"]) + rest.partition("<!-- end -->")[2]
    return text


@pytest.mark.parametrize("name", NAMES)
def test_written_tables_are_up_to_date(name):
    text = PAGES[NAMES.index(name)].read_text(encoding="utf-8")
    assert text == rewritten(text), "run `python tests/test_docs.py`"


def test_every_written_table_is_in_a_page():
    together = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(together.count(start) == 1 for start in WRITTEN)


def table_rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_arguments_of_the_layer_are_those_of_its_class():
    from raytraced import RaytracedExperts

    told = {name.strip("`"): default.strip("`") for name, default, _ in table_rows("layer.md", "argument")}
    known = inspect.signature(RaytracedExperts).parameters.values()
    shown = {one.name: "" if one.default is one.empty else str(one.default) for one in known}
    assert told == shown


def test_table_of_models_is_that_of_the_code():
    rows = {row[0].strip("`"): row[1:] for row in table_rows("models.md", "name")}
    assert list(rows) == list(MODELS)
    for name, (_, options, adaptive, anytime) in rows.items():
        assert (adaptive, anytime) == tuple(
            "yes" if flag else "" for flag in (MODELS[name].adaptive, MODELS[name].anytime)
        )
        defaults = complete_options(name, {})
        for option, value in re.findall(r"`(\w+)=([^`]+)`", options):
            assert str(defaults[option]) == value, (name, option)


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(rewritten(each.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit()
