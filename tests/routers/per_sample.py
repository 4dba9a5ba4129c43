"""Slow, obvious implementations of the baselines: one sample and one expert at a time, without code of the library."""

import torch

from reference import mlp


def gate(router, step, hidden):
    return router.gates[step].weight @ hidden + router.gates[step].bias


def number(value):
    """A scalar as a Python number, with or without a gradient."""
    return float(value.detach()) if isinstance(value, torch.Tensor) else value


def by_strength(values):
    """Indices from the largest value to the smallest."""
    return sorted(range(len(values)), key=lambda index: -number(values[index]))


def normalised(values):
    """The softmax of a list of scalars."""
    exponentials = [value.exp() for value in values]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def top_k(router, step, hidden):
    """The weights of the experts that run, by expert."""
    logits = gate(router, step, hidden)
    chosen = by_strength(logits)[: router.k]
    if router.k == 1:  # as in Switch: the probability among all experts
        return {chosen[0]: normalised(logits)[chosen[0]]}
    scale = router.k if router.total == "count" else 1
    return {e: scale * share for e, share in zip(chosen, normalised([logits[e] for e in chosen]), strict=True)}


def hash_routing(router, step, hidden):
    scores = [number(sum(direction * hidden)) for direction in router.directions[step]]
    return {e: torch.ones((), dtype=hidden.dtype) for e in by_strength(scores)[: router.k]}


def seq_top_k(router, step, hidden):
    probs = normalised(gate(router, step, hidden))
    chosen = [e for e, prob in enumerate(probs) if number(prob) >= number(router.cut[step])]
    total = sum(probs[e] for e in chosen) if len(chosen) > 1 else 1
    scale = len(chosen) if router.total == "count" else 1
    return {e: probs[e] / total * scale for e in chosen}


def mixture_of_depths(router, step, hidden):
    (score,) = gate(router, step, hidden)
    weight = 2 / (1 + (-score).exp())
    return dict.fromkeys(range(router.num_experts), weight) if number(score) > 0 else {}


def relu(router, step, hidden):
    return {e: logit for e, logit in enumerate(gate(router, step, hidden)) if number(logit) > 0}


def threshold(router, step, hidden):
    probs = normalised(gate(router, step, hidden))
    weights, reached = {}, 0.0
    for e in by_strength(probs):
        weights[e] = probs[e]
        reached += number(probs[e])
        if reached >= router.threshold:
            break
    scale = len(weights) / sum(weights.values()) if router.total == "count" else 1
    return {e: scale * weight for e, weight in weights.items()}


def aux_free(router, step, hidden):
    logits = gate(router, step, hidden)
    scores = normalised(logits)
    biased = [number(score) + number(router.bias[step, e]) for e, score in enumerate(scores)]
    chosen = by_strength(biased)[: router.k]
    total = sum(scores[e] for e in chosen)
    scale = router.k if router.total == "count" else 1
    return {e: scores[e] / total * scale for e in chosen}


def top_any(router, step, hidden):
    margins = []
    rows = zip(router.directions[step], router.thresholds[step], router.removed[step], strict=True)
    for direction, bar, removed in rows:
        cosine = (direction @ hidden) / (direction.norm() * hidden.norm())
        margin = 1 / (1 + (-cosine).exp()) - 1 / (1 + (-bar).exp())
        margins.append(margin * 0 - 2 if removed else margin)
    chosen = [e for e, margin in enumerate(margins) if margin > 0] or by_strength(margins)[:1]
    return {e: (1 + margins[e] - margins[e].detach()) / len(chosen) for e in chosen}


def null_experts(router, step, hidden):
    probs = normalised(gate(router, step, hidden))
    true = [e for e in by_strength(probs)[: router.k] if e < router.num_experts]
    total = sum(probs[e] for e in true)
    return {e: probs[e] / total for e in true}


def chain(router, step, hidden):
    probs = normalised(gate(router, step, hidden))
    return {e: probs[e] for e in by_strength(probs)[: router.k]}


def ada_k(num_experts):
    """The reference of ada-k, for a known number of experts per step."""

    def route(router, step, hidden):
        logits = gate(router, step, hidden)
        chosen = by_strength(logits)[: num_experts[step]]
        return dict(zip(chosen, normalised([logits[e] for e in chosen]), strict=True))

    return route


def run_one(layer, hidden, route):
    """Hidden vector and active experts [step][expert] of one sample."""
    total, active, router = torch.zeros_like(hidden), [], layer.router
    for step in range(router.num_layers * router.num_rounds):
        weights = route(router, step, hidden)
        update = torch.zeros_like(hidden)
        for e, weight in weights.items():
            update = update + weight * mlp(layer.experts, step // router.num_rounds, e, hidden)
        active.append([float(e in weights) for e in range(router.num_experts)])
        hidden = hidden + update if layer.stream == "residual" else update
        total = total + update
    return (total if layer.stream == "skip-sum" else hidden), active
