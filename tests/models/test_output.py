"""What every model returns, where it has more than one routed layer."""

import torch
from torch import nn

from raytraced import Output, RaytracedExperts
from raytraced.cost import sample_cost
from raytraced.layer import routed_layer
from raytraced.models.output import Model, linear_cost
from raytraced.router import Cost
from raytraced.routers.top_k import TopK


class Tower(Model):
    """Two routed layers of different kinds and sizes, one above the other, on tokens (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = RaytracedExperts(6, 3, 4), routed_layer(TopK, 6, 1, 5), nn.Linear(6, 7)

    def forward(self, inputs, *, mask=None, **options):
        first = self.first(inputs, mask=mask)
        second = self.second(first.hidden, mask=mask)
        return Output(self.head(second.hidden), (first.route, second.route))

    def cost(self, inputs, out):
        first, second = (layer.cost(route) for layer, route in zip(self.routed_layers(), out.routes, strict=True))
        both = {part: Cost(*(a + b for a, b in zip(first[part], second[part], strict=True))) for part in first}
        return {"input": Cost(0, 0), **both, "head": linear_cost(self.head)}


def test_every_routed_layer_has_its_own_route_and_all_count():
    model, inputs, mask = Tower().eval(), torch.randn(4, 5, 6), torch.rand(4, 5) < 0.7
    out = model(inputs, mask=mask)
    assert model.routed_layers() == [model.first, model.second]
    assert [route.active.shape for route in out.routes] == [(4, 5, 3, 4), (4, 5, 1, 5)]
    assert torch.equal(out.num_experts, out.routes[0].active.sum((-1, -2)).long() + 2 * mask)
    cost = sample_cost(model, inputs, out, mask)
    assert cost.experts.shape == cost.macs.shape == cost.parameters.shape == (4, 5)
    assert torch.equal(cost.expert_macs, out.num_experts * 3 * 36)
    assert not cost.macs[~mask].any()
