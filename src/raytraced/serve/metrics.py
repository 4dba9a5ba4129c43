"""Counts and times in the text format of Prometheus."""

from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate

Labels = tuple[tuple[str, object], ...]
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
OVERSHOOT = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
ROWS = (1, 2, 4, 8, 16, 32, 64)
ABOUT = {
    "raytraced_requests_total": ("counter", "requests, by path and status"),
    "raytraced_request_seconds": ("histogram", "from a request's arrival to the end of its response"),
    "raytraced_answers_total": ("counter", "answers, by model and why it stopped"),
    "raytraced_experts_total": ("counter", "experts in the answers"),
    "raytraced_multiply_adds_total": ("counter", "multiply-adds that ran for the answers"),
    "raytraced_batch_rows": ("histogram", "rows that were computed in one step"),
    "raytraced_overshoot_seconds": ("histogram", "by how much answers with a deadline were late"),
    "raytraced_under_way": ("gauge", "requests under way"),
}
BOUNDS = {
    "raytraced_request_seconds": SECONDS,
    "raytraced_overshoot_seconds": OVERSHOOT,
    "raytraced_batch_rows": ROWS,
}


class Metrics:
    """What was counted so far, by name and labels."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self.histograms: dict[tuple[str, Labels], list[float]] = {}  # how many up to each bound, and beyond; their sum

    def add(self, name: str, value: float = 1, **labels: object) -> None:
        """Count on."""
        self.counts[name, tuple(labels.items())] += value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Put a value among those of a histogram."""
        key, bounds = (name, tuple(labels.items())), BOUNDS[name]
        if key not in self.histograms:
            self.histograms[key] = [0.0] * (len(bounds) + 2)
        counts = self.histograms[key]
        counts[bisect_left(bounds, value)] += 1
        counts[-1] += value

    def text(self) -> str:
        """All of it."""
        lines = []
        for name, (kind, about) in ABOUT.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            lines += [
                f"{name}{told(labels)} {value:.12g}" for (key, labels), value in self.counts.items() if key == name
            ]
            for (key, labels), (*counts, total) in self.histograms.items():
                if key == name:
                    for bound, num in zip((*BOUNDS[name], "+Inf"), accumulate(counts), strict=True):
                        lines.append(f"{name}_bucket{told((*labels, ('le', bound)))} {num:.12g}")
                    lines.append(f"{name}_sum{told(labels)} {total:.12g}")
                    lines.append(f"{name}_count{told(labels)} {sum(counts):.12g}")
        return "\n".join(lines) + "\n"


def told(labels: Labels) -> str:
    """Labels as they are written."""

    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
