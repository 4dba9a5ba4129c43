"""The pool: what is read, in which order, what leaves, and what callers that share it see."""

import copy
import gc
import os
import random
import signal
import threading
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytraced.files import DamagedFileError
from raytraced.store.layout import GridShape, open_store, write_store
from raytraced.store.pool import ExpertPool, LimitError
from raytraced.store.reader import ExpertReader, format_size, parse_size

NUM, SIZE = 12, 1024  # experts of 4,096 bytes


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "store.safetensors"
    write_store(
        path, {}, {"grid": GridShape(1, NUM)}, lambda grid, layer, number: torch.full((SIZE,), float(number)), ""
    )
    return open_store(path)


class CountingReader(ExpertReader):
    """Notes the order of its reads; `gate` holds them up."""

    def __init__(self, file, error=None):
        super().__init__(file, False)
        self.order, self.gate, self.error = [], threading.Event(), error
        self.gate.set()

    def read(self, expert, target):
        self.gate.wait(10)
        self.order.append(expert)
        if self.error is not None and expert in self.error:
            raise self.error[expert]
        super().read(expert, target)


def open_pool(file, slots, threads=1, belady=True, error=None):
    reader = CountingReader(file, error)
    return ExpertPool(reader, slots * 4096, threads, belady), reader


def first_number(slot):
    return float(torch.frombuffer(slot, dtype=torch.float32)[0])


def use_all(pool, experts, plan=None):
    """Use experts one after the other, each with its own numbers."""
    for expert in experts:
        assert pool.use(expert, first_number, plan) == expert


def test_an_expert_is_read_once_while_it_stays(file):
    pool, reader = open_pool(file, 3)
    use_all(pool, [0, 1, 0, 2, 1, 0, 2])
    assert reader.order == [0, 1, 2]
    assert (pool.stats.num_uses, pool.stats.num_reads, pool.stats.num_wasted) == (7, 3, 0)
    pool.close()


def test_the_least_recently_used_expert_leaves(file):
    pool, reader = open_pool(file, 3)
    use_all(pool, [0, 1, 2, 0, 3, 0, 2, 1])
    assert reader.order == [0, 1, 2, 3, 1]
    pool.close()


@given(st.lists(st.integers(0, NUM - 1), max_size=60), st.integers(1, NUM))
def test_reads_on_demand_are_those_of_least_recently_used(file, uses, slots):
    pool, reader = open_pool(file, slots)
    use_all(pool, uses)
    expected, cache = [], OrderedDict()
    for expert in uses:
        if expert in cache:
            cache.move_to_end(expert)
            continue
        expected.append(expert)
        if len(cache) == slots:
            cache.popitem(last=False)
        cache[expert] = None
    pool.close()
    assert reader.order == expected


def fewest_reads(uses, slots):
    """Belady: on a miss the expert whose next use is farthest leaves."""
    reads, cache = 0, set()
    for place, expert in enumerate(uses):
        if expert in cache:
            continue
        reads += 1
        if len(cache) == slots:
            rest = uses[place:]
            cache.remove(max(cache, key=lambda one: (rest.index(one) if one in rest else len(rest) + 1, one)))
        cache.add(expert)
    return reads


@given(st.lists(st.integers(0, NUM - 1), max_size=40), st.integers(1, NUM), st.integers(1, 3))
def test_a_plan_reads_no_more_than_the_best_order_of_leaving(file, uses, slots, threads):
    pool, reader = open_pool(file, slots, threads)
    with pool.expect(uses) as plan:
        use_all(pool, uses, plan)
    pool.close()
    assert len(reader.order) == fewest_reads(uses, slots)
    assert pool.stats.num_wasted == 0


def test_a_plan_is_read_ahead_in_its_order_as_deep_as_there_are_slots(file):
    pool, reader = open_pool(file, 4)
    plan = pool.expect([5, 3, 5, 8, 1, 9, 2])
    use_all(pool, [5], plan)
    with pool._pool.changed:
        assert pool._pool.changed.wait_for(lambda: len(pool._pool.slot_of) == 4, timeout=10)
    assert reader.order == [5, 3, 8, 1]
    assert pool.num_in_memory == 4
    use_all(pool, [3, 5, 8, 1, 9, 2], plan)
    assert reader.order == [5, 3, 8, 1, 9, 2]
    plan.close()
    plan.close()
    pool.close()


def test_an_expert_that_a_caller_waits_for_is_read_before_all_plans(file):
    pool, reader = open_pool(file, 4)
    reader.gate.clear()
    plan = pool.expect([0, 1, 2, 3])
    asked = threading.Thread(target=use_all, args=(pool, [7]))
    asked.start()
    with pool._pool.changed:
        assert pool._pool.changed.wait_for(lambda: 7 in pool._pool.waited, timeout=10)
    reader.gate.set()
    asked.join(10)
    use_all(pool, [0, 1, 2, 3], plan)
    plan.close()
    assert reader.order[:2] in ([0, 7], [7, 0])
    pool.close()


def test_an_expert_on_its_way_is_not_read_again(file):
    pool, reader = open_pool(file, 4, threads=3)
    reader.gate.clear()
    plans = [pool.expect([6, 2]) for _ in range(3)]
    callers = [threading.Thread(target=use_all, args=(pool, [2, 6], plan)) for plan in plans]
    for caller in callers:
        caller.start()
    reader.gate.set()
    for caller in callers:
        caller.join(10)
    assert sorted(reader.order) == [2, 6]
    pool.close()


def test_without_belady_a_used_expert_leaves_though_a_plan_needs_it(file):
    def reads(belady):
        pool, reader = open_pool(file, 2, belady=belady)
        use_all(pool, [0, 1])
        with pool.expect([2, 0]) as plan:
            use_all(pool, [2, 0], plan)
        pool.close()
        return len(reader.order)

    assert (reads(True), reads(False)) == (3, 4)


def test_what_a_closed_plan_needed_may_leave(file):
    pool, _ = open_pool(file, 2)
    plan = pool.expect([0, 1])
    with pool._pool.changed:
        assert pool._pool.changed.wait_for(lambda: len(pool._pool.slot_of) == 2, timeout=10)
    plan.close()
    with pool.expect([2, 3]) as other:
        use_all(pool, [2, 3], other)
    assert pool.stats.num_wasted == 2
    pool.close()


def test_a_plan_that_no_caller_follows_does_not_block_others(file):
    pool, _ = open_pool(file, 1)
    abandoned = pool.expect([0, 1, 2])
    use_all(pool, [5, 6, 0])
    assert pool.stats.num_reads <= 9  # the plan's own, and each of the others once
    abandoned.close()
    pool.close()


@pytest.mark.parametrize("slots", [1, 2, 5, NUM])
def test_callers_share_a_pool_and_each_sees_its_own_experts(file, slots):
    pool, _ = open_pool(file, slots, threads=3)
    errors = []

    def call(seed):
        try:
            draws = random.Random(seed)
            for _ in range(8):
                uses = [draws.randrange(NUM) for _ in range(10)]
                plan = pool.expect(uses) if seed % 2 else None
                use_all(pool, uses, plan)
                if plan is not None:
                    plan.close()
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not errors
    assert not any(caller.is_alive() for caller in callers)
    assert pool.stats.num_uses == 5 * 80
    pool.close()


def test_a_pinned_expert_stays(file):
    pool, _ = open_pool(file, 2)
    assert pool.acquire([0]) == [0]
    use_all(pool, [1, 2, 3])
    assert first_number(pool.slot(0)) == 0.0
    pool.release([0])
    pool.close()


def test_all_that_have_arrived_are_given_at_once(file):
    pool, _ = open_pool(file, 4)
    use_all(pool, [0, 2])
    assert pool.acquire([0, 1, 2]) == [0, 2]
    pool.release([0, 2])
    pool.close()


def test_a_caller_with_a_deadline_is_given_nothing_when_it_is_over(file):
    pool, reader = open_pool(file, 2)
    reader.gate.clear()
    assert pool.acquire([0], until=0.0) == []
    reader.gate.set()
    use_all(pool, [0])
    pool.close()


def test_a_caller_that_gives_up_at_some_time_waits_its_turn_behind_the_plans(file):
    pool, reader = open_pool(file, 5)
    reader.gate.clear()
    plan = pool.expect([0, 1, 2, 3])
    found = []
    asked = threading.Thread(target=lambda: found.extend(pool.acquire([7], until=1e9)))
    asked.start()
    with pool._pool.changed:
        assert pool._pool.changed.wait_for(lambda: 7 in pool._pool.waited, timeout=10)
    reader.gate.set()
    asked.join(10)
    assert found == [7]
    assert reader.order == [0, 1, 2, 3, 7]
    pool.release(found)
    plan.close()
    pool.close()


def test_a_caller_that_gives_up_at_some_time_is_not_kept_out_by_plans_that_fill_the_memory(file):
    pool, _ = open_pool(file, 1)
    with pool.expect([0]) as plan:
        with pool._pool.changed:
            assert pool._pool.changed.wait_for(lambda: 0 in pool._pool.slot_of, timeout=10)
        assert pool.acquire([5], plan, until=1e9) == [5]
        pool.release([5])
    pool.close()


@pytest.mark.parametrize("planned", [False, True])
def test_a_disk_error_is_one_line_for_each_caller_and_others_go_on(file, planned):
    error = {4: OSError("store.safetensors: expert grid.0.4 cannot be read (input/output error)")}
    pool, _ = open_pool(file, 2, error=error)
    plan = pool.expect([1, 4, 2]) if planned else None
    use_all(pool, [1], plan)
    for _ in range(2):
        with pytest.raises(OSError, match=r"expert grid\.0\.4 cannot be read \(input/output error\)"):
            pool.use(4, first_number, plan)
    use_all(pool, [2, 1], plan)
    pool.close()


def test_an_error_of_the_system_names_the_file_and_the_expert(file, monkeypatch):
    reader = ExpertReader(file, False)

    def broken(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", broken)
    pool = ExpertPool(reader, 4096)
    with pytest.raises(OSError, match=r"store\.safetensors: expert grid\.0\.3 cannot be read \(input/output error\)"):
        pool.use(3, first_number)
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here gives a read error")
def test_an_error_that_the_system_returns_is_one_line(file):
    reader = ExpertReader(file, False)
    os.dup2(os.open("/proc/self/mem", os.O_RDONLY), reader.descriptors[0])  # nothing is mapped at these addresses
    pool = ExpertPool(reader, 4096)
    with pytest.raises(OSError, match=r"store\.safetensors: expert grid\.0\.3 cannot be read \(input/output error\)$"):
        pool.use(3, first_number)
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_is_killed_while_it_reads_leaves_nothing_behind(tmp_path):
    path = tmp_path / "store.safetensors"
    write_store(path, {}, {"grid": GridShape(1, NUM)}, lambda *_: torch.ones(SIZE), "")
    before, (receiving, sending) = path.read_bytes(), os.pipe()
    child = os.fork()
    if not child:
        pool, reader = open_pool(open_store(path), 4, threads=2)
        found = pool.use(0, first_number)
        reader.gate.clear()
        pool.expect([1, 2, 3])
        with pool._pool.changed:
            pool._pool.changed.wait_for(lambda: len(pool._pool.reading) == 2, timeout=10)
        os.write(sending, b"reads" if found == 1 else b"wrong")
        signal.pause()
    assert os.read(receiving, 5) == b"reads"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    for descriptor in (receiving, sending):
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_refused_in_one_line(file):
    pool, _ = open_pool(file, 2)
    use_all(pool, [0, 1])
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:  # neither the slots nor the reading threads are here
        words = b"no error"
        try:
            pool.use(0, first_number)
        except ValueError as error:
            words = str(error).encode()
        os.write(sending, words)
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(receiving, 1000).decode().endswith("was opened by another process; load the model in this one")
    use_all(pool, [2, 0])
    pool.close()
    for descriptor in (receiving, sending):
        os.close(descriptor)


def test_reads_that_come_in_pieces_are_put_together(file, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr("os.preadv", lambda descriptor, buffers, offset: whole(descriptor, [buffers[0][:1000]], offset))
    pool = ExpertPool(ExpertReader(file, False), 4096)
    assert pool.use(3, first_number) == 3
    monkeypatch.setattr("os.preadv", lambda descriptor, buffers, offset: 0)
    with pytest.raises(DamagedFileError, match="cut: ends inside expert"):
        pool.use(4, first_number)
    pool.close()


def test_a_limit_below_one_expert_is_refused_with_the_least_that_works(file):
    with pytest.raises(
        LimitError, match=r"memory=4\.1 KB: must be at least 4\.1 KB, the size of one expert of .*store"
    ):
        ExpertPool(ExpertReader(file, False), 4095)
    pool = ExpertPool(ExpertReader(file, False), 4096)
    assert pool.num_slots == 1
    pool.close()


def test_a_larger_limit_takes_no_more_memory_than_all_experts(file):
    pool = ExpertPool(ExpertReader(file, False), 10**9)
    assert pool.num_slots == NUM
    assert len(pool._pool.memory) == NUM * 4096
    pool.close()


def test_a_pool_that_is_let_go_ends_its_threads(file):
    pool, _ = open_pool(file, 2, threads=2)
    use_all(pool, [0, 1])
    threads, state = list(pool._pool.threads), weakref.ref(pool._pool)
    assert all(thread.is_alive() for thread in threads)
    del pool
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    del threads
    gc.collect()
    assert state() is None


def test_a_closed_pool_refuses_in_one_line(file):
    pool, _ = open_pool(file, 2)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="was closed; load the model again"):
        pool.use(0, first_number)


def test_the_timeline_has_every_read_and_every_wait(file):
    pool, _ = open_pool(file, 2)
    line, before = pool.record(), copy.copy(pool.stats)
    use_all(pool, [0, 1, 0])
    assert sorted(read[2] for read in line.reads) == [0, 1]
    assert all(began <= ended for began, ended, _ in line.reads)
    assert len(line.stalls) == 2
    assert pool.stats.num_reads - before.num_reads == 2
    pool.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 GB", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500mb", 5 * 10**8),
        ("12k", 12000),
        ("4096", 4096),
        (7, 7),
        ("3 B", 3),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size("memory", text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-2 GB", "2 XB", "1e9", "nan", "inf GB", "0", "0.0001", 0, -5, "2,5 GB", 2.5, True]
)
def test_what_is_not_a_size_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"memory=.*must be"):
        parse_size("memory", text)


@given(st.integers(1, 10**13))
def test_a_size_that_is_printed_is_enough_when_it_is_typed(size):
    assert parse_size("memory", format_size(size)) >= size
