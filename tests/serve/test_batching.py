"""Deadlines count from a request's arrival, and steps of other requests do not delay it."""

import asyncio
from time import perf_counter

import pytest

from raytraced.serve import batching
from raytraced.serve.admission import Admission
from raytraced.serve.answering import Query
from raytraced.serve.batching import Worker
from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.metrics import Metrics
from raytraced.serve.middleware import Gate, Traffic
from serve.conftest import some_images


def test_a_request_does_not_wait_for_a_step_at_every_pass_of_the_event_loop(models, monkeypatch):
    steps = 0

    def endless(queries):
        nonlocal steps
        while True:
            steps += 1
            yield [(queries[0], {}, False)]

    async def work() -> int:
        worker = Worker(Metrics())
        working = asyncio.create_task(worker.work())
        worker.submit([Query(models[0], some_images(models[0].image_shape, 1), deliver=lambda *_: None)])
        while steps < 3:
            await asyncio.sleep(0)
        before = steps
        for _ in range(4):  # as many passes as there are from a socket to the worker
            await asyncio.sleep(0)
        working.cancel()
        return steps - before

    monkeypatch.setattr(batching, "answer_queries", endless)
    assert asyncio.run(work()) <= 1


def test_requests_that_come_together_are_all_stamped_before_one_is_read():
    arrived, read = [], []

    async def app(scope, receive, send):
        arrived.append(scope["arrived"])
        read.append(perf_counter())

    async def ask():
        gate = Gate(app, Traffic(), Limits(), {"/"})
        scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", b"localhost")]}
        await asyncio.gather(*(gate(dict(scope), None, None) for _ in range(5)))

    asyncio.run(ask())
    assert len(arrived) == 5
    assert max(arrived) < min(read)


def test_requests_with_a_deadline_are_refused_where_it_would_be_missed():
    admission = Admission()
    admission.check(1e-6, num_others=0)  # an idle server answers whatever the deadline
    admission.observe(0.004, num_others=1)
    admission.check(0.05, num_others=5)
    with pytest.raises(RefusedError, match="max_ms=50: 40 requests are in progress") as refused:
        admission.check(0.05, num_others=40)
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (429, "1")
    for _ in range(200):
        admission.observe(0.004, num_others=39)
    admission.check(0.05, num_others=40)  # it was faster than expected
