"""Deadlines count from a request's arrival, and steps of other requests do not delay it."""

import asyncio
import random
import socket
from time import perf_counter

import pytest
import torch

from raytraced.serve import batching
from raytraced.serve.admission import CALM, NUM_NEWEST, UNMEASURED, Admission, Percentile, ServiceTimes
from raytraced.serve.answering import Query
from raytraced.serve.app import Server
from raytraced.serve.batching import Worker
from raytraced.serve.budgets import Budget
from raytraced.serve.clock import TimedLoop
from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.lowering import lower_efforts, relieve
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
    for _ in range(50):
        admission.observe(0.004, num_others=1)
    admission.check(0.05, num_others=5)
    with pytest.raises(RefusedError, match="max_ms=50: 40 requests are in progress") as refused:
        admission.check(0.05, num_others=40)
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (429, "1")
    with pytest.raises(RefusedError):  # most of the time is over already
        admission.check(0.05, num_others=5, elapsed=0.045)
    with pytest.raises(RefusedError):  # others are computed before
        admission.check(0.05, num_others=5, ahead=0.045)
    for _ in range(200):
        admission.observe(0.004, num_others=39)
    admission.check(0.05, num_others=40)  # it was faster than expected


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_99_of_100_admitted_requests_are_answered_in_time_whatever_the_noise(noise):
    rng, admission, late = random.Random(0), Admission(), list[bool]()
    num_refused = 0
    for _ in range(20_000):
        num_others, ahead = rng.randrange(40), 0.001 * rng.randrange(20)
        seconds = 0.001 * (num_others + 1) + ahead + rng.expovariate(1 / noise)
        try:
            admission.check(0.1, num_others, ahead=ahead)
        except RefusedError:
            num_refused += 1
            continue
        admission.observe(seconds, num_others, ahead)
        late.append(seconds > 0.1)
    assert sum(late[1000:]) < 0.01 * len(late[1000:])
    assert num_refused < 0.9 * 20_000


def test_a_margin_follows_the_newest_values_and_refusals_forget_the_oldest():
    margin = Percentile(0.995)
    assert margin.value == 0.0
    for value in [0.3] + [0.001] * 100:
        margin.add(value)
    assert margin.value == 0.3  # the largest of so few
    for _ in range(UNMEASURED):
        margin.count_refusal()
    assert margin.value == 0.001  # nothing was measured meanwhile: the first, slow answer does not count any more
    for _ in range(10 * UNMEASURED):
        margin.count_refusal()
        margin.add(0.001)
    assert len(margin.newest) == NUM_NEWEST  # refusals between answers remove nothing
    for value in [0.02] * 3 + [0.001] * (NUM_NEWEST - 3):
        margin.add(value)
    assert margin.value == 0.02  # the third largest of 500
    margin.add(0.001)
    assert margin.value == 0.001
    assert len(margin.newest) == len(margin.ordered) == NUM_NEWEST


def test_a_request_that_waited_unread_is_refused_though_none_is_in_progress():
    admission = Admission()
    admission.check(0.05, num_others=0, elapsed=0.06)  # idle: an image took long to decode
    with pytest.raises(RefusedError, match="max_ms=50: 0 requests are in progress, an answer takes up to 60 ms"):
        admission.check(0.05, num_others=0, elapsed=0.06, waited=0.04)
    admission.check(1e-9, num_others=0, elapsed=0.06, waited=0.04)  # no server could be in time: the wait is no reason


def test_a_request_that_would_be_late_is_refused_before_its_fields_are_checked(models, monkeypatch):
    server = Server(models[:1], Limits(decoders=0))
    engine, scope = server.engine, {"path": "/api/predict", "arrived": perf_counter(), "waited": 0.0}
    engine.traffic.in_progress = 1
    checked = []
    monkeypatch.setattr(engine.worker, "seconds_before", lambda due: checked.append(due - scope["arrived"]) or 0.2)
    with pytest.raises(RefusedError, match="max_ms=100: 1 requests are in progress, an answer takes up to 20"):
        engine.check_body(scope, b'{"max_ms": 100, "image": "no image"}')
    assert checked == [pytest.approx(0.1)]
    engine.check_body(scope, b'{"max_ms": 1000, "image": []}')
    assert scope["json"] == {"max_ms": 1000, "image": []}  # parsed once
    for body in (b'{"image": []}', b'{"max_ms": 100', b'["max_ms"]', b'{"max_ms": "1"}', b'{"max_ms": true}',
                 b'{"max_ms": -1}', b'{"max_ms": NaN}', b'{"max_ms": null}', b'["max_ms", ' + b"[" * 50_000):  # fmt: skip
        engine.check_body(scope, body)  # the check of the fields refuses these


def test_a_deadline_counts_from_when_the_loop_last_read_the_clock():
    loop = TimedLoop()

    async def receive():
        reader, writer = socket.socketpair()
        found = loop.create_future()

        def read():
            loop.remove_reader(reader)
            found.set_result(loop.clock.earliest)

        loop.add_reader(reader, read)
        await asyncio.sleep(0.01)
        sent = perf_counter()
        writer.send(b"x")
        while perf_counter() < sent + 0.02:  # a computation, during which the byte waits
            pass
        earliest = await found
        reader.close()
        writer.close()
        return sent, earliest, perf_counter()

    try:
        sent, earliest, after = loop.run_until_complete(receive())
    finally:
        loop.close()
    assert earliest <= sent < after - 0.015


ROWS = [
    {"stop": 1.0, "experts": 2.0, "macs": 20.0, "loss": 0.5},
    {"stop": 0.25, "experts": 4.0, "macs": 30.0, "loss": 0.2},
    {"stop": 0.0625, "experts": 6.0, "macs": 40.0, "loss": 0.1},
]
FLAT = [row | {"loss": 0.1 + row["loss"] / 100} for row in ROWS]


def waiting_query(served, rows, lowest, deadline):
    budget = Budget({"rows": rows}, 1.0, 0.0625, lowest)
    return Query(served, torch.zeros(1), lambda _: None, budget=budget, deadline=deadline, direct=True)


def test_the_cheapest_loss_is_lowered_first_and_no_more_than_needed(models):
    served, other = models[:2]
    times = ServiceTimes()
    for one in (served, other):
        times.seconds[one.name, False] = 0.010

    def efforts(late, lowest=0.5):
        queries = [waiting_query(served, ROWS, lowest, 99.999), waiting_query(other, FLAT, lowest, 99.999)]
        queries.append(waiting_query(served, ROWS, 1.0, 100.0))  # allows no other effort
        start = 100.0 + late - 0.030
        assert lower_efforts(queries, start, times, 0.0) == (late > 0 and lowest < 1)
        return [query.budget.effort for query in queries]

    assert efforts(-1.0) == [1.0, 1.0, 1.0]
    assert efforts(0.002) == [1.0, 0.75, 1.0]  # the other model loses less
    assert efforts(0.004) == [1.0, 0.5, 1.0]
    assert efforts(0.006) == [0.75, 0.5, 1.0]
    assert efforts(1.0) == [0.5, 0.5, 1.0]  # too late in any case
    assert efforts(0.002, lowest=1.0) == [1.0, 1.0, 1.0]


def test_refusals_lower_efforts_and_answers_raise_them_again(models):
    admission = Admission()

    def effort(lowest):
        query = waiting_query(models[0], ROWS, lowest, 100.0)
        relieve(query, admission.pressure)
        return query.budget.effort

    assert effort(0.5) == 1.0
    for _ in range(4):
        with pytest.raises(RefusedError):
            admission.check(0.05, num_others=1, elapsed=0.06)
    assert (effort(0.5), effort(1.0)) == (0.75, 1.0)
    for _ in range(50):
        with pytest.raises(RefusedError):
            admission.check(0.05, num_others=1, elapsed=0.06)
    assert (effort(0.5), effort(0.75), effort(1.0)) == (0.5, 0.75, 1.0)
    for _ in range(500):
        admission.observe(0.001, num_others=0)
    assert 0 < admission.pressure < 1e-3
    with pytest.raises(RefusedError):
        admission.check(0.05, num_others=1, elapsed=0.06)
    assert admission.pressure > 0.05
    admission.refused_at -= CALM  # long ago: an idle server saves nothing
    assert (admission.pressure, effort(0.5)) == (0.0, 1.0)
    plain, adaptive = (Worker(Metrics(), Admission(), adaptive) for adaptive in (False, True))
    for worker in (plain, adaptive):
        worker.admission.raised, worker.admission.refused_at = 1.0, perf_counter()
        query = waiting_query(models[0], ROWS, 0.5, perf_counter() + 60)
        worker.submit([query])
        assert query.budget.effort == (0.5 if worker is adaptive else 1.0)


def test_time_beyond_the_least_effort_does_not_count_as_delay(models):
    times = ServiceTimes()
    query = waiting_query(models[0], ROWS, 0.5, 100.0)
    times.observe(query, 0.010)
    assert times.spared == pytest.approx(0.005)
    query.budget = query.budget.lowered()  # three quarters of the whole
    times.observe(query, 0.009)
    assert times.spared == pytest.approx(0.005 + 0.003)
    times.observe(waiting_query(models[0], ROWS, 1.0, 100.0), 0.010)
    assert times.spared == pytest.approx(0.008)
    plain, adaptive = (Worker(Metrics(), Admission(), adaptive) for adaptive in (False, True))
    for worker in (plain, adaptive):
        worker.times.spared = 1.0
        assert worker.spared == (1.0 if worker is adaptive else 0.0)


def test_queries_that_can_still_meet_their_deadline_run_first(models):
    worker = Worker(Metrics())
    worker.times.seconds[models[0].name, False] = 0.010
    for num_others in (0, 1):
        late, other = (waiting_query(models[0], ROWS, 1.0, perf_counter() + left) for left in (0.005, 60.0))
        deadline = late.deadline
        for query in (late, other)[: num_others + 1]:
            worker.push(query)
        assert worker.next_queries(late.key) == [late]
        assert not late.direct
        assert (late.deadline < deadline) == bool(num_others)  # its first answer is its last
        worker.waiting.clear()
