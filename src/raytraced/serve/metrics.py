"""What the server counts, for Prometheus."""

from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

SECOND_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
LATE_BUCKETS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
NUM_RECENT = 5_000  # tokens whose percentiles are stated
QUANTILES = (0.5, 0.99)
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("raytraced_requests", "requests", ["path", "status"], registry=registry)
        about = "from a request's arrival to the end of its response"
        self.request_seconds = Histogram(
            "raytraced_request_seconds", about, ["path"], buckets=SECOND_BUCKETS, registry=registry
        )
        self.in_progress = Gauge("raytraced_requests_in_progress", "requests in progress", registry=registry)
        about = "answers, by model and reason to stop"
        self.answers = Counter("raytraced_answers", about, ["model", "stop"], registry=registry)
        self.experts = Counter("raytraced_experts", "experts of the answers", ["model"], registry=registry)
        about = "multiply-accumulate operations of the answers"
        self.macs = Counter("raytraced_macs", about, ["model"], registry=registry)
        self.batch_rows = Histogram(
            "raytraced_batch_rows", "rows computed in one step", buckets=ROW_BUCKETS, registry=registry
        )
        about = "how late answers with a deadline were"
        self.late_seconds = Histogram("raytraced_late_seconds", about, buckets=LATE_BUCKETS, registry=registry)
        about = "from a text request's arrival to its first token"
        self.first_token_seconds = Histogram(
            "raytraced_first_token_seconds", about, buckets=SECOND_BUCKETS, registry=registry
        )
        about = "from one token of a text to the next"
        self.next_token_seconds = Histogram(
            "raytraced_next_token_seconds", about, buckets=SECOND_BUCKETS, registry=registry
        )
        self.recent = {"first": deque[float](maxlen=NUM_RECENT), "next": deque[float](maxlen=NUM_RECENT)}
        registry.register(self)

    def count_first_token(self, seconds: float) -> None:
        """Count the time to the first token of a text."""
        self.first_token_seconds.observe(seconds)
        self.recent["first"].append(seconds)

    def count_token(self, seconds: float) -> None:
        """Count the time between two tokens of a text."""
        self.next_token_seconds.observe(seconds)
        self.recent["next"].append(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The percentiles of the last tokens, computed when they are asked for."""
        about = f"seconds to the first token, and between two tokens, of the last {NUM_RECENT:,} tokens"
        family = GaugeMetricFamily("raytraced_token_seconds", about, labels=["token", "quantile"])
        for token, seconds in self.recent.items():
            for share in QUANTILES if seconds else ():
                family.add_metric([token, f"{share:g}"], sorted(seconds)[int(share * (len(seconds) - 1))])
        yield family

    def exposition(self) -> bytes:
        """All values in Prometheus' text format."""
        return generate_latest(self.registry)
