"""Prometheus' own parser reads the server's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from raytraced.serve.metrics import Metrics


def test_a_histogram_counts_values_up_to_each_bound():
    metrics = Metrics()
    for rows in (1, 2, 3, 64, 65):
        metrics.batch_rows.observe(rows)
    metrics.answers.labels('a"\n\\', "end").inc(2)
    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    rows = families["raytraced_batch_rows"]
    assert rows.type == "histogram"
    found = {one.labels["le"]: one.value for one in rows.samples if one.name.endswith("_bucket")}
    assert found == {"1.0": 1, "2.0": 2, "4.0": 3, "8.0": 3, "16.0": 3, "32.0": 3, "64.0": 4, "+Inf": 5}
    (answers,) = [one for one in families["raytraced_answers"].samples if one.name == "raytraced_answers_total"]
    assert (answers.labels, answers.value) == ({"model": 'a"\n\\', "stop": "end"}, 2)


def test_two_servers_in_one_process_count_apart():
    one, other = Metrics(), Metrics()
    one.experts.labels("a").inc()
    assert b'raytraced_experts_total{model="a"} 1.0' in one.exposition()
    assert b'raytraced_experts_total{model="a"}' not in other.exposition()
