"""No result depends on how many threads there are, who calls, or whether the process forked."""

import os
import signal
import threading

import pytest
import torch

import forked
from kernels.both_paths import compiled, make_case, run
from raytraced import kernels

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"compiled kernels {kernels.why_not()}")


@pytest.fixture
def set_threads():
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


def outcome(batch=300, **options):
    """Everything a call and its backward pass give."""
    case = make_case(4, 7, batch, **options)
    weights = [torch.ones(batch, 4, 7), torch.ones(batch, 4, 7), torch.ones(batch)]
    sequence, gradients = run(compiled, case, weights)
    return [*sequence[:3], *sequence.rates, *gradients]


def assert_identical(these, those):
    for this, that in zip(these, those, strict=True):
        assert torch.equal(this, that)


@pytest.mark.parametrize("batch", [1, 33, 300, 2000])
def test_threads_change_no_bit(set_threads, batch):
    set_threads(1)
    alone = outcome(batch)
    for num_threads in (2, 5):
        set_threads(num_threads)
        assert_identical(outcome(batch), alone)


def test_a_part_of_a_batch_draws_as_in_the_whole():
    routing, entry_BN, options = make_case(4, 8, 100)
    whole = compiled(routing, entry_BN, **options)
    part = compiled(routing, entry_BN[60:90], **{**options, "rows_B": torch.arange(60, 90)})
    assert torch.equal(part.nodes, whole.nodes[60:90])
    assert torch.equal(part.rates.nodes, whole.rates.nodes[60:90])


def test_rows_default_to_the_position_in_the_batch():
    routing, entry_BN, options = make_case(4, 8, 50)
    counted = compiled(routing, entry_BN, **options)
    default = compiled(routing, entry_BN, **{**options, "rows_B": None})
    assert torch.equal(counted.nodes, default.nodes)


def test_callers_on_many_threads_do_not_disturb_each_other(set_threads):
    set_threads(2)
    expected = [outcome(200, seed=seed) for seed in range(4)]
    found = [None] * 4

    def work(seed):
        for _ in range(5):
            found[seed] = outcome(200, seed=seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for this, that in zip(found, expected, strict=True):
        assert_identical(this, that)


def num_threads_of_this_process():
    return len(os.listdir("/proc/self/task"))


def answers_of_a_forked_child():
    """0 where a process with a running pool, and a child that it forks, draw the same nodes."""
    torch.set_num_threads(2)
    case = make_case(4, 8, 400)
    with torch.no_grad():
        expected = compiled(case.routing, case.entry, **case.options).nodes  # the parent's pool is running
    child = os.fork()
    if child == 0:
        signal.alarm(50)  # it would outlive a test that has given up
        status = 1
        try:
            with torch.no_grad():
                nodes = compiled(case.routing, case.entry, **case.options).nodes
            # Not with torch.equal: PyTorch's own thread pool does not survive the fork.
            status = 0 if nodes.tolist() == expected.tolist() and num_threads_of_this_process() == 2 else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_forked_child_gets_the_same_result_with_a_pool_of_its_own():
    # In a process of its own: threads of other libraries, which other tests have started, can make a fork wait without end.
    ended = forked.run(answers_of_a_forked_child, timeout=60)
    assert ended.returncode == 0, ended.stderr
