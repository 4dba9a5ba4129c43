"""Counts and times in the text format of Prometheus."""

from collections import defaultdict

Labels = tuple[tuple[str, object], ...]
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
    "raytraced_request_seconds": (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0),
    "raytraced_overshoot_seconds": (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
    "raytraced_batch_rows": (1, 2, 4, 8, 16, 32, 64),
}


class Metrics:
    """What was counted so far, by name, what stands behind the name, and labels."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, Labels], float] = defaultdict(float)

    def add(self, name: str, value: float = 1, **labels: object) -> None:
        """Count on."""
        self.counts[name, "", tuple(labels.items())] += value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Put a value among those of a histogram: how many are at most each bound, their sum and their number."""
        known, bounds = tuple(labels.items()), list[float | str]((*BOUNDS[name], "+Inf"))
        for bound in bounds:
            self.counts[name, "_bucket", (*known, ("le", bound))] += value <= float(bound)
        self.counts[name, "_sum", known] += value
        self.counts[name, "_count", known] += 1

    def text(self) -> str:
        """All of it."""
        lines = []
        for name, (kind, about) in ABOUT.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            for (key, suffix, labels), value in self.counts.items():
                if key == name:
                    lines.append(f"{name}{suffix}{tell_labels(labels)} {value:.12g}")
        return "\n".join(lines) + "\n"


def tell_labels(labels: Labels) -> str:
    """Labels as they are written."""

    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels) + "}" if labels else ""
