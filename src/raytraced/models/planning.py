"""The paths of a decoder's tokens, before any block runs: looked up in its tables of paths, or computed.

Axes: B texts, T tokens, n tokens in all, V vocabulary, D width.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raytraced import kernels
from raytraced.errors import check_budget, require
from raytraced.models.caches import KVCache, TextCaches, tokens_before
from raytraced.models.expert_pass import ExpertPass
from raytraced.models.paths import Paths, alternate, can_be_read, choose_rows, describe_paths, plain_options
from raytraced.router import Call, Choice

if TYPE_CHECKING:
    from raytraced.models.gpt import GPT


def plan_pass(
    model: "GPT", encoded: Tensor, mask: Tensor | None, cache: KVCache | TextCaches | None, experts: ExpertPass
) -> Choice:
    """The paths of the tokens of a pass, or of embeddings given in their place."""
    if model.path_tokens == 1:
        return plan_tokens(model, experts.flat(encoded), experts.call)
    rule = "must be 1 for embeddings in place of tokens, and for recorded routes"
    fits = not encoded.is_floating_point() and experts.call.route is None
    require(fits, "path_tokens", model.path_tokens, rule)
    before_BT = tokens_before(encoded, mask, cache, len(model.blocks))
    return plan_after(model, experts.flat(encoded), experts.flat(before_BT), experts.call)


def plan_words(model: "GPT", tokens: Tensor, before: Tensor, call: Call) -> Paths:
    """The paths of tokens (...) after other tokens (...); both are known to be words of the vocabulary."""
    if model.path_tokens == 1:
        choice = plan_tokens(model, tokens.flatten(), call)
    else:
        choice = plan_after(model, tokens.flatten(), before.flatten(), call)
    return describe_paths(choice, kernels.expert_macs(model.layer.experts, model.layer.dim), tokens.shape)


def plan_after(model: "GPT", tokens_n: Tensor, before_n: Tensor, call: Call) -> Choice:
    """The paths of tokens (n,) that depend on the tokens before them (n,), too; only then are they cut to a budget."""
    check_budget(call.max_experts)
    whole = call._replace(max_experts=None)
    own, before = (plan_tokens(model, words_n, whole) for words_n in (tokens_n, before_n))
    return alternate(own, before, call.max_experts)


def plan_tokens(model: "GPT", tokens_n: Tensor, call: Call) -> Choice:
    """The paths of tokens (n,), or of embeddings (n, D), that depend on each of them alone."""
    router = model.layer.router
    if tokens_n.is_floating_point():
        rule = "routes by tokens; give these, not embeddings"
        require(model.routing_input != "token", "routing_input", model.routing_input, rule)
        plan = router.plan(tokens_n * model.embedding.embedding_dim**0.5, call)
    elif not router.alike(call):
        plan = router.plan(model.routing_vectors(tokens_n), call)
    elif model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        if len(tokens_n) < model.vocab_size:
            plan = router.plan(model.routing_vectors(tokens_n), call)
        else:  # each word once
            plan = choose_rows(plan_vocabulary(model, call), tokens_n)
    else:
        table = find_table(model, len(tokens_n), call)
        if table is None:
            plan = router.plan(model.routing_vectors(tokens_n), call)
        else:
            plan = choose_rows(table, tokens_n)
    assert plan is not None  # of a router that plans
    return plan


def find_table(model: "GPT", num_tokens: int, call: Call) -> Choice | None:
    """The table of paths of a call; None where it is better to compute the paths of so many tokens."""
    router = model.layer.router
    tensors = [*router.parameters(), *router.buffers(), model.routing_weight]
    if not can_be_read(tensors):
        return None
    model.path_tables.follow(tensors, plain_options(router))
    key = call.max_experts, call.stop
    return model.path_tables.find(key, num_tokens, lambda: plan_vocabulary(model, call))


def plan_vocabulary(model: "GPT", call: Call) -> Choice:
    """The paths of all words of the vocabulary."""
    words_V = torch.arange(model.vocab_size, device=model.routing_weight.device)
    plan = model.layer.router.plan(model.routing_vectors(words_V), call._replace(rows=None))
    assert plan is not None
    return plan


def whole_numbers(name: str, values: Tensor) -> Tensor:
    """Numbers of any integer type as long numbers, so that none of them is taken for a mask; refuses other types."""
    require(isinstance(values, Tensor), name, type(values).__name__, "must be a tensor of whole numbers")
    is_integer = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    require(is_integer, name, values.dtype, "must be whole numbers")
    return values.long()


def known_words(name: str, tokens: Tensor, vocab_size: int) -> Tensor:
    """Tokens as long numbers; refuses those that are not words of the vocabulary."""
    tokens = whole_numbers(name, tokens)
    inside = not tokens.numel() or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size)
    require(inside, name, "[…]", f"some are not in 0 … {vocab_size - 1}, the vocabulary")
    return tokens
