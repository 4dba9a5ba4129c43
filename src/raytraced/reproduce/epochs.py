"""How soon an accuracy is reached: in epochs and in seconds, on validation images. Needs no torch."""

from typing import NamedTuple

from raytraced.reproduce.records import Record, Results, spread
from raytraced.reproduce.variants import NO_RIVALS, is_ours

MARGIN = 0.005  # "the rival's own final validation accuracy minus 0.5" points


class Reached(NamedTuple):
    """When a run first had an accuracy; never: None."""

    epochs: float
    seconds: float


def first_reach(record: Record, accuracy: float) -> Reached | None:
    """The first epoch whose validation accuracy is at least so high, and the training time up to its end."""
    seconds = 0.0
    for epoch in record.history:
        seconds += epoch["seconds"]
        if epoch["validation_accuracy"] >= accuracy:
            return Reached(epoch["epoch"], seconds)
    return None


def settled(record: Record) -> Reached:
    """When a run came within the margin of its own best."""
    best = max(epoch["validation_accuracy"] for epoch in record.history)
    reached = first_reach(record, best - MARGIN)
    assert reached is not None
    return reached


class Race(NamedTuple):
    """A rival's final validation accuracy minus the margin, and when the rival and MRE had it, means over seeds."""

    data: str
    rival: str
    target: float
    rival_reached: Reached
    ours: Reached | None  # None: one seed at least never had it

    @property
    def saved(self) -> float | None:
        """The share of epochs that MRE needs less."""
        return None if self.ours is None else 1 - self.ours.epochs / self.rival_reached.epochs

    def tell(self) -> str:
        """The race in one phrase."""
        theirs = f"{self.rival} {self.rival_reached.epochs:.1f} epochs, {self.rival_reached.seconds:.0f} s"
        if self.ours is None or self.saved is None:
            return f"to {self.target:.1%}: {theirs}, MRE never"
        ours = f"MRE {self.ours.epochs:.1f} epochs, {self.ours.seconds:.0f} s"
        return f"to {self.target:.1%}: {theirs}, {ours} ({-self.saved:+.0%} epochs)"


def race(results: Results, data: str, rival: str, group: str = "main") -> Race | None:
    """Let MRE run against a rival; None if either was not run."""
    theirs, ours = results.of(data, rival, group), results.of(data, "mre", group)
    if not theirs or not ours:
        return None
    target = spread(one.history[-1]["validation_accuracy"] for one in theirs).mean - MARGIN
    rival_reached = mean_reach(theirs, target)
    # a seed below the mean by more than the margin never gets there: its whole run is what it took, at least
    rival_reached = rival_reached or mean_reach(theirs, target, cut=True)
    assert rival_reached is not None
    return Race(data, rival, target, rival_reached, mean_reach(ours, target))


def mean_reach(records: list[Record], target: float, cut: bool = False) -> Reached | None:
    """Means over seeds; None if one of them never reaches the target, unless its whole run shall count."""
    reached = []
    for record in records:
        one = first_reach(record, target)
        if one is None and cut:
            one = Reached(len(record.history), sum(epoch["seconds"] for epoch in record.history))
        if one is None:
            return None
        reached.append(one)
    return Reached(*(spread(values).mean for values in zip(*reached, strict=True)))


def best_rival(results: Results, data: str, group: str = "main", among: tuple[str, ...] | None = None) -> str | None:
    """The rival with the best mean validation accuracy, of all or of some."""
    known = among if among is not None else tuple(results.labels(data, group))
    rivals = [
        label for label in known if not is_ours(label) and label not in NO_RIVALS and results.of(data, label, group)
    ]

    def accuracy(label: str) -> float:
        return spread(one.validation["accuracy"] for one in results.of(data, label, group)).mean

    return max(rivals, key=accuracy) if rivals else None
