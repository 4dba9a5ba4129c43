"""A fixed number of slots in memory, into which a few threads read experts, in the order in which they will be needed.

Three rules decide what is read, and what leaves:

- An expert that a caller waits for is read first; then the plans, the nearest use first. A caller that gives up at some time
  waits its turn: its plan says what is worth most until then. What is in memory, or is being read, is not read again.
- The least recently used expert that no plan needs leaves first; where every expert is needed, the one that is needed last
  (Belady's rule within the plans), and only for one that is needed sooner.
- An expert stays while it is computed with (it is pinned). A caller never waits while it holds a pin, so callers that share a
  pool cannot block each other, however few slots there are.
"""

import os
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from types import TracebackType
from typing import Any

from raytraced.errors import require
from raytraced.store.reader import ExpertReader, aligned_memory, format_size


class LimitError(ValueError):
    """A limit of memory that no expert fits into; the message says the least that works."""


@dataclass
class ReadStats:
    """What a pool did since it was opened; `copy.copy` keeps the numbers of a moment."""

    num_uses: int = 0  # times that an expert was acquired
    num_reads: int = 0  # reads that ended
    num_wasted: int = 0  # read, and left without having been used
    bytes_read: int = 0  # by all reads together
    stall_seconds: float = 0.0  # that callers waited
    num_queued: int = 0  # sum over reads of the reads in progress when each began, itself included


@dataclass
class Timeline:
    """When each read and each wait began and ended, in seconds, and of which expert."""

    reads: list[tuple[float, float, int]] = field(default_factory=list)  # begin, end, number of the expert
    stalls: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each wait of a caller


class ReadPlan:
    """Experts in the order in which a caller will need them; close it, or use it in a `with` statement.

    Args:
        pool: The state of the pool that made the plan with `ExpertPool.expect`.
        order: Numbers of experts, the first to be needed first.
    """

    def __init__(self, pool: "_Pool", order: Sequence[int]) -> None:
        self.pool, self.order = pool, list(order)
        self.uses: dict[int, deque[int]] = defaultdict(deque)  # where in the order each expert still is
        for place, expert in enumerate(self.order):
            self.uses[expert].append(place)
        self.num_used = 0
        self.next = 0  # the first place in the order that was not considered for reading

    def distance(self, expert: int) -> float:
        """How many uses lie before the next use of an expert."""
        places = self.uses.get(expert)
        return places[0] - self.num_used if places else inf

    def is_past(self, place: int) -> bool:
        """Whether the expert at a place in the order was used."""
        places = self.uses.get(self.order[place])
        return not places or places[0] > place

    def covers(self, experts: Iterable[int]) -> bool:
        """Whether all of some experts are still to be used."""
        return all(self.uses.get(expert) for expert in experts)

    def close(self) -> None:
        """Forget what was not used; a second call does nothing."""
        self.pool.forget(self)

    def __enter__(self) -> "ReadPlan":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Pool:
    """The state that callers and reading threads share; `ExpertPool` owns one."""

    def __init__(self, reader: ExpertReader, num_slots: int, num_threads: int, belady: bool) -> None:
        file = reader.file
        self.reader, self.num_threads, self.belady = reader, num_threads, belady
        self.memory = aligned_memory(num_slots * file.run_bytes)
        whole = memoryview(self.memory)
        self.slots = [whole[slot * file.run_bytes : (slot + 1) * file.run_bytes] for slot in range(num_slots)]
        self.free = list(range(num_slots))
        self.slot_of: dict[int, int] = {}  # experts in memory
        self.reading: dict[int, int] = {}  # experts on their way
        self.unused: set[int] = set()  # experts in memory that were not used since they were read
        self.pins: Counter[int] = Counter()
        self.needed: Counter[int] = Counter()  # outstanding uses of all plans
        self.idle: OrderedDict[int, None] = OrderedDict()  # may leave, the least recently used first
        self.held: set[int] = set()  # in memory and not pinned, but needed by a plan or waited for
        self.waited: Counter[int] = Counter()  # experts that callers wait for, and how many callers
        self.urgent: Counter[int] = Counter()  # of these, callers that do not give up
        self.failed: dict[int, Exception] = {}
        self.plans: list[ReadPlan] = []
        self.stats = ReadStats()
        self.timeline: Timeline | None = None
        self.changed = threading.Condition()
        self.threads: list[threading.Thread] = []
        self.closed, self.process = False, os.getpid()

    # What callers do

    def expect(self, order: Sequence[int]) -> ReadPlan:
        plan = ReadPlan(self, order)
        self.check_process()
        with self.changed:
            self.plans.append(plan)
            for expert in plan.order:
                self.needed[expert] += 1
                if self.belady:
                    self.settle(expert)
            self.start()
            self.changed.notify_all()
        return plan

    def forget(self, plan: ReadPlan) -> None:
        with self.changed:
            if plan not in self.plans:
                return
            self.plans.remove(plan)
            for expert, places in plan.uses.items():
                self.needed[expert] -= len(places)
                if expert in self.held:
                    self.settle(expert)
            self.changed.notify_all()

    def acquire(self, experts: Sequence[int], plan: ReadPlan | None, until: float | None) -> list[int]:
        """Wait until one of some experts is in memory, at most until a time; pin all that are, and return them."""
        self.check_process()
        with self.changed:
            self.start()
            ready = [expert for expert in experts if expert in self.slot_of]
            if not ready:
                ready = self.wait(experts, until)
            for expert in ready:
                self.pins[expert] += 1
                self.unused.discard(expert)
                self.stats.num_uses += 1
                if plan is not None and plan in self.plans and plan.uses.get(expert):
                    plan.uses[expert].popleft()
                    plan.num_used += 1
                    self.needed[expert] -= 1
                self.settle(expert)
            return ready

    def wait(self, experts: Sequence[int], until: float | None) -> list[int]:
        began = perf_counter()
        self.waited.update(experts)
        self.urgent.update(experts if until is None else ())
        self.changed.notify_all()
        try:
            while not (ready := [expert for expert in experts if expert in self.slot_of]):
                if self.closed:
                    raise ValueError(f"{self.reader.file.path}: was closed; load the model again")
                if error := next((self.failed[expert] for expert in experts if expert in self.failed), None):
                    raise type(error)(*error.args)  # one for each caller: an error keeps the trace of who raised it
                if until is not None and perf_counter() >= until:
                    return []
                self.changed.wait(None if until is None else max(0.0, until - perf_counter()))
            return ready
        finally:
            self.urgent -= Counter(experts if until is None else ())
            for expert in experts:
                self.waited[expert] -= 1
                if not self.waited[expert]:
                    del self.waited[expert]
                    self.failed.pop(expert, None)
                    self.settle(expert)
            ended = perf_counter()
            self.stats.stall_seconds += ended - began
            if self.timeline is not None:
                self.timeline.stalls.append((began, ended))

    def release(self, experts: Iterable[int]) -> None:
        with self.changed:
            for expert in experts:
                self.pins[expert] -= 1
                self.settle(expert)
            self.changed.notify_all()

    def settle(self, expert: int) -> None:
        """Note whether an expert may leave; it then counts as the most recently used one."""
        self.idle.pop(expert, None)
        self.held.discard(expert)
        if expert not in self.slot_of or self.pins[expert]:
            return
        is_needed = self.needed[expert] and (self.belady or expert in self.unused)
        if is_needed or expert in self.waited:  # a caller that waits for it has not woken up yet
            self.held.add(expert)
        else:
            self.idle[expert] = None

    def check_process(self) -> None:
        """Refuse a forked process, in which nothing reads and the slots are not there."""
        if os.getpid() != self.process:
            raise ValueError(f"{self.reader.file.path}: was opened by another process; load the model in this one")

    # What the reading threads do

    def start(self) -> None:
        if self.closed:
            raise ValueError(f"{self.reader.file.path}: was closed; load the model again")
        while len(self.threads) < self.num_threads:
            thread = threading.Thread(target=self.read_on, name="raytraced-store", daemon=True)
            self.threads.append(thread)
            thread.start()

    def read_on(self) -> None:
        """Read one expert after the other until the pool is closed."""
        while True:
            with self.changed:
                while (job := None if self.closed else self.next_read()) is None:
                    if self.closed:
                        return
                    self.changed.wait()
                expert, slot = job
                self.reading[expert] = slot
                self.stats.num_queued += len(self.reading)
            error, began = None, perf_counter()
            try:
                self.reader.read(expert, self.slots[slot])
            except (OSError, ValueError) as problem:
                error = problem
            with self.changed:
                self.arrived(expert, error)
                if self.timeline is not None:
                    self.timeline.reads.append((began, perf_counter(), expert))
                self.changed.notify_all()

    def next_read(self) -> tuple[int, int] | None:
        """The expert to read next and the slot for it, None if there is none."""
        return self.next_waited(self.urgent) or self.next_planned() or self.next_waited(self.waited)

    def next_waited(self, experts: Iterable[int]) -> tuple[int, int] | None:
        """The first of some experts that callers wait for."""
        for expert in experts:
            if self.is_absent(expert) and expert not in self.failed:
                slot = self.make_room(expert, urgent=True)
                if slot is not None:
                    return expert, slot
        return None

    def next_planned(self) -> tuple[int, int] | None:
        """The expert of all plans whose use is nearest."""
        nearest: ReadPlan | None = None
        for plan in self.plans:
            while plan.next < len(plan.order) and (
                plan.is_past(plan.next) or not self.is_absent(plan.order[plan.next])
            ):
                plan.next += 1
            is_nearer = nearest is None or plan.next - plan.num_used < nearest.next - nearest.num_used
            if plan.next < len(plan.order) and is_nearer:
                nearest = plan
        if nearest is None:
            return None
        expert = nearest.order[nearest.next]
        slot = self.make_room(expert, urgent=False)
        return None if slot is None else (expert, slot)

    def is_absent(self, expert: int) -> bool:
        return expert not in self.slot_of and expert not in self.reading

    def make_room(self, expert: int, urgent: bool) -> int | None:
        """A slot for an expert; None while every slot is of more use as it is."""
        if self.free:
            return self.free.pop()
        if self.idle:
            leaving = next(iter(self.idle))
        else:
            candidates = [one for one in self.held if one not in self.waited]
            if not candidates:
                return None
            leaving = max(candidates, key=self.distance)
            if not urgent and self.distance(leaving) <= self.distance(expert):
                return None
        self.idle.pop(leaving, None)
        self.held.discard(leaving)
        self.stats.num_wasted += leaving in self.unused
        self.unused.discard(leaving)
        return self.slot_of.pop(leaving)

    def distance(self, expert: int) -> float:
        """How many uses lie before the next use of an expert in any plan."""
        return min((plan.distance(expert) for plan in self.plans), default=inf)

    def arrived(self, expert: int, error: Exception | None) -> None:
        slot = self.reading.pop(expert)
        self.stats.num_reads += 1
        self.stats.bytes_read += self.reader.file.run_bytes
        if error is None:
            self.slot_of[expert] = slot
            self.unused.add(expert)
            self.settle(expert)
            return
        self.free.append(slot)
        if expert in self.waited:
            self.failed[expert] = error
        for plan in self.plans:  # the caller that needs it asks for it, and then gets the error
            if plan.next < len(plan.order) and plan.order[plan.next] == expert:
                plan.next += 1

    def close(self) -> None:
        if os.getpid() != self.process:  # the threads and the files are another's
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        self.reader.close()


class ExpertPool:
    """Experts of a store in a limited amount of memory, shared by all threads that compute with them.

    Args:
        reader: Reads the experts.
        memory: The most bytes that experts may take. None: as much as all of them take.
        num_threads: How many reads are in progress at the same time, at most.
        belady: Whether experts that a plan needs stay, the nearest use first; False: the least recently used expert leaves,
            whether a plan needs it or not.
    """

    def __init__(
        self, reader: ExpertReader, memory: int | None = None, num_threads: int = 4, belady: bool = True
    ) -> None:
        file = reader.file
        least, total = file.run_bytes, file.run_bytes * len(file.runs)
        memory = total if memory is None else memory
        if memory < least:
            reader.close()
            words = f"must be at least {format_size(least)}, the size of one expert of {file.path}"
            raise LimitError(f"memory={format_size(memory)}: {words}")
        require(num_threads >= 1, "num_threads", num_threads, "must be at least 1")
        self.file, self.reader = file, reader
        self.num_slots = min(memory // least, len(file.runs))
        self._pool = _Pool(reader, self.num_slots, num_threads, belady)
        # The reading threads hold the state, not this object: they end when no caller can ask for an expert any more.
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def stats(self) -> ReadStats:
        """What the pool did since it was opened."""
        return self._pool.stats

    @property
    def num_in_memory(self) -> int:
        """How many experts are in memory."""
        return len(self._pool.slot_of)

    def record(self) -> Timeline:
        """Note from now on when each read and each wait begins and ends."""
        self._pool.timeline = Timeline()
        return self._pool.timeline

    def expect(self, order: Sequence[int]) -> ReadPlan:
        """Begin to read experts that will be needed, in this order.

        Args:
            order: Numbers of experts, the first to be needed first.

        Returns:
            The plan, to be closed when nothing of it will be used any more.
        """
        return self._pool.expect(order)

    def acquire(self, experts: Sequence[int], plan: ReadPlan | None = None, until: float | None = None) -> list[int]:
        """Wait until at least one of some experts is in memory.

        Args:
            experts: Numbers of experts; those that are missing are read before all others, with `until` after the plans.
            plan: The plan that these uses belong to.
            until: The time (of `time.perf_counter`) at which to give up.

        Returns:
            Those of the experts that are in memory, none if the time is over; they stay until they are released.
        """
        return self._pool.acquire(experts, plan, until)

    def release(self, experts: Iterable[int]) -> None:
        """Let experts leave that `acquire` returned.

        Args:
            experts: Their numbers.
        """
        self._pool.release(experts)

    def slot(self, expert: int) -> memoryview:
        """The memory of an expert that was acquired, padding included."""
        return self._pool.slots[self._pool.slot_of[expert]]

    def close(self) -> None:
        """End the reading threads and close the file; waits for reads in progress. A second call does nothing."""
        self._finalizer()

    def use(self, expert: int, compute: Callable[[memoryview], Any], plan: ReadPlan | None = None) -> Any:
        """Compute with one expert, which is read if it is missing.

        Args:
            expert: Number of the expert.
            compute: Called with the expert's memory, padding included.
            plan: The plan that this use belongs to. Default: none.

        Returns:
            What `compute` returned.
        """
        self.acquire([expert], plan)
        try:
            return compute(self.slot(expert))
        finally:
            self.release([expert])
