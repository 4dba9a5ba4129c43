"""Texts of one model that are generated together: they join and leave between two tokens.

Each has its own cache, length, budget, seed and deadline. The first pass of a text, over its prompt, is computed alone; from
then on one call computes a token of every text that has the same budget, and no text has an effect on another's bytes.

Axes: n texts, V vocabulary.
"""

import sys
import traceback
from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor

from raytraced.models.caches import TextCaches
from raytraced.models.gpt import GPT
from raytraced.models.planning import plan_words
from raytraced.models.store_reading import following, read_ahead
from raytraced.router import Call
from raytraced.serve.answering import PATIENCE, AnswerFields, Delivery, Query
from raytraced.serve.generation import Continuation, NotFiniteError, check_finite, draw_tokens
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import Served
from raytraced.store.experts import StoredExperts
from raytraced.store.pool import ReadPlan

MOST_PROMPTS = 4  # prompts per step: those that wait for their next token must not wait for all that begin
MARGIN = 1.5  # the next step is assumed to take so many times as long as the last


class RunningText:
    """A query, and its text so far."""

    def __init__(self, query: Query) -> None:
        assert query.sampling is not None
        self.query, self.sampling = query, query.sampling
        self.text = Continuation(query.served, query.inputs, query.sampling, query.seed, query.max_experts, query.stop)
        self.pending = self.text.pending()
        self.last_token: float | None = None
        self.ended = False

    @property
    def reads_several(self) -> bool:
        """Whether the next pass is over a prompt, or over the last half of a text that has filled the context."""
        return self.last_token is None or len(self.pending) > 1


class TextBatch:
    """The texts of one model that are in progress.

    Args:
        served: The language model.
        metrics: Where times are counted.
    """

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self.served, self.metrics = served, metrics
        self.texts: list[RunningText] = []
        self.ahead: dict[int, ReadPlan] = {}  # by the first text of a call of the next step: what is read for it

    def add(self, query: Query) -> None:
        """Let a text join; it takes part from the next step on."""
        self.texts.append(RunningText(query))

    @property
    def queries(self) -> list[Query]:
        """The queries in progress."""
        return [one.query for one in self.texts]

    @property
    def due(self) -> float:
        """When the most urgent text is due."""
        return min(one.query.due for one in self.texts)

    def step(self) -> list[Delivery]:
        """One token of every text that is past its prompt, and the first one of some that are not."""
        began = perf_counter()
        self.texts = [one for one in self.texts if not one.query.cancelled]
        delivered = list[Delivery]()
        plans, self.ahead = self.ahead, {}
        for texts in self.calls():
            try:
                delivered += self.compute(texts, began, plans.pop(id(texts[0]), None))
                self.read_ahead(texts)
            except Exception as error:
                if not isinstance(error, NotFiniteError):
                    traceback.print_exc(file=sys.stderr)
                delivered += [(one.query, error, True) for one in texts]
                for one in texts:
                    one.ended = True
        for plan in plans.values():  # of texts that ended, or run in another call
            plan.close()
        self.texts = [one for one in self.texts if not one.ended]
        return delivered

    def read_ahead(self, texts: list[RunningText]) -> None:
        """Begin to read the experts of the tokens that were just drawn, of all texts of a call, if experts are in a store."""
        model = self.served.model
        assert isinstance(model, GPT)
        next_texts = [one for one in texts if not one.ended and not one.reads_several]
        if not next_texts or not model.path_follows_token or not isinstance(model.layer.experts, StoredExperts):
            return
        first = next_texts[0]
        call = Call("greedy", first.query.max_experts, stop=first.text.stop)
        tokens, before = ([one.pending[0] for one in next_texts], [one.text.before_last() for one in next_texts])
        paths = plan_words(model, torch.tensor(tokens), torch.tensor(before), call)
        plan = read_ahead(model.layer.experts, paths)
        if plan is not None:
            self.ahead[id(first)] = plan

    def calls(self) -> Iterator[list[RunningText]]:
        """The texts of each call of the model in this step."""
        by_budget: dict[tuple[int | None, float | None], list[RunningText]] = {}
        prompts = list[RunningText]()
        for one in self.texts:
            if one.reads_several:
                prompts.append(one)
            else:
                by_budget.setdefault((one.query.max_experts, one.text.stop), []).append(one)
        for one in sorted(prompts, key=lambda one: one.query.due)[:MOST_PROMPTS]:
            yield [one]
        num = self.served.num_texts
        for texts in by_budget.values():
            for start in range(0, len(texts), num):
                yield texts[start : start + num]

    def compute(self, texts: list[RunningText], began: float, ahead: ReadPlan | None = None) -> list[Delivery]:
        """The next token of some texts, in one call; `ahead` is what is being read for them."""
        delivered = list[Delivery]()
        first = texts[0]
        if len(texts) == 1 and first.last_token is None and (first.sampling.score_prompt or not first.sampling.length):
            delivered.append(self.score_prompt(first))
            if first.ended:
                return delivered
        assert isinstance(self.served.model, GPT)
        with following(self.served.model.layer.experts, ahead):
            logits_nV, experts = self.run_model(texts)
        self.metrics.batch_rows.observe(len(texts))
        finite = logits_nV.isfinite().all(-1).tolist()
        tokens = draw_tokens(logits_nV.nan_to_num() if not all(finite) else logits_nV, [one.text for one in texts])
        now = perf_counter()
        for row, one in enumerate(texts):
            if finite[row]:
                delivered.append(self.take(one, tokens[row], logits_nV[row], experts[row], began, now))
                continue
            one.ended = True
            try:
                check_finite(self.served.name, logits_nV[row])
            except NotFiniteError as error:
                delivered.append((one.query, error, True))
        return delivered

    def run_model(self, texts: list[RunningText]) -> tuple[Tensor, list[int]]:
        """The logits of the next token of each text (n, V), and the number of experts of its last token."""
        model = self.served.model
        tokens = torch.tensor([one.pending for one in texts])
        caches = [one.text.cache for one in texts]
        cache = caches[0] if len(texts) == 1 else TextCaches(caches)
        first = texts[0]
        out = model(tokens, max_experts=first.query.max_experts, stop=first.text.stop, cache=cache)
        return out.logits[:, -1], out.num_experts[:, -1].tolist()

    def score_prompt(self, one: RunningText) -> Delivery:
        """What is stated about the prompt's own tokens, before the first new one."""
        prompt = [token.fields() for token in one.text.score_prompt()] if one.sampling.score_prompt else []
        one.ended = one.sampling.length == 0
        ended = {"text": "", "experts": 0, "stop": "length"} | effort_of_text(one.query) if one.ended else {}
        return one.query, {"prompt": prompt} | ended, one.ended

    def take(self, one: RunningText, token: int, logits_V: Tensor, experts: int, began: float, now: float) -> Delivery:
        """Give a text its next token; the text ends at its length, a stop string, or before its deadline."""
        query = one.query
        generated = one.text.add(token, logits_V, experts)
        if not generated.stop and query.deadline is not None and now + MARGIN * (now - began) > query.deadline:
            generated = one.text.finish(generated, "deadline")
        one.ended = generated.stop is not None
        if one.last_token is not None:
            self.metrics.count_token(now - one.last_token)
        one.last_token = now
        if not one.ended:
            one.pending = one.text.pending()
            query.due = now + PATIENCE if query.deadline is None else query.deadline  # behind those that wait
        return query, generated.fields() | (effort_of_text(query) if one.ended else {}), one.ended


def effort_of_text(query: Query) -> AnswerFields:
    """The effort of a whole text, where a budget was stated; with a largest number of experts, tokens may have spent less."""
    return query.effort_field(query.max_experts is not None)
