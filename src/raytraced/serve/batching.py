"""What computes: always the most urgent step next, rows that may share a call in one call.

Steps run between the server's other doings, in its one thread: models whose steps take less time than two threads take to
change places are the common ones here, and a step that takes longer keeps nobody waiting who does not wait for steps.
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

from raytraced.serve.answering import Asked, Delivery, answer
from raytraced.serve.metrics import Metrics

SENDING = 0.001  # seconds before a deadline at which an answer should leave
TURN = 0.01  # seconds of steps, at most, then those who arrive and leave have theirs
PASSES = 5  # of the event loop, that a request takes until it waits here, or an answer until it has left


@dataclass(eq=False)
class Job:
    """Rows that are answered together, and the steps that are left."""

    asked: list[Asked]
    steps: Iterator[list[Delivery]]

    @property
    def urgent(self) -> float:
        return min(one.urgent for one in self.asked)


class Worker:
    """Takes rows, computes, and hands out and counts what each step gave."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.waiting: dict[tuple[Any, ...], list[tuple[float, int, Asked]]] = {}  # by key, the most urgent first
        self.going: list[Job] = []
        self.number, self.submitted = itertools.count(), asyncio.Event()

    def submit(self, asked: list[Asked]) -> None:
        """Let rows wait for their turn."""
        for one in asked:
            heapq.heappush(self.waiting.setdefault(one.key, []), (one.urgent, next(self.number), one))
        self.submitted.set()

    async def work(self) -> None:
        """Step after step; between two turns requests arrive and answers leave."""
        while True:
            until = perf_counter() + TURN
            while (job := self.take()) is not None:
                if self.step(job) or perf_counter() > until:
                    break
            if job is None:
                self.submitted.clear()
                await self.submitted.wait()
                continue
            for _ in range(PASSES):  # with steps between them each would cost a deadline a whole turn
                await asyncio.sleep(0)

    def take(self) -> Job | None:
        """The most urgent job: one that is going, or one made of rows that wait."""
        while True:
            key = min(self.waiting, key=lambda key: self.waiting[key][0][0], default=None)
            job = min(self.going, key=lambda job: job.urgent, default=None)
            if job is not None and (key is None or job.urgent <= self.waiting[key][0][0]):
                self.going.remove(job)
                return job
            if key is None:
                return None
            if rows := self.next_rows(key):
                return Job(rows, answer(rows))

    def next_rows(self, key: tuple[Any, ...]) -> list[Asked]:
        """As many rows of a key as one call takes, without those that nobody waits for."""
        rows, heap = list[Asked](), self.waiting[key]
        while heap and len(rows) < heap[0][2].num_rows:
            one = heapq.heappop(heap)[2]
            if not one.gone:
                rows.append(one)
        if not heap:
            del self.waiting[key]
        return rows

    @torch.inference_mode()
    def step(self, job: Job) -> bool:
        """One step of a job, and whether it gave anything to send; an error ends all of its rows, and no others."""
        try:
            delivered = next(job.steps, None)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.deliver([(one, error, True) for one in job.asked])
            return True
        if delivered is None:
            return False
        self.metrics.observe("raytraced_batch_rows", len(job.asked))
        self.deliver(delivered)
        done = {id(one) for one, _, last in delivered if last}
        job.asked = [one for one in job.asked if id(one) not in done and not one.gone]
        if job.asked:
            self.going.append(job)
        return bool(delivered)

    def deliver(self, delivered: list[Delivery]) -> None:
        """What a step gave, to those who asked."""
        for delivery in delivered:
            asked, told, last = delivery
            if last and isinstance(told, dict):
                name = asked.served.name
                self.metrics.add("raytraced_answers_total", model=name, stop=told["stop"])
                self.metrics.add("raytraced_experts_total", told["experts"], model=name)
                self.metrics.add("raytraced_multiply_adds_total", told.get("multiply_adds", 0), model=name)
                if asked.deadline is not None:
                    late = max(0.0, perf_counter() - asked.deadline - SENDING)
                    self.metrics.observe("raytraced_overshoot_seconds", late)
            asked.deliver(delivery)
