"""From inputs to answers, step by step: after each step every row may stop, because it is sure, late, at its end or gone.

Axes: n rows that go on, Y classes or tokens, L layers, N experts a layer.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from raytraced.cost import sample_cost
from raytraced.models.gpt import GPT
from raytraced.models.output import LookAt, Output
from raytraced.serve.models import Served
from raytraced.words import require

Answer = dict[str, Any]
PATIENCE = 0.1  # seconds after which a request without a deadline is as urgent as one that is due


@dataclass(eq=False)
class Asked:
    """One input, and when its answer is the last one."""

    served: Served
    inputs: Tensor  # (1, …)
    deliver: Callable[["Delivery"], None]
    select: str | None = None
    seed: int = 0
    max_experts: int | None = None
    sure: float | None = None
    look: LookAt = "expert"
    deadline: float | None = None
    every: bool = False
    """whether each answer along the way is wanted"""
    drawing: dict[str, Any] | None = None
    """for text to be generated: the options of GPT.generate"""
    gone: bool = False
    """nobody waits any more"""
    urgent: float = field(default_factory=lambda: perf_counter() + PATIENCE)

    def __post_init__(self) -> None:
        if self.deadline is not None:
            self.urgent = self.deadline
        if self.sure is not None:  # as the probabilities are rounded
            self.sure = torch.tensor(self.sure).item()

    @property
    def along(self) -> bool:
        """Whether to look at answers along the way."""
        return self.every or self.sure is not None or self.deadline is not None

    @property
    def key(self) -> tuple[Any, ...]:
        """What rows must have in common to be answered in one call."""
        if self.num_rows == 1:
            return (id(self),)
        draws = (self.select, self.seed) if self.select == "sample" else ()
        return (self.served.name, self.along, *draws, None if self.along else self.max_experts)

    @property
    def num_rows(self) -> int:
        """How many rows one call may take."""
        return 1 if self.look == "layer" or self.drawing is not None else self.served.num_rows

    def stop(self, surest: float, ended: bool, reached: bool, next_end: float) -> str | None:
        """Why this answer is the last, None if it is not; `next_end` is when the next one could be there."""
        sure = self.served.model.own_sure if self.sure is None else self.sure
        if sure is not None and surest >= sure:
            return "sure"
        if ended or reached:
            return "budget" if reached else "end"
        return "deadline" if self.deadline is not None and next_end > self.deadline else None


Delivery = tuple[Asked, Answer | Exception, bool]
"""who asked, an answer that is wanted or a fault, and whether it is the last"""


def answer(asked: list[Asked]) -> Iterator[list[Delivery]]:
    """Answer rows with a common key; each step gives what is to be delivered."""
    first = asked[0]
    if first.drawing is not None:
        return go_on(first, **first.drawing)
    return look_along(asked) if first.along else at_once(asked)


def draws_of(asked: list[Asked]) -> dict[str, Any]:
    """How experts are chosen: every row draws as the first of a batch, an answer is a function of its own input and seed."""
    first = asked[0]
    if first.select != "sample":
        return {"select": first.select}
    rows_n = torch.zeros(len(asked), dtype=torch.int64)
    return {"select": "sample", "generator": torch.Generator().manual_seed(first.seed), "rows": rows_n}


def at_once(asked: list[Asked]) -> Iterator[list[Delivery]]:
    """The answers in one step."""
    inputs, first = torch.cat([one.inputs for one in asked]), asked[0]
    out = first.served.run(inputs, first.max_experts, **draws_of(asked))
    told = describe(first.served, inputs, out)
    reached_n = reached(out, [one.max_experts for one in asked])
    for one, at_end in zip(told, reached_n, strict=True):
        one["stop"] = "budget" if at_end else "end"
    yield [(one, answer, True) for one, answer in zip(asked, told, strict=True)]


def look_along(asked: list[Asked]) -> Iterator[list[Delivery]]:
    """One look a step, at rows that go on; a look begins only if it could end before a row's deadline."""
    inputs, served, first = torch.cat([one.inputs for one in asked]), asked[0].served, asked[0]
    budgets = [one.max_experts for one in asked]
    most = None if None in budgets else max(budget for budget in budgets if budget is not None)
    looks = served.looks(inputs, first.look, most, **draws_of(asked))
    kept_n: Tensor | None = None
    number, before = 0, 0
    while asked:
        began = perf_counter()
        out, ended_n = next(looks) if kept_n is None else looks.send(kept_n)
        surest_n = out.logits.float().softmax(-1).amax(-1).tolist()
        reached_n = reached(out, [one.max_experts for one in asked])
        now = perf_counter()
        next_end, told, stays = now + 1.5 * (now - began), [], []
        for row, one in enumerate(asked):
            stop = one.stop(surest_n[row], bool(ended_n[row]), reached_n[row], next_end)
            if not one.gone and stop is None:
                stays.append(row)
            if not one.gone and (stop or one.every):
                told.append((row, stop))
        answers: list[Answer] = []
        if told or served.codec:
            counted = out._replace(num_looks=torch.full((len(asked),), number + 1))
            answers = describe(served, inputs, counted, any(one.every for one in asked))
        if served.codec:  # of texts each look is computed anew: it costs as much again
            answers[0]["multiply_adds"] += before
            before = answers[0]["multiply_adds"]
        delivered: list[Delivery] = [
            (asked[row], answers[row] | ({"stop": stop} if stop else {}), stop is not None) for row, stop in told
        ]
        kept_n = torch.tensor(stays, dtype=torch.int64)
        asked, inputs, number = [asked[row] for row in stays], inputs[kept_n], number + 1
        yield delivered


def go_on(one: Asked, length: int, temperature: float, top_p: float) -> Iterator[list[Delivery]]:
    """One token a step."""
    model, codec, decoder = one.served.model, one.served.codec, getincrementaldecoder("utf-8")(errors="replace")
    assert isinstance(model, GPT)
    assert codec is not None
    drawn = model.generate(
        one.inputs,
        length,
        temperature=temperature,
        top_p=top_p,
        max_experts=one.max_experts,
        generator=torch.Generator().manual_seed(one.seed),
    )
    began = perf_counter()
    for number, (token_1, experts_1) in enumerate(drawn, 1):
        now = perf_counter()
        late = one.deadline is not None and now + 1.5 * (now - began) > one.deadline
        stop = {"stop": "length" if number == length else "deadline"} if number == length or late else {}
        text = decoder.decode(codec.bytes_of[int(token_1)], final=bool(stop))
        yield [(one, {"text": text, "token": int(token_1), "experts": int(experts_1)} | stop, bool(stop))]
        if stop or one.gone:
            return
        began = perf_counter()
        one.urgent = began + PATIENCE if one.deadline is None else one.deadline  # behind those that wait


def reached(out: Output, budgets_n: list[int | None]) -> list[bool]:
    """Whether each row has used its budget up: of a text, for any token in any block."""
    counts = [route.num_active.reshape(len(budgets_n), -1) for route in out.routes]
    most_n = torch.cat(counts, 1).amax(1).tolist()
    return [budget is not None and most >= budget for most, budget in zip(most_n, budgets_n, strict=True)]


def describe(served: Served, inputs: Tensor, out: Output, whole: bool = False) -> list[Answer]:
    """The answers as they are sent; `whole`: with the nodes and their rates."""
    probs_nY, experts = out.logits.float().softmax(-1), out.num_experts
    longest = max(1, int(max(route.num_active.max() for route in out.routes)))
    # the account goes through the sequences step by step: no further than the longest
    short = tuple(
        route if route.nodes is None else route._replace(nodes=route.nodes[..., :longest]) for route in out.routes
    )
    cost = sample_cost(served.model, inputs, out._replace(routes=short)).multiply_adds
    if served.codec:  # of the last token, and of all of the text
        experts, cost = experts[:, -1], cost.sum(-1)
    best_n = probs_nY.argmax(-1).tolist()
    rows = zip(probs_nY.tolist(), best_n, experts.tolist(), cost.expand(len(probs_nY)).tolist(), strict=True)
    answers: list[Answer] = [
        {
            "label": served.labels[best],
            "probability": probs[best],
            "probabilities": probs,
            "experts": num,
            "multiply_adds": multiply_adds,
        }
        for probs, best, num, multiply_adds in rows
    ]
    if whole:
        for row, one in enumerate(answers):
            one |= path_of(served, out, row)
    return answers


def path_of(served: Served, out: Output, row: int) -> Answer:
    """The nodes of one row, in their order where there is one, and the firing rates of all."""
    nodes: list[list[int]] = []
    for block, route in enumerate(out.routes):
        place = (row, -1) if served.codec else row
        active_LN = route.active[place]
        found = active_LN.nonzero().tolist()
        if route.nodes is not None:
            ordered = [list(divmod(node, active_LN.shape[-1])) for node in route.nodes[place].tolist() if node >= 0]
            found = [node for node in ordered if node in found]  # after a layer, the nodes of those below are to come
        nodes += [[block, *node] for node in found] if served.codec else found
    path: Answer = {"nodes": nodes}
    if served.codec:
        path["token_experts"] = out.num_experts[row].tolist()
    elif out.routes[0].rates is not None:
        path["rates"] = out.routes[0].rates.nodes[row].tolist()
    return path


def check_asked(served: Served, given: dict[str, Any]) -> None:
    """Refuse options that a model does not know, as the library does."""
    served.model.check_select(given.get("select"))
    if served.model.answers_along_the_way:
        return
    rule = f"only for models that answer along the way, {served.name} does not"
    rules = {"select": rule, "max_experts": rule}
    if served.codec:
        rules |= dict.fromkeys(("sure", "max_ms", "trace", "stream"), f"{served.name} has one answer only")
    for name, rule in rules.items():
        value = given.get(name)
        require(value is None or value is False, name, value, rule)  # a threshold of 0 is one
