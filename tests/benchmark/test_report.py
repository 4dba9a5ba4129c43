import json

import pytest

from raytraced.benchmark import report
from raytraced.benchmark.outcome import Check, Outcome
from raytraced.benchmark.results import ResultsFile

MACHINE = {
    "processor": "a processor", "instructions": ["avx2"], "cores": 2, "memory_gb": 8, "system": "Linux x86_64",
    "python": "3", "torch": "2", "torch_instructions": "AVX2", "blas": "mkl", "kernels": "avx2",
}  # fmt: skip
TIME = {"median_ms": 2.0, "quartiles_ms": [1.0, 3.0], "samples": 3, "threads": 1}
ROW = {
    "layers": 2, "experts_a_layer": 4, "steps": 3.0, "active": 2.0, "active_in_training": 2.0, "training_us": 2.0,
    "inference_held_us": 1.0, "whole_grid_work_in_training": 10.0,
}  # fmt: skip


@pytest.fixture
def content(tmp_path):
    results = ResultsFile(tmp_path / "results.json", MACHINE, {"code": "1", "settings": [1]})
    results.add("c", Outcome([Check("step | x", 1.5, 1.1, "at most", (1.4, 1.6), "9.0 experts")]), 1.0)
    peers = Outcome(
        [Check("ours ÷ p", 0.5, 1.0, "below"), Check("ours ÷ q", None, 1.0, "below", note="not installed")],
        {"times": {"ours, 16→16": TIME, "p, eager, 16→16": TIME, "p, grouped, 16→16": TIME}},
    )
    results.add("g", peers, 1.0)
    table = [
        ROW | {"grid": f"2×{n}", "inference_us": n**2, "training_us": n**3, "whole_grid_work": n**3,
               "whole_grid_work_in_training": n**3, "active_work": n**2}
        for n in (4, 8)
    ]  # fmt: skip
    exponents = dict.fromkeys(
        ("inference against T·L·N³", "inference against the multiply-adds of active nodes", "training against T·L·N³"),
        0.5,
    )
    results.add("j", Outcome([Check("exponent", 0.5, 0.8, "at most")], {"table": table, "exponents": exponents}), 1.0)
    return results.content


def test_the_table_tells_value_bar_and_verdict(content):
    rows = {row[0]: row for row in report.rows(content)}
    assert rows["c"][2:] == ("1.5", "at most 1.1", "**no**", "step | x")
    assert rows["g"][2:] == ("not measured", "below 1", "**no**", "ours ÷ q")
    assert rows["j"][4] == "yes"


def test_the_report_is_written_from_the_json_alone(content, tmp_path):
    again = json.loads((tmp_path / "results.json").read_text())
    report.write(again, tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "| c | step \\| x | 1.5 | 1.4 … 1.6 | at most 1.1 | **no** | 9.0 experts |" in text
    assert "a processor, 2 cores (avx2)" in text
    for plot in ("bars.png", "peers.png", "growth.png"):
        assert (tmp_path / plot).stat().st_size > 5000
        assert f"]({plot})" in text


def test_a_plot_without_its_bar_is_left_out(content, tmp_path):
    del content["bars"]["g"]
    report.write(content, tmp_path)
    assert not (tmp_path / "peers.png").exists()
    assert (tmp_path / "bars.png").exists()
