"""What was tried on a recipe: each row is one change, and each page is that of the records."""

from collections.abc import Iterator

import pytest

from experiments import BENCHMARKS
from experiments.depth import STUDIES, image_table, text_table
from experiments.reproduce.plan import Run
from raytraced.models.registry import build

TABLES = {"text": text_table, "images": image_table}
CASES = [(study, name) for study, one in STUDIES.items() for name in one.changes]


def test_the_runs_of_each_study_differ_from_its_first_in_their_change_alone():
    for study in STUDIES.values():
        for _, base, run, name in pairs(study):
            options, training = study.changes[name]
            assert options or training
            ours, theirs = (one.public_config for one in (run, base))
            changed = {key for key in ours if ours[key] != theirs[key]}
            assert changed == {*training, *(["model_options"] if options else [])}, name
            assert run.config.model_options == base.config.model_options | options


def pairs(study) -> Iterator[tuple[str, Run, Run, str]]:
    """Each run with a change, beside the run without one on the same data with the same seed."""
    runs = study.runs()
    first = {(one.data, one.seed): one for one in runs if one.family == next(iter(study.changes))}
    for run in runs:
        base = first[run.data, run.seed]
        if run is not base:
            yield run.data, base, run, run.family


@pytest.mark.parametrize(("study", "name"), CASES)
def test_a_model_with_each_change_is_built(study, name):
    run = next(one for one in STUDIES[study].runs() if one.family == name)
    shape = {"context": 64} if study == "text" else {"image_shape": (1, 28, 28), "num_classes": 10}
    model = build(run.config.model, **shape, **run.config.model_options)
    assert model.layer.experts.num_experts == (16 if study == "text" else 8)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_is_that_of_the_records(name):
    study = STUDIES[name]
    lines = TABLES[name](study).lines()
    assert len(lines) == 2 + len(study.changes)
    assert "\n".join(lines) in (BENCHMARKS / f"{study.name}.md").read_text(encoding="utf-8")
