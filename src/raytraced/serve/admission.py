"""Which requests with a deadline are accepted: those whose answer can be expected in time, 99 of 100."""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from math import ceil
from time import perf_counter

from raytraced.serve.answering import Query
from raytraced.serve.limits import RefusedError

SHARE = 0.05  # of the newest measurement in a running mean
PERCENTILE = 0.995  # half of the misses that are allowed: what happens behind the server's door is not measured
REPLY_PERCENTILE = 0.95  # rarer delays are part of the margin; here they would take time from every computation
NUM_NEWEST = 500  # values of which a percentile is taken
UNMEASURED = 50  # after so many without an answer the oldest value is removed, since nothing new is measured
DOUBT = 0.998  # of an expected time that is left after each query that it kept from the end
REFUSED = 0.1  # share of the way to 1 by which a refusal raises the pressure
ANSWERED = 0.02  # share by which an answer lowers it
CALM = 5.0  # seconds after the last refusal at which there is no pressure any more
IDLE = 0.001  # seconds that a request may have waited to be read by a server that counts as idle


class Percentile:
    """A percentile of the newest values of a series; 0 before the first, and never below."""

    def __init__(self, share: float) -> None:
        self.share, self.num_refusals = share, 0
        self.newest, self.ordered = deque[float](), list[float]()

    @property
    def value(self) -> float:
        """The percentile; of fewer than 200 values the 99.5th is the largest."""
        num = len(self.ordered)
        return max(0.0, self.ordered[ceil(self.share * num) - 1]) if num else 0.0

    def add(self, value: float) -> None:
        """Take one value of the series."""
        self.num_refusals = 0
        self.newest.append(value)
        insort(self.ordered, value)
        if len(self.newest) > NUM_NEWEST:
            self.remove_oldest()

    def count_refusal(self) -> None:
        """Take note of a request of which nothing will be known."""
        self.num_refusals += 1
        if self.num_refusals % UNMEASURED == 0:
            self.remove_oldest()

    def remove_oldest(self) -> None:
        """Forget the oldest value."""
        if self.newest:
            self.ordered.pop(bisect_left(self.ordered, self.newest.popleft()))


class ServiceTimes:
    """The measured seconds of computation per input, by model and by whether it answers at exits."""

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, bool], float] = defaultdict(float)
        self.step_seconds: defaultdict[str, float] = defaultdict(float)  # of a step of a model's texts
        self.spared = 0.0  # seconds of all computations so far beyond those of the least efforts that requests allowed

    def observe(self, query: Query, seconds: float) -> None:
        """Take the seconds that one input took, at its effort."""
        key, newest = (query.served.name, query.at_exits), seconds / query.effort
        self.seconds[key] = running_mean(self.seconds[key], newest)
        if query.budget is not None:
            self.spared += seconds * (1 - query.budget.least / query.effort)

    def doubt(self, name: str) -> None:
        """Lower what an answer at the end takes where that kept a query from being answered so.

        It was measured when the machine was slower, perhaps, and would not be measured again.
        """
        self.seconds[name, False] *= DOUBT

    def expect(self, query: Query, least: bool = False) -> float:
        """The seconds that an input will take at its effort, or at the least that its request allows; 0 if not measured."""
        effort = query.budget.least if least and query.budget is not None else query.effort
        return effort * self.seconds.get((query.served.name, query.at_exits), 0.0)

    def observe_step(self, name: str, seconds: float) -> None:
        """Take the seconds of one step of a model's texts."""
        self.step_seconds[name] = running_mean(self.step_seconds[name], seconds)


class Admission:
    """Expects the time to an answer: the work that is ahead of it, and the handling of all requests in progress.

    How much longer answers take is followed at a percentile, so that the margin fits the machine and its other load.
    """

    def __init__(self) -> None:
        self.handling_seconds = 0.0  # per request in progress: to read it, and to send its answer
        self.margin = Percentile(PERCENTILE)
        self.reply = Percentile(REPLY_PERCENTILE)  # from an answer to the moment at which it is sent
        self.times = ServiceTimes()
        self.raised, self.refused_at = 0.0, 0.0  # the pressure when it last moved, and the moment of the last refusal

    @property
    def pressure(self) -> float:
        """How much of the effort that a request allows to be saved should be saved, 0 … 1."""
        return self.raised if perf_counter() - self.refused_at < CALM else 0.0

    def expect(self, ahead: float, num_others: int) -> float:
        """The mean of the seconds from now to an answer.

        Args:
            ahead: Seconds of computation that come before the answer, its own included.
            num_others: Other requests in progress.
        """
        return ahead + self.handling_seconds * (num_others + 1)

    def check(
        self, max_seconds: float, num_others: int, elapsed: float = 0.0, ahead: float = 0.0, waited: float = 0.0
    ) -> None:
        """Refuse a request whose deadline would probably be missed; an idle server refuses none.

        Args:
            max_seconds: The time within which an answer is due.
            num_others: Other requests in progress.
            elapsed: Seconds since the request arrived.
            ahead: Seconds of computation that come before the answer, its own included.
            waited: Seconds that the request may have waited before it was read.
        """
        expected = elapsed + self.expect(ahead, num_others) + self.margin.value
        had_to_wait = waited > IDLE and expected - waited <= max_seconds  # an idle server would have been in time
        if (num_others or had_to_wait) and expected > max_seconds:
            self.margin.count_refusal()
            self.raised = self.pressure + REFUSED * (1 - self.pressure)
            self.refused_at = perf_counter()
            rule = f"{num_others} requests are in progress, an answer takes up to {1000 * expected:.0f} ms"
            raise RefusedError(
                429, "deadline", f"max_ms={1000 * max_seconds:g}: {rule}; try again later, or allow more"
            )

    def observe(self, seconds: float, num_others: int, ahead: float = 0.0) -> None:
        """Take one measurement: the time from the check to an answer, and what the check knew."""
        self.raised -= ANSWERED * self.raised
        self.margin.add(seconds - self.expect(ahead, num_others))
        self.handling_seconds = running_mean(self.handling_seconds, max(0.0, seconds - ahead) / (num_others + 1))


def running_mean(mean: float, newest: float) -> float:
    """The mean with one more value; the first value is the mean."""
    return mean + SHARE * (newest - mean) if mean else newest
