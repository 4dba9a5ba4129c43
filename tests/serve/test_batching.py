"""Deadlines count from when requests arrived, and steps of others do not stand between a request and its answer."""

import asyncio
from time import perf_counter

from raytraced.serve import batching
from raytraced.serve.answering import Asked
from raytraced.serve.batching import Worker
from raytraced.serve.guard import Guard, Traffic
from raytraced.serve.limits import Limits
from raytraced.serve.metrics import Metrics
from serve.conftest import some_images


def test_a_request_does_not_wait_for_a_step_at_every_pass_of_the_event_loop(models, monkeypatch):
    steps = 0

    def endless(asked):
        nonlocal steps
        while True:
            steps += 1
            yield [(asked[0], {}, False)]

    async def work() -> int:
        worker = Worker(Metrics())
        working = asyncio.create_task(worker.work())
        worker.submit([Asked(models[0], some_images(models[0].image_shape, 1), deliver=lambda *_: None)])
        while steps < 3:
            await asyncio.sleep(0)
        before = steps
        for _ in range(4):  # as many passes as there are from a socket to the worker
            await asyncio.sleep(0)
        working.cancel()
        return steps - before

    monkeypatch.setattr(batching, "answer", endless)
    assert asyncio.run(work()) <= 1


def test_those_who_come_together_have_all_arrived_before_one_is_read():
    arrived, read = [], []

    async def app(scope, receive, send):
        arrived.append(scope["arrived"])
        read.append(perf_counter())

    async def ask():
        guard = Guard(app, Traffic(), Limits(), {"/"})
        scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", b"localhost")]}
        await asyncio.gather(*(guard(dict(scope), None, None) for _ in range(5)))

    asyncio.run(ask())
    assert len(arrived) == 5
    assert max(arrived) < min(read)
