"""The loop that computes: the most urgent step is always next, and rows that may share a call share it.

Steps run in the event loop's own thread: for models of this size a change of threads takes longer than a step. A step that
takes long delays requests that wait for steps anyway.
"""

import asyncio
import heapq
import itertools
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from raytraced.serve.admission import Admission
from raytraced.serve.answering import Delivery, Query, answer_queries
from raytraced.serve.generation import NotFiniteError
from raytraced.serve.lowering import lower_efforts, lower_text, relieve
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import Served
from raytraced.serve.text_batch import TextBatch

SENDING = 0.003  # seconds before a deadline at which an answer should leave: the way to the client is not measured
TURN = 0.01  # at most so many seconds of steps, then requests arrive and answers leave
SLOWER = 1.2  # an answer is computed at once where it fits before its deadline, were it to take so many times as long
PASSES = 5  # passes of the event loop that a request takes to get here, or an answer to leave


@dataclass(eq=False)
class Job:
    """Queries that are answered together, and the steps that remain."""

    queries: list[Query]
    steps: Iterator[list[Delivery]]

    @property
    def due(self) -> float:
        """When the first of its queries is due."""
        return min(query.due for query in self.queries)

    def step(self) -> list[Delivery] | None:
        """What the next step gives; None after the last."""
        return next(self.steps, None)


class Worker:
    """Takes queries, computes, and delivers and counts what each step gives.

    Args:
        metrics: Where answers are counted.
        admission: What is known about times.
        adaptive: Whether efforts are lowered where deadlines would be missed.
    """

    def __init__(self, metrics: Metrics, admission: Admission | None = None, adaptive: bool = False) -> None:
        self.metrics, self.admission, self.adaptive = metrics, admission or Admission(), adaptive
        self.times, self.is_planned = self.admission.times, True
        self.waiting: dict[tuple[Any, ...], list[tuple[float, int, Query]]] = {}  # by key, the most urgent first
        self.running: list[Job] = []
        self.texts: dict[str, TextBatch] = {}  # by model
        self.number, self.submitted = itertools.count(), asyncio.Event()

    def submit(self, queries: list[Query]) -> None:
        """Queue queries."""
        self.is_planned = False
        for query in queries:
            if query.sampling is not None:
                name = query.served.name
                if self.adaptive:
                    lower_text(query, self.times.step_seconds[name])
                self.texts.setdefault(name, TextBatch(query.served, self.metrics)).add(query)
                continue
            if self.adaptive:
                relieve(query, self.admission.pressure)
            query.direct = query.may_be_direct and self.fits(query)
            if query.may_be_direct and not query.direct:
                self.times.doubt(query.served.name)
            self.push(query)
        self.submitted.set()

    @torch.inference_mode()
    def warm_up(self, models: Sequence[Served]) -> None:
        """Measure what an answer at the end takes, for classifiers with a table of budgets.

        Until that is known, answers within a deadline are computed exit by exit, which takes longer.
        """
        for served in models:
            if served.codec is not None or not served.model.card.dial:
                continue
            pixels = torch.zeros(1, *served.image_shape, dtype=torch.uint8)
            for _ in range(2):  # the first call prepares what all others use
                began = perf_counter()
                served.run(pixels, None)
                self.times.seconds[served.name, False] = perf_counter() - began

    def push(self, query: Query) -> None:
        """Let a query wait with those that may share a call with it."""
        heapq.heappush(self.waiting.setdefault(query.key, []), (query.due, next(self.number), query))

    def fits(self, query: Query, num_before: int = 0) -> bool:
        """Whether an answer at the end is expected before the deadline, computed with so many others; False if not known."""
        assert query.deadline is not None
        name, measured = query.served.name, self.times.seconds
        seconds = measured.get((name, False)) or measured.get((name, True), 0.0)  # all exits take longer than the end
        return 0 < SLOWER * query.effort * seconds * (num_before + 1) < query.deadline - perf_counter()

    def seconds_ahead(self, queries: list[Query]) -> float:
        """The computation that comes before the answers to some queries that are due at the same time, their own included."""
        own = sum(self.times.expect(query, self.adaptive) for query in queries)
        return own + self.seconds_before(queries[0].due)

    def seconds_before(self, due: float) -> float:
        """The computation of all that is due before a moment; where efforts may be lowered, that of the least efforts."""
        ahead = [query for query in self.waiting_queries() if query.due <= due]
        running = [query for job in self.running if job.due <= due for query in job.queries]
        steps = [self.times.step_seconds[name] for name, batch in self.texts.items() if batch.texts]
        waiting = sum(self.times.expect(query, self.adaptive) for query in ahead)
        return waiting + sum(map(self.times.expect, running)) + sum(steps)

    @property
    def spared(self) -> float:
        """Seconds of all computations so far that lower efforts would have saved; 0 where efforts are not lowered."""
        return self.times.spared if self.adaptive else 0.0

    def waiting_queries(self) -> list[Query]:
        """The queries that wait, in any order."""
        return [query for heap in self.waiting.values() for _, _, query in heap if not query.cancelled]

    def lower_efforts(self) -> None:
        """Lower the efforts of waiting queries where deadlines would be missed."""
        self.is_planned = True
        start = perf_counter() + sum(self.times.expect(query) for job in self.running for query in job.queries)
        start += self.admission.reply.value
        waiting = self.waiting_queries()
        if lower_efforts(waiting, start, self.times, self.admission.handling_seconds):
            self.waiting = {}
            for query in waiting:
                query.direct = query.may_be_direct and self.fits(query)
                self.push(query)

    async def work(self) -> None:
        """Compute step after step; between two turns requests arrive and answers leave."""
        while True:
            until = perf_counter() + TURN
            while (job := self.take()) is not None:
                if self.step(job) or perf_counter() > until:
                    break
            if job is None:
                self.submitted.clear()
                await self.submitted.wait()
                continue
            for _ in range(PASSES):  # a step between any two of them would delay each request by all of the steps
                await asyncio.sleep(0)

    def take(self) -> Job | TextBatch | None:
        """The most urgent job: a running one, texts in progress, or a new one of waiting queries."""
        if self.adaptive and not self.is_planned:
            self.lower_efforts()
        while True:
            key = min(self.waiting, key=lambda key: self.waiting[key][0][0], default=None)
            jobs: list[Job | TextBatch] = [*self.running, *(batch for batch in self.texts.values() if batch.texts)]
            job = min(jobs, key=lambda job: job.due, default=None)
            if job is not None and (key is None or job.due <= self.waiting[key][0][0]):
                if isinstance(job, Job):
                    self.running.remove(job)
                return job
            if key is None:
                return None
            if queries := self.next_queries(key):
                return Job(queries, answer_queries(queries))

    def next_queries(self, key: tuple[Any, ...]) -> list[Query]:
        """As many queries of a key as one call takes, without those that were cancelled.

        Of queries whose answers are computed at once, as many as fit before the first deadline. Where not even one fits any
        more, it is answered at exits; at the first one where others wait.
        """
        queries, heap = list[Query](), self.waiting[key]
        while heap and len(queries) < heap[0][2].num_rows:
            if queries and queries[0].direct and not self.fits(queries[0], len(queries)):
                break
            query = heapq.heappop(heap)[2]
            if not query.cancelled:
                queries.append(query)
        if not heap:
            del self.waiting[key]
        if len(queries) == 1 and queries[0].direct and not self.fits(queries[0]):
            queries[0].direct = False
            if self.waiting:  # one exit after the other would take the time of those that can still be computed at once
                queries[0].deadline = perf_counter()
        return queries

    @torch.inference_mode()
    def step(self, job: Job | TextBatch) -> bool:
        """One step of a job, and whether it gave anything to send; an error ends the job's queries, and no others."""
        began = perf_counter()
        if isinstance(job, TextBatch):  # its errors are answers, too
            tokens = job.step()
            self.times.observe_step(job.served.name, perf_counter() - began)
            self.deliver(tokens)
            return bool(tokens)
        try:
            delivered = job.step()
        except NotFiniteError as error:
            self.deliver([(query, error, True) for query in job.queries])
            return True
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.deliver([(query, error, True) for query in job.queries])
            return True
        if delivered is None:
            return False
        self.metrics.batch_rows.observe(len(job.queries))
        seconds = (perf_counter() - began) / len(job.queries)
        for query in job.queries:
            query.seconds += seconds
        for query, _, last in delivered:
            if last:
                self.times.observe(query, query.seconds)
        self.deliver(delivered)
        done = {id(query) for query, _, last in delivered if last}
        job.queries = [query for query in job.queries if id(query) not in done and not query.cancelled]
        if job.queries:
            self.running.append(job)
        return bool(delivered)

    def deliver(self, delivered: list[Delivery]) -> None:
        """Hand out what a step gave."""
        for delivery in delivered:
            query, answer, last = delivery
            query.delivered = perf_counter()
            if last and isinstance(answer, dict):
                name = query.served.name
                self.metrics.answers.labels(name, answer["stop"]).inc()
                self.metrics.experts.labels(name).inc(answer["experts"])
                self.metrics.macs.labels(name).inc(answer.get("macs", 0))
                if query.deadline is not None:
                    self.metrics.late_seconds.observe(max(0.0, perf_counter() - query.deadline - SENDING))
            query.deliver(delivery)
