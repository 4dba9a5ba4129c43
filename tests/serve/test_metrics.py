"""Counts are told as Prometheus reads them."""

from raytraced.serve.metrics import Metrics


def test_a_histogram_counts_what_is_at_most_each_bound():
    metrics = Metrics()
    for rows in (1, 2, 3, 64, 65):
        metrics.observe("raytraced_batch_rows", rows)
    metrics.add("raytraced_answers_total", 2, model='a"\n\\', stop="end")
    lines = metrics.text().splitlines()
    found = {
        bound: num for bound, num in (line.split('le="')[1].split('"} ') for line in lines if "rows_bucket" in line)
    }
    assert found == {"1": "1", "2": "2", "4": "3", "8": "3", "16": "3", "32": "3", "64": "4", "+Inf": "5"}
    assert "raytraced_batch_rows_sum 135" in lines
    assert "raytraced_batch_rows_count 5" in lines
    assert r'raytraced_answers_total{model="a\"\n\\",stop="end"} 2' in lines
    assert "# TYPE raytraced_batch_rows histogram" in lines
