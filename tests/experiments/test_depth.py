"""What was tried on a recipe: each row is one change, and each page is that of the records."""

from collections.abc import Iterator

import pytest
import torch

from experiments import BENCHMARKS, path_routers
from experiments.depth import STUDIES, image_table, text_table
from experiments.reproduce.plan import Run
from raytraced import plugins
from raytraced.models.registry import build
from raytraced.router import Call

TABLES = {"text": text_table, "images": image_table}
CASES = [(study, name) for study, one in STUDIES.items() for name in one.changes]


def test_the_runs_of_each_study_differ_from_its_first_in_their_change_alone():
    for study in STUDIES.values():
        for _, base, run, name in pairs(study):
            options, training = study.changes[name]
            assert options or training
            ours, theirs = (one.public_config for one in (run, base))
            changed = {key for key in ours if ours[key] != theirs[key]}
            if "model" in options:
                assert changed - {"model_options"} == {"model", *training}
                assert run.config.model == options["model"]
                continue
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


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The routers of the study, known during a test alone."""
    monkeypatch.setitem(plugins._registered, "router", dict(plugins._registered["router"]))
    path_routers.register()


@pytest.mark.parametrize(("study", "name"), CASES)
def test_a_model_with_each_change_is_built(study, name):
    run = next(one for one in STUDIES[study].runs() if one.family == name)
    shape = {"image_shape": (1, 28, 28), "num_classes": 10} if study == "images" else {"context": 64}
    model = build(run.config.model, **shape, **run.config.model_options)
    assert model.layer.experts.num_experts == (8 if study == "images" else 16)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_is_that_of_the_records(name):
    study = STUDIES[name]
    lines = TABLES[name](study).lines()
    assert len(lines) == 2 + len(study.changes)
    assert "\n".join(lines) in (BENCHMARKS / f"{study.name}.md").read_text(encoding="utf-8")


def make_router(name: str, **options):
    torch.manual_seed(0)
    return path_routers.ROUTERS[name](6, 3, 4, **options)


@pytest.mark.parametrize("name", path_routers.ROUTERS)
def test_another_router_learns_and_its_weights_are_those_of_active_experts(name):
    router = make_router(name).eval()
    hidden = torch.randn(50, 6)
    choice = router.plan(hidden, Call())
    assert choice.active.shape == choice.weights.shape == (50, 3, 4)
    assert set(choice.active.unique().tolist()) == {0.0, 1.0}
    assert (choice.weights[choice.active == 0] == 0).all()
    assert choice.weights.amax(-1)[choice.active.sum(-1) > 0].sub(2.0).abs().max() < 1e-5  # relative, times 2
    (choice.weights * torch.randn(50, 3, 4)).sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in router.parameters())


def test_rates_within_a_layer_are_compared_with_its_largest():
    hidden = torch.randn(200, 6)
    few, many = (make_router("within-layer", share=share).plan(hidden, Call()).active for share in (0.9, 0.1))
    assert (few.sum(-1) >= 1).all()  # the largest is active
    assert many.sum() > few.sum()


def test_gates_of_the_last_layer_keep_the_sum_of_the_rates():
    torch.manual_seed(0)
    network = path_routers.LastLayerGates(3, 4, 0.0)
    entry, active = torch.rand(50, 4).softmax(-1), (torch.rand(50, 3, 4) < 0.5).float()
    rates = network(entry, active)
    total = (rates.nodes * (1 - active)).sum((1, 2)) + rates.output
    assert torch.allclose(total, torch.ones(50), atol=1e-6)
    plain = super(path_routers.LastLayerGates, network).forward(entry, active)
    some_go_on = (
        (active[:, -1].sum(-1) > 0) & (active[:, -1].sum(-1) < 4) & (plain.nodes[:, -1] * active[:, -1]).sum(-1).gt(0)
    )
    assert some_go_on.any()
    assert (rates.output[some_go_on] < plain.output[some_go_on]).all()


@pytest.mark.parametrize("k", [1.0, 3.0])
def test_moving_thresholds_move_the_load_towards_their_mean(k):
    """A fresh router runs about two of four; it must come down to one and go up to three."""
    router = make_router("moving-thresholds", k=k, update_rate=0.05).train()
    hidden = torch.randn(500, 6)
    before = router.plan(hidden, Call()).active.sum(-1).mean()
    for _ in range(200):
        after = router.plan(hidden, Call()).active.sum(-1).mean()
    assert 1.5 < before < 2.6
    assert abs(after - k) < 0.3
