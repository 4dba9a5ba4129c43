"""Answer queries step by step; after each step a row may stop: at its confidence, budget, deadline or end.

Axes: n rows that continue, Y classes or tokens, L layers, N experts per layer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from raytraced.cost import sample_cost
from raytraced.early_exit import ExitEvery, ExitPolicy, Walk, confidences
from raytraced.errors import require
from raytraced.models.dial import check_greedy
from raytraced.models.output import Output, check_select
from raytraced.serve.budgets import Budget
from raytraced.serve.generation import Sampling, check_finite
from raytraced.serve.models import Served

AnswerFields = dict[str, Any]
PATIENCE = 0.1  # seconds after which a query without a deadline is as urgent as one whose deadline is now


@dataclass(eq=False)
class Query:
    """One input, and the conditions under which its answer is the last."""

    served: Served
    inputs: Tensor  # (1, …)
    deliver: Callable[["Delivery"], None]
    select: str | None = None
    seed: int = 0
    max_experts: int | None = None
    budget: Budget | None = None
    confidence: float | None = None
    exit_every: ExitEvery = "expert"
    deadline: float | None = None
    all_exits: bool = False
    """whether the answer at each exit is delivered"""
    sampling: Sampling | None = None
    """for text to be generated, see text_batch.py"""
    cancelled: bool = False
    """the client has gone"""
    direct: bool = False
    """whether the answer at the end is computed at once: its time is known, and it fits before the deadline"""
    seconds: float = 0.0
    """of computation so far"""
    first_answer: float | None = None
    """when the answer at the first exit was ready"""
    delivered: float = 0.0
    """when the last answer was ready"""
    due: float = field(default_factory=lambda: perf_counter() + PATIENCE)

    def __post_init__(self) -> None:
        if self.deadline is not None:
            self.due = self.deadline
        if self.confidence is not None:  # rounded as the probabilities are
            self.confidence = torch.tensor(self.confidence).item()

    @property
    def exits_early(self) -> bool:
        """Whether answers at exits are computed."""
        return self.all_exits or self.confidence is not None or self.deadline is not None

    @property
    def key(self) -> tuple[Any, ...]:
        """What queries must have in common to be answered in one call."""
        if self.num_rows == 1:
            return (id(self),)
        draws = (self.select, self.seed) if self.select == "sample" else ()
        max_experts = None if self.at_exits else self.max_experts
        return (self.served.name, self.at_exits, *draws, max_experts, self.stop)

    @property
    def at_exits(self) -> bool:
        """Whether the answer is one of those at exits."""
        return self.exits_early and not self.direct

    @property
    def may_be_direct(self) -> bool:
        """Whether only a deadline asks for answers at exits, and the request says what the answer may cost."""
        threshold = self.confidence is not None or self.served.model.own_confidence is not None
        return self.budget is not None and self.deadline is not None and not self.all_exits and not threshold

    @property
    def effort(self) -> float:
        """The share of the model's full cost; 1 where no budget is stated."""
        return 1.0 if self.budget is None else self.budget.effort

    @property
    def stop(self) -> float | None:
        """How much the output node's rate counts; None: as in training."""
        return None if self.budget is None else self.budget.stop

    def effort_field(self, limited: bool) -> AnswerFields:
        """The effort of an answer, where a budget was stated and no other limit kept the answer from spending it."""
        return {} if self.budget is None or limited else {"effort": round(self.budget.effort, 4)}

    @property
    def num_rows(self) -> int:
        """How many rows one call may take."""
        return 1 if self.exit_every == "layer" else self.served.num_rows

    @property
    def policy(self) -> ExitPolicy:
        """When this query's row exits."""
        confidence = self.served.model.own_confidence if self.confidence is None else self.confidence
        return ExitPolicy(confidence, self.max_experts, self.deadline, self.exit_every)


Delivery = tuple[Query, AnswerFields | Exception, bool]
"""a query, an answer to it or an error, and whether it is the last"""


def answer_queries(queries: list[Query]) -> Iterator[list[Delivery]]:
    """Answer queries with a common key; each step gives what is to be delivered."""
    return answer_at_exits(queries) if queries[0].at_exits else answer_at_end(queries)


def draw_options(queries: list[Query]) -> dict[str, Any]:
    """How experts are chosen, and how many: each row draws as the first of a batch, so that only its input and seed matter."""
    first = queries[0]
    if first.select != "sample":
        return {"select": first.select, "stop": first.stop}
    rows_n = torch.zeros(len(queries), dtype=torch.int64)
    generator = torch.Generator().manual_seed(first.seed)
    return {"select": "sample", "generator": generator, "rows": rows_n, "stop": first.stop}


def answer_at_end(queries: list[Query]) -> Iterator[list[Delivery]]:
    """The answers in one step."""
    inputs, first = torch.cat([query.inputs for query in queries]), queries[0]
    out = first.served.run(inputs, first.max_experts, **draw_options(queries))
    answers = describe(first.served, inputs, out, [False] * len(queries))
    for query, answer, num in zip(queries, answers, most_experts(out, len(queries)), strict=True):
        query.first_answer = perf_counter()
        reached = query.max_experts is not None and num >= query.max_experts
        answer |= query.effort_field(reached) | {"stop": "budget" if reached else "end"}
    yield [(query, answer, True) for query, answer in zip(queries, answers, strict=True)]


def answer_at_exits(queries: list[Query]) -> Iterator[list[Delivery]]:
    """One exit per step, for the rows that continue; an exit is computed only if it could be ready before a row's deadline."""
    inputs, served, first = torch.cat([query.inputs for query in queries]), queries[0].served, queries[0]
    budgets = [query.max_experts for query in queries]
    most = None if None in budgets else max(budget for budget in budgets if budget is not None)
    walk = Walk(lambda: served.exits(inputs, first.exit_every, most, **draw_options(queries)))
    macs_before = 0
    while walk.step is not None:
        step = walk.step
        out, ended_n = step.exit
        if step.number == 0:
            for query in queries:
                query.first_answer = perf_counter()
        highest_n, experts_n = confidences(out.logits.float()).tolist(), most_experts(out, len(queries))
        reasons = [
            query.policy.stop_reason(step, highest, num, ended)
            for query, highest, num, ended in zip(queries, highest_n, experts_n, ended_n.tolist(), strict=True)
        ]
        sent = [row for row, query in enumerate(queries) if not query.cancelled and (reasons[row] or query.all_exits)]
        answers: list[AnswerFields] = []
        if sent or served.codec:
            counted = out._replace(num_exits=torch.full((len(queries),), step.number + 1))
            answers = describe(served, inputs, counted, [query.all_exits for query in queries])
            rows = zip(queries, answers, reasons, strict=True)
            answers = [answer | query.effort_field(reason != "end") for query, answer, reason in rows]
        if served.codec:  # each answer to a text is computed from the start, so that its cost is added to those before
            answers[0]["macs"] += macs_before
            macs_before = answers[0]["macs"]
        delivered: list[Delivery] = [
            (queries[row], answers[row] | ({"stop": reasons[row]} if reasons[row] else {}), reasons[row] is not None)
            for row in sent
        ]
        stays = [row for row, query in enumerate(queries) if not query.cancelled and reasons[row] is None]
        leaves_n = torch.ones(len(queries), dtype=torch.bool)
        leaves_n[stays] = False
        yield delivered
        queries, inputs = [queries[row] for row in stays], inputs[stays]
        walk.leave(leaves_n)


def most_experts(out: Output, num_rows: int) -> list[int]:
    """How many experts are active for each row; for a text, the most of any token."""
    counts = [route.num_active.reshape(num_rows, -1) for route in out.routes]
    return torch.cat(counts, 1).amax(1).tolist()


def describe(served: Served, inputs: Tensor, out: Output, with_path_n: list[bool]) -> list[AnswerFields]:
    """The answers as they are sent; rows marked in `with_path_n` state their nodes and rates, too."""
    probs_nY, experts = out.logits.float().softmax(-1), out.num_experts
    check_finite(served.name, probs_nY)
    longest = max(1, int(max(route.num_active.max() for route in out.routes)))
    # the cost of a sequence is counted step by step: no further than the longest
    short = tuple(
        route if route.nodes is None else route._replace(nodes=route.nodes[..., :longest]) for route in out.routes
    )
    cost = sample_cost(served.model, inputs, out._replace(routes=short)).macs
    if served.codec:  # experts of the last token, cost of the whole text
        experts, cost = experts[:, -1], cost.sum(-1)
    best_n = probs_nY.argmax(-1).tolist()
    rows = zip(probs_nY.tolist(), best_n, experts.tolist(), cost.expand(len(probs_nY)).tolist(), strict=True)
    answers: list[AnswerFields] = [
        {
            "label": served.labels[best],
            "probability": probs[best],
            "probabilities": probs,
            "experts": num,
            "macs": macs,
        }
        for probs, best, num, macs in rows
    ]
    for row, (answer, with_path) in enumerate(zip(answers, with_path_n, strict=True)):
        if with_path:
            answer |= describe_path(served, out, row)
    return answers


def describe_path(served: Served, out: Output, row: int) -> AnswerFields:
    """The nodes of one row, in their order where there is one, and the firing rates of all."""
    nodes: list[list[int]] = []
    for route in out.routes:
        place = (row, -1) if served.codec else row
        active_LN = route.active[place]
        found = active_LN.nonzero().tolist()
        if route.nodes is not None:
            ordered = [list(divmod(node, active_LN.shape[-1])) for node in route.nodes[place].tolist() if node >= 0]
            found = [
                node for node in ordered if node in found
            ]  # at a layer's exit, nodes of later layers are not active yet
        nodes += found
    path: AnswerFields = {"nodes": nodes}
    if served.codec:
        path["token_experts"] = out.num_experts[row].tolist()
    elif out.routes[0].rates is not None:
        path["rates"] = out.routes[0].rates.nodes[row].tolist()
    return path


def check_options(served: Served, options: dict[str, Any]) -> None:
    """Refuse options that a model does not have, as the library does."""
    check_select(served.model, options.get("select"))
    check_greedy(options.get("select"), options.get("experts"), options.get("effort"))
    if served.model.answers_along_the_way:
        return
    rule = f"has no effect on {served.name}, which has no budget; leave it out"
    rules = dict.fromkeys(("select", "max_experts", "experts", "effort"), rule)
    if served.codec:
        rule = f"has no effect on {served.name}, which has one answer only; leave it out"
        rules |= dict.fromkeys(("confidence", "max_ms", "trace", "stream"), rule)
    for name, rule in rules.items():
        value = options.get(name)
        require(value is None or value is False, name, value, rule)  # 0 is a value, too
