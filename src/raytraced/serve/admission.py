"""Which requests with a deadline are accepted: those whose first answer can be expected in time."""

from raytraced.serve.limits import RefusedError

SHARE = 0.05  # of the newest measurement in the running mean
SAFETY = 2.0  # 99 of 100 answers take less than so many times the mean


class Admission:
    """Expects the time to a first answer from the number of requests in progress.

    With a single processor this time grows in proportion to the requests that share it; the factor is measured.
    """

    def __init__(self) -> None:
        self.seconds_per_request = 0.0

    def check(self, max_seconds: float, num_others: int) -> None:
        """Refuse a request whose deadline would probably be missed; an idle server refuses none.

        Args:
            max_seconds: The time within which an answer is due.
            num_others: Other requests in progress.
        """
        expected = SAFETY * self.seconds_per_request * (num_others + 1)
        if num_others and expected > max_seconds:
            rule = f"{num_others} requests are in progress, an answer takes about {1000 * expected:.0f} ms"
            raise RefusedError(
                429, "deadline", f"max_ms={1000 * max_seconds:g}: {rule}; try again later, or allow more"
            )

    def observe(self, seconds: float, num_others: int) -> None:
        """Take one measurement: the time to a first answer, and how many other requests were in progress."""
        newest = seconds / (num_others + 1)
        if not self.seconds_per_request:
            self.seconds_per_request = newest
        self.seconds_per_request += SHARE * (newest - self.seconds_per_request)
