"""What was tried on the decoder: each row is one change, and the page is that of the records."""

import pytest

from experiments import BENCHMARKS
from experiments.depth import CHANGES, make_runs, make_table, read_records
from raytraced.models.registry import build

BASE = "as in the comparison"


def test_each_run_differs_from_the_first_in_its_change_alone():
    base, *others = make_runs()
    assert base.family == BASE
    for run in others:
        options, training = CHANGES[run.family]
        assert options or training
        ours, theirs = (one.public_config for one in (run, base))
        changed = {name for name in ours if ours[name] != theirs[name]}
        assert changed == {*training, *(["model_options"] if options else [])}, run.family
        assert run.config.model_options == base.config.model_options | options


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_with_each_change_is_built(name):
    (run,) = [one for one in make_runs() if one.family == name]
    model = build(run.config.model, context=64, **run.config.model_options)
    assert model.layer.experts.num_experts == 16


def test_the_page_is_that_of_the_records():
    lines = make_table(read_records(BENCHMARKS / "depth")).lines()
    assert len(lines) == 2 + len(CHANGES)
    assert "\n".join(lines) in (BENCHMARKS / "depth.md").read_text(encoding="utf-8")
