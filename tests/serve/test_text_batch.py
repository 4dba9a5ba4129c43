"""Texts join and leave a batch between two tokens, and no bit of one depends on the others."""

import random
from time import perf_counter

import pytest
import torch

import raytraced
from raytraced.models.caches import KVCache, TextCaches
from raytraced.routers.prefixes import FEW_ROWS
from raytraced.serve import text_batch
from raytraced.serve.answering import Query
from raytraced.serve.generation import NotFiniteError, Sampling
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import Served, sums_alike, texts_are_independent
from raytraced.serve.text_batch import MOST_PROMPTS, TextBatch


@pytest.fixture(scope="module", params=[1, 2], ids=["one token", "two tokens"])
def served(request):
    torch.manual_seed(0)
    sizes = {"dim": 48, "num_heads": 3, "depth": 3, "context": 24, "hidden": 40, "num_experts": 5}
    options = sizes | {"path_tokens": request.param}  # how many tokens determine a path
    return Served("gpt-mre", raytraced.build("gpt-mre", **options).eval(), "")


def a_query(served, number: int, **options) -> Query:
    """One of many different texts."""
    rng = random.Random(number)
    inputs = torch.tensor([[rng.randrange(256) for _ in range(rng.randrange(1, 20))]])
    sampling = Sampling(
        rng.randrange(1, 40),
        rng.choice((0, 0.7, 1.5)),
        rng.choice((0.5, 1.0)),
        rng.choice(((), (b"e", b"\x00\x01"))),
        top_logprobs=3,
        score_prompt=rng.random() < 0.2,
    )
    values = {"seed": number, "max_experts": rng.choice((None, None, 2, 0)), "sampling": sampling}
    return Query(served, inputs, deliver=lambda *_: None, **(values | options))


@torch.inference_mode()
def generate(batch: TextBatch, arrivals: dict[int, list[Query]]) -> dict[Query, list[object]]:
    """All answers to queries that join before the steps of these numbers."""
    answers: dict[Query, list[object]] = {query: [] for queries in arrivals.values() for query in queries}
    step = 0
    while batch.texts or step <= max(arrivals):
        for query in arrivals.get(step, ()):
            batch.add(query)
        for query, answer, _ in batch.step():
            answers[query].append(answer)
        step += 1
    return answers


def alone(served, query: Query) -> list[object]:
    (answers,) = generate(TextBatch(served, Metrics()), {0: [query]}).values()
    return answers


def test_a_text_is_the_same_bit_for_bit_whatever_else_is_in_the_batch(served):
    assert served.num_texts == FEW_ROWS
    arrivals = {step: [a_query(served, 10 * step + number) for number in range(step % 4)] for step in range(14)}
    metrics = Metrics()
    answers = generate(TextBatch(served, metrics), arrivals)
    assert len(answers) > 15
    for query, found in answers.items():
        assert found == alone(served, a_query(served, query.seed))  # log-probabilities, too
        assert found[-1]["stop"] in ("length", "stop")
    largest = max(bucket for bucket in (1, 2, 4, 8) if rows_above(metrics, bucket))
    assert largest >= 4, "hardly any texts shared a call"


def rows_above(metrics: Metrics, num: int) -> float:
    """How many calls had more rows."""
    values = {
        sample.labels["le"]: sample.value
        for sample in metrics.batch_rows.collect()[0].samples
        if sample.name.endswith("_bucket")
    }
    return values["+Inf"] - values[f"{float(num)}"]


@torch.inference_mode()
def test_texts_of_any_lengths_have_the_logits_of_a_single_text(served):
    model, generator = served.model, torch.Generator().manual_seed(0)
    caches, others = ([KVCache() for _ in range(23)] for _ in range(2))
    for number, pair in enumerate(zip(caches, others, strict=True)):
        for cache in pair:
            model(torch.full((1, number + 1), 65 + number), cache=cache)
    for max_experts in (None, 3, 0):
        caches.pop()  # the longest would leave the context
        others.pop()
        tokens = torch.randint(0, 256, (len(caches), 1), generator=generator)
        together = model(tokens, max_experts=max_experts, cache=TextCaches(caches))
        apart = [
            model(token[None], max_experts=max_experts, cache=cache)
            for token, cache in zip(tokens, others, strict=True)
        ]
        assert torch.equal(together.logits, torch.cat([out.logits for out in apart]))
        assert torch.equal(together.num_experts, torch.cat([out.num_experts for out in apart]))


@torch.inference_mode()
def test_tokens_of_texts_must_fit_their_caches(served):
    with pytest.raises(ValueError, match=r"tokens=\(3, 1\): must be \(2, 1\), one per cache"):
        served.model(torch.zeros(3, 1, dtype=torch.int64), cache=TextCaches([KVCache(), KVCache()]))


def test_models_whose_texts_depend_on_each_other_are_computed_one_by_one(models):
    found = {one.name: one.num_texts for one in models if one.codec is not None}
    assert found == {"gpt-mre": FEW_ROWS, "gpt-top-k": 1}


def test_products_that_sum_otherwise_are_noticed(served, monkeypatch):
    weight = served.model.embedding.weight
    assert sums_alike(weight)
    monkeypatch.setattr("raytraced.serve.models.multiply_apart", lambda x, weight: x @ weight.t() * (1 + 2**-20))
    assert not sums_alike(weight)
    assert not texts_are_independent(served.model)


def test_a_text_whose_client_has_gone_leaves(served):
    batch = TextBatch(served, Metrics())
    stays, goes = (a_query(served, 3, sampling=Sampling(9), seed=number) for number in range(2))
    with torch.inference_mode():
        for query in (stays, goes):
            batch.add(query)
        batch.step()
        goes.cancelled = True
        assert {query for query, _, _ in batch.step()} == {stays}
        assert batch.queries == [stays]


def test_an_answer_that_is_not_finite_ends_its_own_text_only(served, monkeypatch):
    batch = TextBatch(served, Metrics())
    queries = [a_query(served, number, sampling=Sampling(5), max_experts=None) for number in range(3)]
    run = TextBatch.run_model

    def spoil(self, texts):
        logits_nV, experts = run(self, texts)
        for row, one in enumerate(texts):
            if one.query is queries[1] and one.text.num_drawn == 2:
                logits_nV[row] = float("nan")
        return logits_nV, experts

    monkeypatch.setattr(TextBatch, "run_model", spoil)
    answers = generate(batch, {0: queries})
    assert isinstance(answers[queries[1]][-1], NotFiniteError)
    monkeypatch.undo()
    for query in (queries[0], queries[2]):
        expected = a_query(served, query.seed, sampling=Sampling(5), max_experts=None)
        assert answers[query] == alone(served, expected)


def test_an_error_ends_the_texts_of_one_call_only(served, monkeypatch, capsys):
    batch = TextBatch(served, Metrics())
    queries = [a_query(served, number, sampling=Sampling(5), max_experts=number % 2) for number in range(4)]
    run = TextBatch.run_model

    def fail(self, texts):
        if texts[0].query.max_experts and texts[0].text.num_drawn == 2:
            raise RuntimeError("broken")
        return run(self, texts)

    monkeypatch.setattr(TextBatch, "run_model", fail)
    answers = generate(batch, {0: queries})
    ended = ["error" if isinstance(answers[query][-1], RuntimeError) else "length" for query in queries]
    assert ended == ["length", "error", "length", "error"]
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_prompts_that_come_together_do_not_hold_up_the_others_for_long(served):
    batch = TextBatch(served, Metrics())
    with torch.inference_mode():
        batch.add(a_query(served, 0, sampling=Sampling(30)))
        batch.step()
        for number in range(1, 13):
            batch.add(a_query(served, number, sampling=Sampling(30)))
        assert len(batch.step()) == 1 + MOST_PROMPTS


def test_a_text_ends_before_its_deadline(served, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(text_batch, "perf_counter", lambda: float(next(clock)))  # a second from step to step
    query = a_query(served, 1, sampling=Sampling(1000), deadline=12.0)
    answers = alone(served, query)
    assert answers[-1]["stop"] == "deadline"
    assert 1 < len(answers) < 12


def test_first_and_next_tokens_are_counted(client):
    before = perf_counter()
    client.post("/v1/completions", json={"model": "gpt-mre", "prompt": "Once", "max_tokens": 5})
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("raytraced_token_seconds{")
    }
    assert len(values) == 4
    for token in ("first", "next"):
        p50, p99 = (
            values[f'raytraced_token_seconds{{quantile="{share}",token="{token}"}}'] for share in ("0.5", "0.99")
        )
        assert 0 < p50 <= p99 < perf_counter() - before + 60
