import json
import os
import subprocess
import sys

import pytest

from raytraced.benchmark import commands, expert_bars, sequence_bars
from raytraced.benchmark.peers import Peer, open_peer
from raytraced.benchmark.timing import QUICK
from raytraced.benchmark.workloads import (
    PAPER_EXPERT,
    Bench,
    ExpertSize,
    LayerStep,
    TrainingStep,
    new_model,
    top2_layer,
)

TINY = QUICK._replace(rounds=2, least_rounds=1, seconds=0.001, sample_seconds=0.0, latencies=4, train_steps=2)


@pytest.mark.parametrize(("only", "letters"), [("", "abcdefghijkl"), ("c,a", "ac"), ("AC", "ac"), ("a, b", "ab")])
def test_bars_are_chosen_by_letters(only, letters):
    assert "".join(commands.chosen_letters(only)) == letters


def test_an_unknown_letter_is_refused():
    with pytest.raises(ValueError, match=r"only=a,z: 'z' is no bar; must be letters of a to l, such as a,c"):
        commands.benchmark(only="a,z")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output=.*file.*: .* is a file; name a folder"):
        commands.benchmark(output=str(tmp_path / "file"))


def test_the_command_module_does_not_import_torch():
    code = "import sys, raytraced.benchmark.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ""}).returncode == 0


def test_end_to_end_at_tiny_size(tmp_path, capsys):
    """Two bars for real: on models, and in processes of their own."""
    assert commands.run(["a", "h"], tmp_path, TINY, fresh=False) == 0
    saved = json.loads((tmp_path / "results.json").read_text())
    assert {"processor", "instructions", "torch", "kernels"} <= set(saved["machine"])
    for letter in "ah":
        bar = saved["bars"][letter]
        assert set(bar) == {"value", "bar", "holds", "detail"}
        assert bar["value"] > 0
        assert saved["samples"][letter]
    equality = saved["bars"]["a"]["detail"]["equality"]
    assert all(entry["draws_equal"] for entry in equality.values())
    assert saved["bars"]["h"]["detail"]["peaks"]["plain"]["tensor_bytes"] > 1e6
    assert "results.json" in capsys.readouterr().out
    assert commands.run(["a", "h"], tmp_path, TINY, fresh=False) == 0
    assert "2 of 2 measured before" in capsys.readouterr().out


def test_a_step_at_learning_rate_zero_keeps_the_model():
    bench = Bench(TINY)
    model = new_model("mre")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = TrainingStep(model, *bench.images.batch(16))
    step()
    step()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_trained_models_differ_from_new_ones_and_are_trained_once():
    bench = Bench(TINY)
    weight = bench.model("mre", "trained").head.weight
    assert not weight.equal(bench.model("mre", "at initialisation").head.weight)
    assert weight.equal(bench.model("mre", "trained").head.weight)


def test_unequal_results_fail_the_bar(monkeypatch):
    """The comparison sees a sequence that draws otherwise, and a gradient that is off by a part in ten thousand."""
    routing, entry_BN = sequence_bars.new_routing(2, 3)
    assert sequence_bars.compare(routing, entry_BN)["draws_equal"]
    plain = sequence_bars.PlainRun.__call__

    def scaled(self):
        sequence, gradients = plain(self)
        return sequence, [gradient * 1.0001 for gradient in gradients]

    monkeypatch.setattr(sequence_bars.PlainRun, "__call__", scaled)
    assert sequence_bars.compare(routing, entry_BN)["gradients_largest_relative_difference"] > 5e-5
    monkeypatch.setattr(sequence_bars.PlainRun, "__call__", plain)
    monkeypatch.setattr(sequence_bars, "new_seed", lambda generator, device: sequence_bars.torch.tensor(12345))
    assert not sequence_bars.compare(routing, entry_BN)["draws_equal"]


def test_the_fitted_exponent_of_a_power_law_is_its_power():
    table = [{"work": x, "time": 7 * x**0.6} for x in (1.0, 10.0, 300.0)]
    assert sequence_bars.exponent(table, "work", "time") == pytest.approx(0.6)


def test_multiply_adds_of_a_step_are_three_times_those_of_its_products():
    """Counted by PyTorch while every product of the experts runs: their forward pass, times three, is our account."""
    from raytraced.cost import count_multiply_adds

    size = ExpertSize(8, 32, 1)
    experts = top2_layer(size).experts
    one_row = sequence_bars.torch.zeros(1, 8)
    assert count_multiply_adds(lambda: experts.run_expert(0, 0, one_row)) == size.multiply_adds
    layer = expert_bars.raytraced_layer(size)
    step = LayerStep(layer, 8, 16)
    work, num_experts = expert_bars.step_multiply_adds(layer, step, size)
    assert work >= 3 * expert_bars.BATCH_SIZE * num_experts * size.multiply_adds


def test_a_peer_that_cannot_be_imported_gives_its_reason(monkeypatch):
    for module in ("mixture_of_experts", "st_moe_pytorch", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in expert_bars.PEERS:
        reason = open_peer(name, PAPER_EXPERT)
        assert isinstance(reason, str)
        assert reason.startswith(("ModuleNotFoundError", "ImportError"))


def test_a_peer_has_as_many_multiply_adds_as_ours():
    pytest.importorskip("mixture_of_experts")
    peer = open_peer("mixture-of-experts", ExpertSize(16, 64, 1))
    assert isinstance(peer, Peer)
    experts = peer.stack.layers[0].experts
    assert experts.w1[0].numel() + experts.w2[0].numel() == ExpertSize(16, 64, 1).multiply_adds
