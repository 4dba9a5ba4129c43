"""A new router is one new file and one line in MODELS: it is then built, trained, saved, loaded and costed as all others."""

from pathlib import Path

import pytest
import torch

import raytraced
from raytraced import routers
from raytraced.cli.models import models
from raytraced.cost import measure, num_parameters
from raytraced.models.registry import GRID, MODELS, ModelInfo
from raytraced.training.config import TrainConfig
from raytraced.training.loop import train


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(
        routers, "__path__", [*routers.__path__, str(Path(__file__).parent)]
    )  # as if the file lay there
    monkeypatch.setitem(MODELS, "coin", ModelInfo("routers.coin:Coin", GRID, "a toss"))


def test_it_is_trained_saved_loaded_and_costed(tmp_path):
    config = TrainConfig(
        model="coin", model_options={"dim": 8, "kept": 0.75}, epochs=1, batch_size=256, runs_dir=str(tmp_path)
    )
    run = train(config, callbacks=())
    (epoch,), summary = run.read_metrics(), run.read_summary()
    # One of 8 experts in each of 4 layers, for three quarters of the samples: 3 ± 0.1 is five standard errors of 1,300.
    assert epoch["train_experts"] == pytest.approx(4 * 0.75, abs=0.1)
    assert epoch["validation_experts"] == summary["test"]["mean_experts"] == 32
    model = raytraced.load(run.path)
    assert (model.name, model.card.options["kept"]) == ("coin", 0.75)
    assert type(model.layer.router).__name__ == "Coin"
    raytraced.save(model, tmp_path / "again.safetensors")
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(raytraced.load(tmp_path / "again.safetensors")(images).logits, model(images).logits)
    cost = measure(model, images)
    assert cost.used_parameters == cost.parameters == num_parameters(model)
    assert cost.macs == 64 * 8 + 32 * 3 * 64 + 80 == summary["test"]["macs"]["total"]
    assert cost.routing_macs == 0


def test_it_is_listed_and_its_options_are_checked(capsys):
    models("digits")
    assert "\ncoin " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"kept=0\.0: must lie in 0 … 1 \(0 excluded\)"):
        raytraced.build("coin", image_shape=(1, 8, 8), num_classes=10, kept=0.0)
    with pytest.raises(ValueError, match=r"model option keep: coin has no such option; did you mean kept\?"):
        raytraced.build("coin", image_shape=(1, 8, 8), num_classes=10, keep=0.5)
    with pytest.raises(ValueError, match=r"model=con: no such model; did you mean coin\?"):
        raytraced.build("con", image_shape=(1, 8, 8), num_classes=10)


def test_it_draws_by_row_and_leaves_padding_out_like_every_router():
    layer = raytraced.build("coin", image_shape=(1, 8, 8), num_classes=10).layer
    hidden, rows, mask = torch.randn(30, 2, 16), torch.arange(60).view(30, 2), torch.rand(30, 2) < 0.7

    def active(part, **options):
        return layer(hidden[part], generator=torch.Generator().manual_seed(1), rows=rows[part], **options).route.active

    whole = active(slice(None))
    assert torch.equal(active(slice(10, 17)), whole[10:17])
    assert torch.equal(active(slice(None), mask=mask), whole * mask[..., None, None])
