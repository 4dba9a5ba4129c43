"""Blocks of other models become raytraced experts; upcycled ones leave the model's output as it was."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

import raytraced as rt
from raytraced.integrations.replace import FeedForward, Grown

GRID = {"num_layers": 2, "num_experts": 3}


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def vit():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)).eval()


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=50, max_position_embeddings=16)).eval()


CASES = {
    "bert": (bert, "bert.encoder.layer.*.intermediate", lambda: torch.randint(50, (3, 9))),
    "gpt2": (gpt2, "transformer.h.*.mlp", lambda: torch.randint(50, (3, 9))),
    "vit": (vit, "vit.layers.*.mlp", lambda: torch.randn(3, 3, 8, 8)),
}


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_upcycled_experts_return_what_the_blocks_returned(name, num_layers):
    make, pattern, inputs = CASES[name]
    model, batch = make(), inputs()
    for parameter in model.parameters():  # a trained model's scale: fresh blocks of 0.02 add next to nothing
        parameter.data *= 5
    before = model(batch).logits
    replaced = rt.replace_feed_forward(model, pattern, num_layers=num_layers, num_experts=4, upcycle=True)
    assert len(replaced) == 2
    torch.testing.assert_close(model(batch).logits, before, rtol=1e-4, atol=1e-5)
    for block in replaced.values():
        assert block.active.shape[-2:] == (num_layers, 4)
        assert (block.active[..., 0, :].sum(-1) >= 1).all()  # what the equality rests on
    if num_layers > 1:
        assert any(block.active[..., 1:, :].any() for block in replaced.values())  # deeper experts ran too


@pytest.mark.parametrize("name", CASES)
def test_fresh_experts_are_as_wide_as_the_block_and_change_the_output(name):
    make, pattern, inputs = CASES[name]
    model, batch = make(), inputs()
    before = model(batch).logits
    replaced = rt.replace_feed_forward(model, pattern, **GRID)
    assert {block.layer.experts.widths for block in replaced.values()} == {(16, 64 if name == "gpt2" else 24, 16)}
    assert not torch.allclose(model(batch).logits, before, atol=1e-3)


def test_a_block_split_over_two_modules_keeps_the_norm_and_the_dropout_of_the_second():
    model = bert()
    kept = model.bert.encoder.layer[0].output.LayerNorm
    num_blocks = sum(
        p.numel() for name, p in model.named_parameters() if "intermediate" in name or "output.dense" in name
    )
    num_blocks -= sum(p.numel() for name, p in model.named_parameters() if "attention.output.dense" in name)
    before = sum(parameter.numel() for parameter in model.parameters())
    replaced = rt.replace_feed_forward(model, "bert.encoder.layer.*.intermediate", **GRID)
    second = model.bert.encoder.layer[0].output
    assert second.LayerNorm is kept
    assert type(second.dense) is nn.Identity
    num_experts = sum(p.numel() for block in replaced.values() for p in block.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == before - num_blocks + num_experts
    model.train()
    loss = model(torch.randint(50, (3, 9)), labels=torch.randint(50, (3, 9))).loss
    loss.backward()
    gate = replaced["bert.encoder.layer.1.intermediate"].layer.router.routing.gate_first
    assert gate.grad.abs().sum() > 0


def test_upcycled_experts_learn_and_come_apart():
    model = gpt2().train()
    replaced = rt.replace_feed_forward(model, "transformer.h.*.mlp", **GRID, upcycle=True)
    tokens = torch.randint(50, (4, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(model(tokens, labels=tokens).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    nodes = replaced["transformer.h.0.mlp"].layer.experts.nodes
    assert not torch.equal(nodes[0].c_fc.weight, nodes[1].c_fc.weight)
    assert any(node.gain.detach() != 0 for node in nodes if isinstance(node, Grown))
    gate = replaced["transformer.h.0.mlp"].layer.router.gate["weight"]
    assert gate.grad is not None
    assert gate.grad.abs().max() > 0


def test_a_replaced_model_generates_with_its_cache():
    model, prompt = gpt2(), torch.randint(50, (2, 4))
    rt.replace_feed_forward(model, "transformer.h.*.mlp", **GRID, upcycle=True)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, **options, use_cache=False))


def test_options_precision_and_mode_are_taken_over():
    model = gpt2().double().train()
    (block,) = rt.replace_feed_forward(
        model, ["transformer.h.1.mlp"], **GRID, output_logit_offset=3.0, hidden=5
    ).values()
    assert isinstance(block, FeedForward)
    assert block.training
    assert model.transformer.h[1].mlp is block
    assert block.layer.router.routing.output_logit_offset == 3.0
    assert block.layer.experts.widths == (16, 5, 16)
    assert {parameter.dtype for parameter in block.parameters()} == {torch.float64}
    assert type(model.transformer.h[0].mlp).__name__ == "GPT2MLP"


def test_a_block_in_two_places_is_replaced_by_one_block_in_two_places():
    shared = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    model = nn.ModuleDict({"one": shared, "other": shared})
    batch = torch.randn(5, 4)
    before = shared(batch)
    rt.replace_feed_forward(model, ["one", "other"], **GRID, upcycle=True)
    assert model["one"] is model["other"]
    torch.testing.assert_close(model["one"](batch), before)


class Pair(nn.Module):
    """A block with a second input, as some output blocks of other models have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden, residual):
        return self.linear(hidden) + residual


class Mean(nn.Module):
    """Mixes all vectors of a batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden):
        return self.linear(hidden - hidden.mean(0))


def blocks():
    named = {"mlp": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), "head": nn.Linear(4, 3)}
    named |= {"pair": Pair(), "mean": Mean(), "activation": nn.ReLU(), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict(named)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("mpl", {}, "mpl: no part of ModuleDict has this name; did you mean mlp?"),
        ("x.*", {}, "x.*: no part of ModuleDict has this name; model.named_modules() lists the names"),
        ([], {}, "names=[]: must name at least one block"),
        (["mlp", "mlp.0"], {}, "mlp: mlp.0 inside it is named as well; name one of them only"),
        (["mlp", "head"], {}, "head: Linear does not map vectors (n, D) alone to vectors (n, D); name an MLP block"),
        ("pair", {}, "pair: Pair does not map vectors (n, D) alone to vectors (n, D); name an MLP block"),
        ("norm", {}, "norm: LayerNorm does not map vectors (n, D) alone to vectors (n, D); name an MLP block"),
        ("activation", {}, "activation: ReLU does not map vectors (n, D) alone to vectors (n, D); name an MLP block"),
        ("mean", {}, "mean: Mean mixes several vectors; an expert must map each vector independently; name an MLP block"),
        ("mlp", {"weighting": "unit"}, "weighting=unit: must be rates-to-one with upcycle: else equal experts do not add up to the block"),
        ("mlp", {"stream": "last"}, "stream=last: must be residual with upcycle: else equal experts do not add up to the block"),
        ("mlp", {"hidden": 8}, "hidden=8: leave it out with upcycle: experts are the block"),
        ("mlp", {"num_experts": 0}, "num_experts=0: must be at least 1"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_fit_is_refused_in_one_line_and_the_model_stays(names, options, message):
    model = blocks()
    before = copy.copy(dict(model.named_modules()))
    with pytest.raises(ValueError) as raised:
        rt.replace_feed_forward(model, names, **{**GRID, "upcycle": True, **options})
    assert str(raised.value) == message
    assert dict(model.named_modules()) == before


def test_a_star_stands_for_one_part_of_a_name():
    def mlp():
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    blocks = [nn.ModuleDict({"mlp": mlp(), "adapter": nn.ModuleDict({"mlp": mlp()})}) for _ in range(2)]
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
    assert set(rt.replace_feed_forward(model, "layers.*.mlp", **GRID)) == {"layers.0.mlp", "layers.1.mlp"}
    assert set(rt.replace_feed_forward(model, "l*.1.*.m*", **GRID)) == {"layers.1.adapter.mlp"}
    with pytest.raises(ValueError, match=r"^layers\.\*mlp: no part of ModuleDict has this name"):
        rt.replace_feed_forward(model, "layers.*mlp", **GRID)


def test_a_grid_of_one_layer_that_never_learns_to_route_is_warned_about():
    with pytest.warns(UserWarning, match=r"num_layers=1, num_experts=3\): its gates never learn to route"):
        rt.replace_feed_forward(blocks(), "mlp", num_layers=1, num_experts=3, upcycle=True)


def test_replaced_blocks_are_not_replaced_again():
    model = blocks()
    rt.replace_feed_forward(model, "mlp", **GRID)
    with pytest.raises(ValueError, match=r"^mlp: holds routed experts already$"):
        rt.replace_feed_forward(model, "mlp", **GRID)
