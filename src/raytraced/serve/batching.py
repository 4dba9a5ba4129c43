"""The loop that computes: the most urgent step is always next, and rows that may share a call share it.

Steps run in the event loop's own thread: for models of this size a change of threads takes longer than a step. A step that
takes long delays requests that wait for steps anyway.
"""

import asyncio
import heapq
import itertools
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from raytraced.serve.answering import Delivery, Query, answer_queries
from raytraced.serve.generation import NotFiniteError
from raytraced.serve.metrics import Metrics
from raytraced.serve.text_batch import TextBatch

SENDING = 0.001  # seconds before a deadline at which an answer should leave
TURN = 0.01  # at most so many seconds of steps, then requests arrive and answers leave
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
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.waiting: dict[tuple[Any, ...], list[tuple[float, int, Query]]] = {}  # by key, the most urgent first
        self.running: list[Job] = []
        self.texts: dict[str, TextBatch] = {}  # by model
        self.number, self.submitted = itertools.count(), asyncio.Event()

    def submit(self, queries: list[Query]) -> None:
        """Queue queries."""
        for query in queries:
            if query.sampling is not None:
                name = query.served.name
                self.texts.setdefault(name, TextBatch(query.served, self.metrics)).add(query)
                continue
            heapq.heappush(self.waiting.setdefault(query.key, []), (query.due, next(self.number), query))
        self.submitted.set()

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
        """As many queries of a key as one call takes, without those that were cancelled."""
        queries, heap = list[Query](), self.waiting[key]
        while heap and len(queries) < heap[0][2].num_rows:
            query = heapq.heappop(heap)[2]
            if not query.cancelled:
                queries.append(query)
        if not heap:
            del self.waiting[key]
        return queries

    @torch.inference_mode()
    def step(self, job: Job | TextBatch) -> bool:
        """One step of a job, and whether it gave anything to send; an error ends the job's queries, and no others."""
        if isinstance(job, TextBatch):  # its errors are answers, too
            tokens = job.step()
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
            if last and isinstance(answer, dict):
                name = query.served.name
                self.metrics.answers.labels(name, answer["stop"]).inc()
                self.metrics.experts.labels(name).inc(answer["experts"])
                self.metrics.macs.labels(name).inc(answer.get("macs", 0))
                if query.deadline is not None:
                    self.metrics.late_seconds.observe(max(0.0, perf_counter() - query.deadline - SENDING))
            query.deliver(delivery)
