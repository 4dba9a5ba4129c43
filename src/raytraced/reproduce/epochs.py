"""How soon an accuracy is reached: in epochs and in seconds, on validation images. Needs no torch."""

from typing import NamedTuple

from raytraced.reproduce.records import Record, Results, spread
from raytraced.reproduce.variants import NO_RIVALS, is_ours

MARGIN = 0.005  # "the rival's own final validation accuracy minus 0.5" points


class Reached(NamedTuple):
    """When a model first had an accuracy, means over seeds.

    Seconds are at the pace of its fastest epoch: runs share the machine with one another and with other work.
    """

    epochs: float
    seconds: float


def first_reach(record: Record, accuracy: float) -> int | None:
    """The first epoch whose validation accuracy is at least so high."""
    for epoch in record.history:
        if epoch["validation_accuracy"] >= accuracy:
            return int(epoch["epoch"])
    return None


def settled(record: Record) -> int:
    """The epoch at which a run came within the margin of its own best."""
    reached = first_reach(record, max(epoch["validation_accuracy"] for epoch in record.history) - MARGIN)
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
        return f"to {self.target:.1%}: {theirs}, {ours} ({-self.saved:+z.0%} epochs)"


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
    epochs = [first_reach(record, target) or (len(record.history) if cut else None) for record in records]
    known = [one for one in epochs if one is not None]
    if len(known) < len(epochs):
        return None
    mean = spread(known).mean
    return Reached(mean, mean * min(epoch["seconds"] for record in records for epoch in record.history))


def best_rival(results: Results, data: str, group: str = "main", among: tuple[str, ...] | None = None) -> str | None:
    """The rival with the best mean validation accuracy, of all or of some."""
    known = among if among is not None else tuple(results.labels(data, group))
    rivals = [
        label for label in known if not is_ours(label) and label not in NO_RIVALS and results.of(data, label, group)
    ]

    def accuracy(label: str) -> float:
        return spread(one.validation["accuracy"] for one in results.of(data, label, group)).mean

    return max(rivals, key=accuracy) if rivals else None
