"""Paths through a whole decoder that depend on tokens alone: a table with a row for every word of the vocabulary.

Axes: V vocabulary, L blocks, N experts per block, S longest path, n tokens.
"""

import csv
import io
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raytraced.errors import require
from raytraced.files import write_file
from raytraced.router import NO_OPTIONS, Choice
from raytraced.rows import map_route, unordered_route
from raytraced.sequence import Route
from raytraced.store.budget import ByteBudget

MOST_TABLES = 8  # one per budget and stop; a caller that asks for another one each time must not fill the memory
IN_USE = 64  # a table is kept for so many lookups of others
SMALL_PART = 8  # rows fewer than this part of the vocabulary are computed on their own where no table may be dropped
MOST_COMPARED = 65_536  # entries of a parameter


class Paths(NamedTuple):
    """Paths through all blocks, known before any of them runs.

    The leading shape is that of the tokens, (B, T), or (V,) for all words of a vocabulary.
    """

    active: Tensor  # (..., L, N), 0 or 1
    weights: Tensor  # (..., L, N), factor of each expert's output, 0 where the expert does not run
    nodes: (
        Tensor | None
    )  # (..., S), number l·N + i of each expert in order of activation, padded with −1; None: no order
    num_active: Tensor  # (...), number of experts, all blocks together
    macs: Tensor  # (...), multiply-adds of these experts

    def experts_by_block(self) -> list[Tensor]:
        """The experts to fetch: for each block, in order, the numbers of those that some token runs."""
        L, N = self.active.shape[-2:]
        used_LN = self.active.reshape(-1, L, N).ne(0).any(0)
        return [used_N.nonzero()[:, 0] for used_N in used_LN]

    def steps(self) -> list[list[tuple[int, int]]]:
        """List the experts of each token: its (block, expert) pairs, numbered from 0.

        Returns:
            One list per token, in order of activation; without such an order in that of blocks. Leading axes are flattened.
        """
        L, N = self.active.shape[-2:]
        if self.nodes is None:
            rows = [row.nonzero()[:, 0].tolist() for row in self.active.reshape(-1, L * N)]
        else:
            rows = [[node for node in row if node >= 0] for row in self.nodes.flatten(0, -2).tolist()]
        return [[divmod(node, N) for node in row] for row in rows]

    def save(self, path: str | Path, words: Sequence[str] | None = None) -> None:
        """Write the paths to a file; a crash leaves no part of it.

        Args:
            path: A file that ends in .csv, for a row per token with its number, its text, its number of experts, its
                multiply-adds, and its path as `block:expert` pairs, numbered from 1, in order of activation; or in .npz, for
                the arrays `active` (V, L, N), `weights` (V, L, N), `num_active` (V,), `macs` (V,), and `nodes` (V, S) where
                there is an order, with experts numbered as in this class.
            words: The text of each token, for the file of rows. Default: none.
        """
        path = Path(path)
        require(path.suffix in (".csv", ".npz"), "path", str(path), "must end in .csv or .npz")
        if path.suffix == ".npz":
            fields = {name: value.cpu().numpy() for name, value in self._asdict().items() if value is not None}
            fields["active"] = fields["active"].astype(np.uint8)
            stream = io.BytesIO()
            np.savez_compressed(stream, **fields)
            write_file(path, stream.getvalue())
            return
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("token", "text", "experts", "macs", "path"))
        figures = zip(self.steps(), self.num_active.flatten().tolist(), self.macs.flatten().tolist(), strict=True)
        for token, (steps, num, macs) in enumerate(figures):
            rows.writerow((token, "" if words is None else words[token], num, macs, path_words(steps)))
        write_file(path, text.getvalue())


def path_words(steps: Iterable[tuple[int, int]]) -> str:
    """A path as readers see it: `block:expert` pairs, numbered from 1."""
    return " ".join(f"{block + 1}:{expert + 1}" for block, expert in steps)


class PathTables:
    """What a router chose for every word of a vocabulary, kept until a parameter changes; one table per budget and stop."""

    def __init__(self) -> None:
        self.state: Any = None
        self.seen: list[Tensor] = []  # what the tables were computed from
        self.copies: list[Tensor] = []  # and how it was then
        self.tables: dict[Hashable, Choice] = {}  # the one that was used last comes last
        self.last_used: dict[Hashable, int] = {}
        self.num_lookups = 0

    def follow(self, tensors: Sequence[Tensor], options: Any) -> None:
        """Forget all tables if what they were computed from has changed.

        In-place changes count up a tensor's version, but not those through `.data`, as libraries make them that average
        weights. So values are compared as well: of a large tensor `MOST_COMPARED` entries, evenly spread.
        """
        state = options, tuple(map(version_of, tensors))
        if state != self.state or not all(map(torch.equal, self.seen, self.copies)):
            self.clear()
            self.state, self.seen = state, [shortened(one) for one in tensors]
            self.copies = [one.clone() for one in self.seen]

    def find(self, key: Hashable, num_tokens: int, compute: Callable[[], Choice]) -> Choice | None:
        """The table of some options of a call, computed where there is none.

        Args:
            key: The options.
            num_tokens: How many rows are wanted.
            compute: Computes the whole table.

        Returns:
            The table; None where all tables that are kept were in use of late, and only a few rows are wanted: then it is
            cheaper to compute these.
        """
        self.num_lookups += 1
        table = self.tables.pop(key, None)
        if table is None:
            if len(self.tables) >= MOST_TABLES:
                oldest = next(iter(self.tables))
                num_words = len(self.tables[oldest].active)
                if self.num_lookups - self.last_used[oldest] < IN_USE and num_tokens < num_words // SMALL_PART:
                    return None
                del self.tables[oldest], self.last_used[oldest]
            table = without_padding(compute())
        self.tables[key], self.last_used[key] = table, self.num_lookups
        return table

    def clear(self) -> None:
        """Forget all tables."""
        self.state, self.seen, self.copies, self.tables, self.last_used = None, [], [], {}, {}


def can_be_read(tensors: Iterable[Tensor]) -> bool:
    """Whether tensors have values that can be compared; those on the device "meta" and those of torch.func have none."""
    return not any(one.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(one) for one in tensors)


def shortened(values: Tensor) -> Tensor:
    """All entries of a tensor, or of a large one as many as are compared, evenly spread; in the same memory."""
    flat = values.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST_COMPARED)] if flat.numel() > MOST_COMPARED else flat


def version_of(values: Tensor) -> tuple[Any, ...]:
    """What changes where a tensor is changed in place, or is another one."""
    return (-1 if values.is_inference() else values._version), values.data_ptr(), values.dtype, values.device


def plain_options(router: nn.Module) -> tuple[Any, ...]:
    """The options of a router that may be set anew: its configuration, and its own numbers and words."""
    own = {name: value for name, value in vars(router).items() if isinstance(value, int | float | str)}
    return own, getattr(router, "config", None)


def choose_rows(choice: Choice, rows_n: Tensor) -> Choice:
    """What a router chose for some rows (n,) of a table."""
    route = None if choice.route is None else map_route(choice.route, lambda field: field[rows_n])
    return choice._replace(active=choice.active[rows_n], weights=choice.weights[rows_n], route=route)


def without_padding(choice: Choice) -> Choice:
    """The same choice, with order of activation as long as the longest path."""
    route = choice.route
    if route is None or route.nodes is None:
        return choice
    longest = int(route.num_active.max()) if route.num_active.numel() else 0
    return choice._replace(route=route._replace(nodes=route.nodes[:, :longest].clone()))


def within_bytes(choice: Choice | None, texts_n: Tensor, budgets: Sequence[ByteBudget]) -> Choice:
    """What is left of the paths of tokens when each may read a number of bytes.

    Args:
        choice: What a router chose for n tokens, text by text, in the order of the text.
        texts_n: The number of the text of each token.
        budgets: The deadline of each text.
    """
    assert choice is not None  # only paths that are known beforehand have deadlines in bytes
    route = choice.route or unordered_route(choice.active)
    active = torch.zeros_like(choice.active)
    for token, text in enumerate(texts_n.tolist()):
        if route.nodes is None:
            path = choice.active[token].flatten().nonzero()[:, 0].tolist()
        else:
            path = [node for node in route.nodes[token].tolist() if node >= 0]
        kept = budgets[text].admit(path)
        active[token].view(-1)[kept] = 1
    return keep_active(choice, active)


def without_experts(choice: Choice, missed: Iterable[int]) -> Choice:
    """What is left of paths without some experts, numbered l·N + i."""
    active = choice.active.clone()
    active.flatten(1)[:, list(missed)] = 0
    return keep_active(choice, active)


def keep_active(choice: Choice, active: Tensor) -> Choice:
    """A choice of which only the experts in `active` (n, L, N) run; the others keep their order."""
    route = choice.route or unordered_route(choice.active)
    if route.nodes is not None and route.nodes.numel():
        is_kept_nS = (active.flatten(1).gather(1, route.nodes.clamp(min=0)) > 0) & (route.nodes >= 0)
        places_nS = (~is_kept_nS).int().argsort(dim=1, stable=True)  # those that stay come first
        nodes_nS = route.nodes.masked_fill(~is_kept_nS, -1).gather(1, places_nS)
        route = route._replace(nodes=nodes_nS)
    route = route._replace(active=active, num_active=active.sum((-1, -2)).long())
    return choice._replace(active=active, weights=choice.weights * active, route=route)


def alternate(own: Choice, before: Choice, max_experts: int | None = None) -> Choice:
    """Paths of which every second block, from the second on, is that of another path.

    Args:
        own: The paths of tokens (n, L, N).
        before: The paths of the tokens before them.
        max_experts: At most this many experts are left, with their weights: those that come first, by their places in both
            orders in turns.
    """
    from_before_L1 = (torch.arange(own.active.shape[1], device=own.active.device) % 2 == 1)[:, None]
    active, weights = (
        torch.where(from_before_L1, getattr(before, name), getattr(own, name)) for name in ("active", "weights")
    )
    choice = Choice(active, weights, own.loss)
    orders = [route.nodes for route in (own.route, before.route) if route is not None and route.nodes is not None]
    if len(orders) < 2:
        if max_experts is not None:
            raise ValueError(NO_OPTIONS)
        return choice
    own_nLN, before_nLN = (places(nodes_nS, active.shape) for nodes_nS in orders)
    key_nM = torch.where(from_before_L1, 2 * before_nLN + 1, 2 * own_nLN).flatten(1)
    num_n, num_nodes = active.detach().sum((-1, -2)).long(), key_nM.shape[1]
    key_nM = key_nM.masked_fill(active.detach().flatten(1) == 0, 2 * num_nodes + 2)
    order_nM, place_M = key_nM.argsort(dim=1, stable=True), torch.arange(num_nodes, device=num_n.device)
    nodes_nM = order_nM.masked_fill(place_M >= num_n[:, None], -1)
    choice = choice._replace(route=Route(active, nodes_nM, num_n, None))
    if max_experts is None:
        return choice
    kept_M = (place_M < min(max_experts, num_nodes)).to(active)
    kept_nM = torch.zeros_like(active).flatten(1).scatter(1, order_nM, kept_M.expand_as(order_nM))
    return keep_active(choice, active * kept_nM.view(active.shape))


def places(nodes_nS: Tensor, shape: torch.Size) -> Tensor:
    """The place of each node in the order of activation (n, L, N); that of a node that is not in it is as large as can be."""
    num, num_nodes = len(nodes_nS), shape[1] * shape[2]
    places_nM = nodes_nS.new_full((num, num_nodes + 1), num_nodes)
    order_nS = torch.arange(nodes_nS.shape[1], device=nodes_nS.device).expand_as(nodes_nS)
    places_nM.scatter_(1, nodes_nS.masked_fill(nodes_nS < 0, num_nodes), order_nS)
    return places_nM[:, :-1].reshape(num, *shape[1:])


def describe_paths(choice: Choice, macs_per_expert: int, shape: torch.Size) -> Paths:
    """A router's choice for tokens, with their leading shape."""

    def shaped(field: Tensor) -> Tensor:
        return field.detach().reshape((*shape, *field.shape[1:]))

    route, num_active = choice.route, shaped(choice.active.sum((-1, -2)).long())
    nodes = None if route is None or route.nodes is None else shaped(route.nodes)
    return Paths(shaped(choice.active), shaped(choice.weights), nodes, num_active, num_active * macs_per_expert)
