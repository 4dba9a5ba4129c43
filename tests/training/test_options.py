"""Every option of a run changes something, and just what it says."""

from dataclasses import fields, replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from raytraced import build
from raytraced.tasks.images.task import ImageTask
from raytraced.tasks.task import Batch, Data
from raytraced.training.callbacks import PlainLines
from raytraced.training.config import TrainConfig, preset_values
from raytraced.training.loop import train
from raytraced.training.objective import Objective, step_seed
from raytraced.training.optim import build_optimizer, gradient_norm, learning_rate_factor
from raytraced.training.state import list_checkpoints, load_checkpoint
from training.runs import weights
from training.stripes import GRID

# Another value of each option that must lead to other weights.
CHANGES = {
    "model": "top-k",
    "model_options": GRID | {"estimator": "straight-through"},
    "data_options": {"augment": True},
    "epochs": 2,
    "batch_size": 20,
    "optimizer": "sgd",
    "lr": 1e-3,
    "lr_routing": 1e-3,
    "lr_experts": 1e-3,
    "schedule": "constant",
    "warmup": 1.0,
    "weight_decay": 0.1,
    "clip": 0.01,
    "label_smoothing": 0.1,
    "target_experts": 2.0,
    "anytime_loss": 0.5,
    "exit_loss": 0.5,
    "seed": 1,
}
# Options that must not change the weights, and where else their effect is shown.
ELSEWHERE = {
    "data": "test_cli.py",
    "data_root": "tests/data",
    "preset": "test_cli.py",
    "select": "test_a_model_is_evaluated_with_draws_where_asked",
    "patience": "test_patience_stops_early_and_keeps_the_best_weights",
    "device": "tests/cli/test_train.py",
    "threads": "test_threads_are_set",
    "precision": "test_mixed_precision.py",
    "compile": "test_mixed_precision.py",
    "strategy": "test_distributed.py",
    "runs_dir": "tests/cli/test_train.py",
    "name": "test_run_folder.py",
    "checkpoint_seconds": "test_checkpoints_are_written_by_the_clock_and_by_steps",
    "checkpoint_steps": "test_checkpoints_are_written_by_the_clock_and_by_steps",
    "tracker": "test_trackers.py",
    "quiet": "tests/cli/test_train.py",
}


def test_every_option_is_accounted_for():
    assert {field.name for field in fields(TrainConfig)} == CHANGES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_option_changes_the_weights(train_with, name):
    plain = weights(train_with(name="plain", epochs=1))
    changed = weights(train_with(**{"epochs": 1, name: CHANGES[name]}))
    same_names = plain.keys() == changed.keys()
    assert not same_names or any(not torch.equal(plain[key], changed[key]) for key in plain)


def test_learning_rates_go_to_their_groups():
    model = build("mre", image_shape=(1, 8, 8), num_classes=3, **GRID)
    optimizer = build_optimizer(model, TrainConfig(lr=0.1, lr_routing=0.2, lr_experts=0.3))
    rate_of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rates = {name: rate_of[id(parameter)] for name, parameter in model.named_parameters()}
    assert rates["layer.router.gate.weight"] == rates["layer.router.routing.gate_first"] == 0.2
    assert rates["layer.experts.weights.0"] == rates["layer.experts.biases.2"] == 0.3
    assert rates["head.weight"] == rates["input_block.linear.weight"] == 0.1


def test_cosine_falls_from_one_to_zero_and_warmup_rises_before():
    config = TrainConfig(epochs=10, warmup=2.0)
    factors = [learning_rate_factor(config, step, 5) for step in range(51)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[30] == pytest.approx(0.5)  # half-way through what is left
    assert factors[50] == pytest.approx(0)
    constant = replace(config, schedule="constant")
    assert {learning_rate_factor(constant, step, 5) for step in range(10, 51)} == {1.0}


def test_gradient_is_clipped_to_its_largest_norm_and_only_then():
    parameter = torch.nn.Parameter(torch.zeros(2))
    for largest, expected in ((None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        parameter.grad = torch.tensor([3.0, 4.0])
        assert float(gradient_norm([parameter], largest)) == 5.0
        assert parameter.grad.tolist() == pytest.approx(expected, abs=1e-5)


def test_loss_is_the_sum_of_its_parts():
    """Cross-entropy with smoothing, and one prefix a step, computed by hand from the logits."""
    model = build("mre", image_shape=(1, 8, 8), num_classes=3, **GRID)
    images, labels, rows = torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.arange(5)
    objective = Objective(model, TrainConfig(label_smoothing=0.2, anytime_loss=0.4), ImageTask())

    def cross_entropy(logits, smoothing=0.0):
        target = torch.nn.functional.one_hot(labels, 3) * (1 - smoothing) + smoothing / 3
        return -(target * logits.log_softmax(-1)).sum(-1).mean()

    asked_for = set()
    for seed in range(40):

        def answer(seed=seed, **options):
            return model(images, generator=torch.Generator().manual_seed(seed), rows=rows, **options)

        loss = objective(Batch(images, labels, rows), seed, 5).loss.item()
        out = answer()
        whole = 0.6 * cross_entropy(out.logits, 0.2)
        by_prefix = {
            k: (whole + 0.4 * cross_entropy(answer(max_experts=k).logits, 0.2)).item() for k in (0, 1, 2, 3, 4)
        }
        matching = {k for k, expected in by_prefix.items() if loss == pytest.approx(expected, rel=1e-5)}
        assert matching, (seed, loss, by_prefix)
        asked_for |= matching
    assert asked_for == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(("name", "options"), [("top-k", {"balance": 0.5}), ("multi-exit", {}), ("ada-k", {})])
def test_models_own_loss_counts_once_whatever_the_share_of_a_process(name, options):
    """Of a global batch of 8, this process of 2 has 5: sums over 8, times 2, since gradients are averaged over processes."""
    grid = {"dim": 8, "num_layers": 2} | ({} if name == "multi-exit" else GRID)
    model = build(name, image_shape=(1, 8, 8), num_classes=3, **grid, **options)
    batch = Batch(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.arange(5))
    task, seed = ImageTask(), 3
    out = model(
        batch.inputs,
        sample_loss_fn=lambda logits: torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none"),
        generator=torch.Generator().manual_seed(seed),
        rows=batch.rows,
    )
    assert out.loss is not None
    assert out.loss.item() != 0
    parts = torch.nn.functional.cross_entropy(out.logits, batch.targets) + out.loss
    loss = Objective(model, TrainConfig(), task, world_size=2)(batch, seed, 8).loss
    assert loss.item() == pytest.approx(parts.item() * 5 * 2 / 8, rel=1e-5)


def test_anytime_loss_is_refused_where_there_is_no_sequence(train_with, tmp_path):
    with pytest.raises(ValueError, match=r"anytime_loss=0\.3: model 'top-k' does not answer along a sequence"):
        train_with(model="top-k", anytime_loss=0.3, runs_dir=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()  # refused before anything is written


def test_a_target_is_refused_where_no_sequence_ends(train_with, tmp_path):
    with pytest.raises(
        ValueError, match=r"target_experts=3\.0: model 'top-k' has no activation sequence; leave target_experts out"
    ):
        train_with(model="top-k", target_experts=3.0, runs_dir=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_rehearsal_leaves_no_trace():
    """A model that counts loads in its buffers is after a rehearsal what it was before."""
    model = build("aux-free", image_shape=(1, 8, 8), num_classes=3, **GRID)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = Batch(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.arange(5))
    objective = Objective(model, TrainConfig(), ImageTask())
    objective.rehearse(batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    objective(batch, 0, 5)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_patience_stops_early_and_keeps_the_best_weights(train_with):
    run = train_with(epochs=40, patience=2, lr=1e-9)  # nothing is learnt: the first epoch stays the best
    summary = run.read_summary()
    assert summary["epochs"] == 3
    assert summary["weights"] == "best"
    kept, best = weights(run), load_file(run.best)
    assert all(torch.equal(kept[name], best[name]) for name in best)
    last = load_checkpoint(list_checkpoints(run.last)[0]).tensors
    assert any(not torch.equal(kept[name], last[f"model/{name}"]) for name in kept)


def test_checkpoints_are_written_by_the_clock_and_by_steps(train_with, monkeypatch):
    steps: list[int] = []
    monkeypatch.setattr("raytraced.training.loop.save_checkpoint", lambda _, checkpoint: steps.append(checkpoint.step))
    train_with(epochs=1)
    assert steps == [6]  # after the epoch
    steps.clear()
    train_with(name="steps", epochs=1, checkpoint_steps=4)
    assert steps == [4, 6]
    steps.clear()
    train_with(name="clock", epochs=1, checkpoint_seconds=0.0)
    assert steps == [1, 2, 3, 4, 5, 6, 6]


def test_threads_are_set(train_with):
    try:
        train_with(epochs=0, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_data_options_set_the_size_of_a_folders_images(config, no_pictures, tmp_path):
    for number in range(12):
        folder = tmp_path / "own" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (10, 10), color=20 * number).save(folder / f"{number}.png")
    run = train(replace(config, data=str(tmp_path / "own"), data_options={"size": 9}, epochs=0))
    assert weights(run)["input_block.linear.weight"].shape[1] == 81
    with pytest.raises(ValueError, match=r"data option siez: .* did you mean size\?"):
        train(replace(config, data_options={"siez": 9}))
    with pytest.raises(ValueError, match="data option augment='yes': must be true or false"):
        train(replace(config, data_options={"augment": "yes"}))


def test_seeds_of_steps_are_strangers():
    seeds = {step_seed(seed, step) for seed in range(20) for step in range(500)}
    assert len(seeds) == 20 * 500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_presets_name_options_that_exist():
    names = {field.name for field in fields(TrainConfig)}
    for preset in ("best", "paper", "quick"):
        for data in ("digits", "mnist", "cifar10"):
            for model in ("mre", "mre-paper", "top-k"):
                assert preset_values(preset, data, model).keys() <= names


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("epochs", -1, "must be at least 0"),
        ("batch_size", 0, "must be at least 1"),
        ("patience", 0, "must be at least 1"),
        ("checkpoint_steps", 0, "must be at least 1"),
        ("weight_decay", -0.1, "must be at least 0"),
        ("seed", 2**63, "must be below"),
        ("lr", 0.0, "must be positive and finite"),
        ("clip", float("inf"), "must be positive and finite"),
        ("lr_experts", float("nan"), "must be positive and finite"),
        ("label_smoothing", 1.0, "must lie in 0 … 1"),
        ("anytime_loss", 1.5, "must lie in 0 … 1"),
        ("exit_loss", -0.5, "must lie in 0 … 1"),
        ("warmup", 41.0, "must not exceed epochs=40"),
        ("name", "a/b", "must be a plain folder name"),
        ("name", "", "must be a plain folder name"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_value_and_rule(name, value, rule):
    with pytest.raises(ValueError, match=rule) as error:
        TrainConfig(**{name: value})
    assert str(error.value).startswith(f"{name}={value!r}: ")


def test_a_model_is_evaluated_with_draws_where_asked(train_with):
    options = {"epochs": 2, "model_options": GRID | {"output_logit_offset": 0.0}}
    runs = {select: train_with(name=select, select=select, **options) for select in ("greedy", "sample")}
    assert all(torch.equal(one, weights(runs["sample"])[name]) for name, one in weights(runs["greedy"]).items())
    greedy, drawn = (run.read_summary()["test"]["mean_experts"] for run in runs.values())
    assert greedy != drawn


@pytest.mark.parametrize(("num_samples", "size"), [(20, 8), (155, 8), (256, 16), (1000, 32), (4096, 256), (10**6, 256)])
def test_batch_size_of_custom_data_follows_from_the_number_of_samples(num_samples, size):
    data = Data("own", range(num_samples), range(2), range(2))
    assert ImageTask().choose_batch_size(data) == size


def test_batch_size_is_chosen_and_reported_only_where_the_user_gave_none(config, no_pictures, capsys):
    for given, expected in ((None, 8), (16, 16)):
        run = train(replace(config, batch_size=given, epochs=1, name=f"size-{given}"), None, PlainLines())
        assert run.config.batch_size == expected
        assert run.read_metrics()[0]["step"] == -(-87 // expected)
        chosen = f"batch_size={expected}: chosen for 87 training images; --batch-size sets another"
        assert (chosen in capsys.readouterr().out) == (given is None)


def test_presets_leave_the_batch_size_of_custom_data_open(data_file):
    assert preset_values("best", str(data_file), "mre")["batch_size"] is None
    assert preset_values("best", "mnist", "mre")["batch_size"] == 256
    assert preset_values("best", "digits", "mre")["batch_size"] == 64
    assert preset_values("paper", str(data_file), "mre-paper")["batch_size"] == 256
