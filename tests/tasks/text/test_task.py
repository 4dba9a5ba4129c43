"""How answers to texts are evaluated: bits per byte as sums over bytes, by position, kind and domain."""

import math

import numpy as np
import pytest
import torch

import raytraced
from raytraced.tasks.task import Batch
from raytraced.tasks.text.dataset import Text, build_dataset, held_out
from raytraced.tasks.text.task import KIND_OF_BYTE, KINDS, TextTask, stretches
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import evaluate
from raytraced.training.objective import Objective
from raytraced.training.world import World

SIZES = {"dim": 16, "hidden": 8, "num_experts": 3, "num_heads": 2, "context": 20}
ALONE = World(0, 1, torch.device("cpu"))


def dataset(*contents, **options):
    domains = {f"d{number}": held_out(Text((np.frombuffer(one, np.uint8),))) for number, one in enumerate(contents)}
    return build_dataset("texts", domains, **{"context": 20, "steps": 3, "eval_tokens": None} | options)


PROSE = b"It was the best of times, it was the worst of times; 1859.\n\xe2\x80\x94 " * 40
MIX = dataset(PROSE, bytes(range(256)) * 9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return raytraced.build("gpt-mre", **SIZES).eval()


def sample_loss_fn(model, data, **options):
    predict = Objective(model, TrainConfig(), TextTask()).eval().predict
    return evaluate(TextTask(), data, "test", predict, ALONE, **{"batch_size": 1000, "full": True} | options)


def test_a_model_that_knows_nothing_takes_eight_bits_a_byte(model):
    blank = raytraced.build("gpt-dense", dim=16, num_heads=2, context=20)
    torch.nn.init.zeros_(blank.embedding.weight)
    result = sample_loss_fn(blank, MIX)
    assert result["bits_per_byte"] == pytest.approx(8)
    for name in ("bits_by_position", "bits_by_domain"):
        assert list(result[name].values()) == pytest.approx([8] * len(result[name]))
    assert result["bits_by_kind"] == pytest.approx(dict.fromkeys(KINDS, 8))
    assert result["experts_by_kind"] == pytest.approx(dict.fromkeys(KINDS, 2.0))
    assert result["experts_by_domain"] == {"d0": 2.0, "d1": 2.0}


def test_figures_are_sums_over_bytes_whatever_the_batch(model, monkeypatch):
    whole = sample_loss_fn(model, MIX)
    with monkeypatch.context() as patch:
        patch.setattr("raytraced.tasks.text.dataset.MOST_TOKENS", 60)  # the loader makes three windows at a time of it
        assert sample_loss_fn(model, MIX)["bits_by_domain"] == pytest.approx(whole["bits_by_domain"], rel=1e-6)
    for batch_size in (1, 7):
        again = sample_loss_fn(model, MIX, batch_size=batch_size)
        assert again["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-6)
        assert again["bits_by_kind"] == pytest.approx(whole["bits_by_kind"], rel=1e-5)
        assert again["expert_load"] == whole["expert_load"]
    # by hand, window by window
    split, nats, kinds, places, domains, experts = MIX.test, [], [], [], [], []
    for domain, start in split.windows.tolist():
        tokens = torch.from_numpy(split.domains[domain].read(start, start + 21).astype(int))
        with torch.no_grad():
            out = model(tokens[None, :-1])
        nats += out.logits[0].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].neg().tolist()
        kinds += KIND_OF_BYTE[tokens[1:]].tolist()
        places += range(1, len(tokens))
        domains += [domain] * (len(tokens) - 1)
        experts += out.num_experts[0].tolist()
    bits, kinds, places, domains, experts = (
        np.array(each) for each in (np.array(nats) / math.log(2), kinds, places, domains, experts)
    )
    assert whole["bits_per_byte"] == pytest.approx(bits.mean(), rel=1e-5)
    assert whole["mean_experts"] == pytest.approx(experts.mean())
    for number, kind in enumerate(KINDS):
        assert whole["bits_by_kind"][kind] == pytest.approx(bits[kinds == number].mean(), rel=1e-5), kind
        assert whole["experts_by_kind"][kind] == pytest.approx(experts[kinds == number].mean()), kind
    assert whole["bits_by_position"].keys() == {"1-3", "4-15", "16-20"}
    for name, value in whole["bits_by_position"].items():
        first, last = map(int, name.split("-"))
        assert value == pytest.approx(bits[(places >= first) & (places <= last)].mean(), rel=1e-5)
    for number, name in enumerate(MIX.domain_names):
        assert whole["bits_by_domain"][name] == pytest.approx(bits[domains == number].mean(), rel=1e-5)
        assert whole["experts_by_domain"][name] == pytest.approx(experts[domains == number].mean())
    rows = TextTask().group_rows(MIX, whole)
    assert [row["part"] for row in rows] == ["d0", "d1", *KINDS, "position 1-3", "position 4-15", "position 16-20"]


def test_tokens_are_evaluated_by_their_bytes():
    task, logits = TextTask(), torch.zeros(1, 3, 4)
    mask = torch.tensor([[True, True, False]])
    batch = Batch(torch.zeros(1, 3).long(), torch.tensor([[1, 2, 3]]), torch.arange(1), mask, torch.tensor([[2, 3, 9]]))
    sums = task.sums(logits, batch) | {"loss": task.target_losses(logits, batch).sum()}
    assert int(sums["bytes"]) == 5
    assert task.means({name: float(value) for name, value in sums.items()}, 2)["bits_per_byte"] == pytest.approx(4 / 5)
    columns = task.columns(logits, batch)
    assert float(columns["nats"]) == pytest.approx(2 * math.log(4))
    assert int(columns["bytes"]) == 5
    assert float(task.sample_losses(logits, batch)) == pytest.approx(math.log(4))


def test_kinds_and_positions_leave_no_byte_out():
    kinds = dict(
        zip(b"aZ0 \n\t.,~\x00\x7f\x80\xff", KIND_OF_BYTE[list(b"aZ0 \n\t.,~\x00\x7f\x80\xff")].tolist(), strict=True)
    )
    assert kinds == dict(zip(b"aZ0 \n\t.,~\x00\x7f\x80\xff", [0, 0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4], strict=True))
    for context in (1, 2, 4, 5, 64, 100):
        places = [place for first, last in stretches(context) for place in range(first, last + 1)]
        assert places == list(range(1, context + 1))


def test_data_of_other_tokens_is_refused(model):
    tokens = {split: Text((np.zeros(50, int),)) for split in ("train", "validation", "test")}
    other = build_dataset(
        "o", {"o": tokens}, context=20, steps=1, eval_tokens=None, tokenizer="{}", lengths=np.ones(300, int)
    )
    with pytest.raises(ValueError, match="data=o: has 300 different tokens; gpt-mre has 256"):
        TextTask().check_fits(model, other)
    assert TextTask().spec(other) == {"context": 20, "vocab_size": 300, "tokenizer": "{}"}
