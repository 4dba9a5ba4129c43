"""Slow, obvious implementations of the method: one sample and one node at a time, without code of the library."""

import torch
from torch import Tensor


def gate_weight(routing, layer: int, node: int) -> Tensor:
    return routing.gate_first[node][:, None] if layer == 0 else routing.gate_inner[layer - 1, node]


def rates_of_one(routing, entry: Tensor, active, input_logits=None) -> tuple[list[list[Tensor]], Tensor]:
    """Firing rates [layer][node] and of the output node, for one sample; active[layer][node] are numbers or scalars.

    input_logits[layer][node] (O), if given, are added to the logits of a gate.
    """
    L, N = routing.num_layers, routing.num_experts
    inputs = [[entry[i]] for i in range(N)]
    output = torch.zeros((), dtype=entry.dtype)
    rates = []
    for layer in range(L):
        rates.append([sum(inputs[i]) for i in range(N)])
        received = [[] for _ in range(N)]
        for i in range(N):
            sent = active[layer][i] * rates[layer][i]
            if layer == L - 1:
                output = output + sent
                continue
            logits = gate_weight(routing, layer, i) @ torch.stack(inputs[i])
            split = torch.softmax(logits if input_logits is None else logits + input_logits[layer][i], 0)
            for j in range(N):
                received[j].append(sent * split[j])
            output = output + sent * split[N]
        inputs = received
    return rates, output


def soft_draw(probs: Tensor, hard: Tensor, estimator: str, noise: Tensor | None, temperature: float) -> Tensor:
    """The one-hot draw `hard` with the gradient of an estimator: hard + (soft − soft.detach())."""
    logits = probs.log()
    if estimator == "straight-through":
        soft = probs
    elif estimator == "gumbel":
        soft = torch.softmax((logits if noise is None else logits - noise.log()) / temperature, 0)
    else:  # ReinMax as its authors compute it: 2·p₁ − p₀ / 2, where p₁ depends on the logits only
        p0 = torch.softmax(logits, 0)
        p1 = torch.softmax(((hard + p0) / 2).log().detach() - logits.detach() + logits, 0)
        soft = 2 * p1 - p0 / 2
    return hard + (soft - soft.detach())


def sequence_of_one(routing, entry, nodes, *, stopped: bool, estimator: str, noise=None, temperature=20.0):
    """Replay the draws of one sample: its active set [layer][node] as scalars with the gradient of all draws.

    nodes: the nodes drawn, in order; stopped: whether the output node was drawn after them; noise: (steps, K) or None.
    """
    L, N = routing.num_layers, routing.num_experts
    M = L * N
    active = [torch.zeros((), dtype=entry.dtype) for _ in range(M)]
    on: set[int] = set()
    for step, choice in enumerate([*nodes, M] if stopped else nodes):
        rates, output = rates_of_one(routing, entry, [active[l * N : (l + 1) * N] for l in range(L)])
        flat = [rates[k // N][k % N] for k in range(M)]
        candidates = [k for k in range(M) if k not in on and flat[k] > 0] + ([M] if output > 0 else [])
        assert choice in candidates
        probs = torch.stack([output if k == M else flat[k] * (1 - active[k]) for k in candidates])
        hard = torch.tensor([float(k == choice) for k in candidates], dtype=entry.dtype)
        draw = soft_draw(probs, hard, estimator, None if noise is None else noise[step][candidates], temperature)
        for k, value in zip(candidates, draw, strict=True):
            if k < M:
                active[k] = active[k] + value
        on.add(choice)
    return [active[l * N : (l + 1) * N] for l in range(L)]


def greedy_of_one(routing, entry, max_experts=None) -> tuple[list[int], bool]:
    """The greedy sequence of one sample: its nodes, and whether the output node ended it."""
    L, N = routing.num_layers, routing.num_experts
    nodes: list[int] = []
    limit = L * N if max_experts is None else min(max_experts, L * N)
    while len(nodes) < limit:
        probs = candidate_probs(routing, entry, nodes)
        choice = max(probs, key=lambda k: (probs[k], -k))
        if choice == L * N:
            return nodes, True
        nodes.append(choice)
    return nodes, False


def candidate_probs(routing, entry, nodes) -> dict[int, float]:
    """The probability of every candidate to be drawn next, for the nodes that are active so far."""
    L, N = routing.num_layers, routing.num_experts
    with torch.no_grad():
        rates, output = rates_of_one(routing, entry, [[float(l * N + i in nodes) for i in range(N)] for l in range(L)])
    probs = {k: float(rates[k // N][k % N]) for k in range(L * N) if k not in nodes}
    probs[L * N] = float(output)
    return {k: p for k, p in probs.items() if p > 0}


def all_paths(routing, entry, nodes=()) -> dict[tuple[int, ...], float]:
    """Every possible activation sequence with its exact probability."""
    paths: dict[tuple[int, ...], float] = {}
    for k, p in candidate_probs(routing, entry, nodes).items():
        if k == routing.num_layers * routing.num_experts:
            paths[tuple(nodes)] = paths.get(tuple(nodes), 0.0) + p
        else:
            for path, q in all_paths(routing, entry, (*nodes, k)).items():
                paths[path] = paths.get(path, 0.0) + p * q
    return paths


def weights_of_one(weighting: str, active, rates):
    """The weight of every expert of one sample, [layer][node]."""
    weights = []
    for active_N, rates_N in zip(active, rates, strict=True):
        total = sum(a * f for a, f in zip(active_N, rates_N, strict=True))
        count = round(sum(float(a.detach()) for a in active_N))
        if weighting == "unit" or count == 0:
            weights.append(list(active_N))
        else:
            scale = count if weighting == "rates" else 1.0
            weights.append([scale * a * f / total for a, f in zip(active_N, rates_N, strict=True)])
    return weights


def mlp(experts, layer: int, expert: int, hidden: Tensor) -> Tensor:
    """One expert of MLPExperts on one vector."""
    last = len(experts.weights) - 1
    for index, (weight, bias) in enumerate(zip(experts.weights, experts.biases, strict=True)):
        hidden = weight[layer, expert] @ hidden + bias[layer, expert]
        if index < last:
            hidden = hidden.clamp(min=0)
    return hidden


def stack_of_one(experts, hidden: Tensor, weights, stream: str) -> Tensor:
    """The expert network on one vector: every expert of every layer runs and is weighted."""
    L, N = experts.num_layers, experts.num_experts
    outputs = []
    for layer in range(L):
        update = sum(weights[layer][i] * mlp(experts, layer, i, hidden) for i in range(N))
        hidden = hidden + update if stream == "residual" else update
        outputs.append(update)
    return sum(outputs) if stream == "skip-sum" else hidden
