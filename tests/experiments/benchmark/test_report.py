import json

import pytest

from experiments.benchmark import report
from experiments.benchmark.results import Outcome, ResultsFile
from experiments.benchmark.timing import Contender, Timings

MACHINE = {"processor": "a processor", "cores": 2, "images": "mnist"}


@pytest.fixture
def content(tmp_path):
    file = ResultsFile(tmp_path / "results.json", MACHINE, {"code": "1", "settings": {}})
    mre, top2 = Contender("mre | x", list, 2, experts=5.25), Contender("top-k", list, experts=8)
    file.add("step", Outcome([Timings({mre.name: [3.0] * 3, top2.name: [2.0, 2.5, 3.0]}).row(mre, top2)]), 1.0, 0.01)
    fast = Contender("drawn", list)
    same = {"the same draws": True, "rates within 1e-6": False}
    file.add("sequence", Outcome([Timings({"drawn": [0.1], "top-k": [8.0]}).row(fast, top2)], same), 1.0, 0.43)
    missing = {"what": "ours", "against": "a peer", "ratio": None}
    note = {"note": "not installed (no module): pip install '.[bench]'"}
    file.add("peers", Outcome([missing | note]), 1.0, None)
    file.add("memory", Outcome([{"what": "x", "against": "y", "ratio": 0.5, "mb": 2.0, "against_mb": 4.0}]), 1.0, None)
    return file.content


def lines_of(tmp_path, start):
    return [line for line in (tmp_path / "results.md").read_text().splitlines() if line.startswith(start)]


def test_the_report_is_written_from_the_json_alone(content, tmp_path):
    report.write(json.loads((tmp_path / "results.json").read_text()), tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "processor: a processor; cores: 2; images: mnist." in text
    row = "| step | mre \\| x | top-k | 1.2 | 1.1 … 1.35 | 3000 ms | 2500 ms | 2 | 5.25 against 8 |"
    assert lines_of(tmp_path, "| step") == [row]
    assert lines_of(tmp_path, "| memory") == ["| memory | x | y | 0.5 |  | 2 MB | 4 MB | 1 | – against – |"]
    assert (tmp_path / "ratios.png").stat().st_size > 5000
    assert "](ratios.png)" in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_a_missing_peer_stands_in_the_table_with_the_command_that_installs_it(content, tmp_path):
    report.write(content, tmp_path)
    (row,) = lines_of(tmp_path, "| peers")
    assert row.startswith("| peers | ours | a peer | – | not installed (no module): pip install '.[bench]' |")


def test_figures_taken_on_a_loaded_machine_say_so_in_file_and_terminal(content, tmp_path):
    report.write(content, tmp_path)
    said = "measured while other processes took 43% of the cores"
    assert said in lines_of(tmp_path, "- **sequence**")[0]
    assert said in report.text("sequence", content["workloads"]["sequence"])
    assert "other processes" not in lines_of(tmp_path, "- **step**")[0]


def test_the_report_says_whether_both_sides_computed_the_same(content, tmp_path):
    report.write(content, tmp_path)
    assert "the same draws: yes; rates within 1e-6: **no**" in lines_of(tmp_path, "- **sequence**")[0]


def test_figures_of_other_code_say_so(content, tmp_path):
    content["workloads"]["step"]["measured"]["code"] = "0"
    report.write(content, tmp_path)
    assert "measured with other code" in lines_of(tmp_path, "- **step**")[0]
    assert "other code" not in lines_of(tmp_path, "- **memory**")[0]


def test_a_small_ratio_is_shown_as_its_inverse_too(content):
    assert "drawn ÷ top-k: 0.0125 (1/80)" in report.text("sequence", content["workloads"]["sequence"])
