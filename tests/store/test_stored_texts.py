"""Texts of a language model whose experts are in a store: read ahead along paths, or left out at a deadline."""

import json
import threading

import pytest
import torch

import raytraced
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.store.layout import open_store
from raytraced.store.reader import ExpertReader

SIZES = {"dim": 16, "hidden": 24, "depth": 2, "num_heads": 2, "context": 12, "num_experts": 6}


@pytest.fixture(params=[1, 2], ids=["one token", "two tokens"])
def text_store(request, tmp_path):
    """A language model of two blocks of six experts, whose paths depend on one token or two, in memory, and its store."""
    whole = raytraced.build("gpt-mre", path_tokens=request.param, **SIZES).eval()
    raytraced.save(whole, tmp_path / "store.safetensors", store=True)
    return whole, tmp_path / "store.safetensors"


def continued(model, prompt, **options):
    """The tokens that a model adds to texts, and how many experts each ran."""
    generator = torch.Generator().manual_seed(1)
    drawn = [(each.tokens, each.num_experts) for each in model.generate(prompt, 15, generator=generator, **options)]
    return [torch.stack(part, 1) for part in zip(*drawn, strict=True)]


@pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("slots", [1, 3, 12])
def test_a_store_continues_a_text_as_the_model_does_and_reads_nothing_in_vain(text_store, slots):
    whole, path = text_store
    loaded, prompt = raytraced.load(path, memory=slots * open_store(path).run_bytes), torch.randint(0, 256, (3, 4))
    for options in ({}, {"max_experts": 2}, {"cached": False}):
        for found, expected in zip(
            continued(loaded, prompt, **options), continued(whole, prompt, **options), strict=True
        ):
            assert torch.equal(found, expected)
    assert loaded.layer.experts.pool.stats.num_wasted == 0
    assert not loaded.layer.experts.pool._pool.plans
    loaded.layer.experts.pool.close()


@pytest.mark.parametrize("by_rank", [False, True])
def test_the_path_of_a_drawn_token_is_read_before_its_pass_begins(text_store, by_rank):
    _, path = text_store
    loaded = raytraced.load(path)
    pool = loaded.layer.experts.pool
    drawn = loaded.generate(torch.randint(0, 256, (1, 4)), 60, max_ms=1e7 if by_rank else None)
    for paths in (one.paths for one in drawn):
        (plan,) = pool._pool.plans
        in_blocks = paths.active.flatten().nonzero()[:, 0].tolist()
        ranked = [node for node in paths.nodes.flatten().tolist() if node >= 0]
        assert plan.order == (ranked if by_rank else in_blocks)
        if ranked != in_blocks:
            break
    else:
        raise AssertionError("no drawn token has such a path")
    drawn.close()
    assert not pool._pool.plans
    pool.close()


def test_a_deadline_in_bytes_gives_the_same_answer_whatever_is_in_memory(text_store):
    whole, path = text_store
    size, prompt = open_store(path).run_bytes, torch.randint(0, 256, (2, 5))
    full = continued(whole, prompt, temperature=0.0)
    found = {}
    for reads in (0, 1, 2, 20):
        loaded = raytraced.load(path, memory=4 * size)
        found[reads] = continued(loaded, prompt, temperature=0.0, max_bytes=reads * size)
        loaded(torch.randint(0, 256, (4, 9)))  # another text changes what is in memory
        again = continued(loaded, prompt, temperature=0.0, max_bytes=reads * size)
        alone = continued(loaded, prompt[1:], temperature=0.0, max_bytes=reads * size)
        uncached = continued(loaded, prompt, temperature=0.0, max_bytes=reads * size, cached=False)
        assert all(torch.equal(one, other) for one, other in zip(found[reads], again, strict=True))
        assert all(torch.equal(one[1:], other) for one, other in zip(found[reads], alone, strict=True))
        assert torch.equal(found[reads][0], uncached[0])
        loaded.layer.experts.pool.close()
    assert int(found[0][1].sum()) == 0
    means = [found[reads][1].double().mean() for reads in (0, 1, 2, 20)]
    assert means == sorted(means)
    if kernels.available():
        assert torch.equal(found[20][0], full[0])


def test_experts_are_left_out_by_rank(text_store):
    whole, path = text_store
    loaded = raytraced.load(path)
    tokens = torch.randint(0, 256, (2, 6))
    paths = whole.plan(tokens)
    route = loaded(tokens, max_bytes=open_store(path).run_bytes).routes[0]
    for text in range(2):
        known = set()
        for token in range(6):
            path_of = [node for node in paths.nodes[text, token].tolist() if node >= 0]
            new = [node for node in path_of if node not in known][:1]
            kept = [node for node in path_of if node in known or node in new]
            assert [node for node in route.nodes[text, token].tolist() if node >= 0] == kept
            assert route.active[text, token].flatten().nonzero()[:, 0].tolist() == sorted(kept)
            known.update(kept)
    loaded.layer.experts.pool.close()


def test_a_deadline_in_bytes_is_refused_where_nothing_is_read(text_store):
    whole, path = text_store
    with pytest.raises(ValueError, match="max_bytes=1000: is for models loaded from a store"):
        whole(torch.zeros(1, 3, dtype=torch.long), max_bytes=1000)
    loaded = raytraced.load(path)
    with pytest.raises(ValueError, match="max_bytes=-1: must be a whole number of bytes"):
        loaded(torch.zeros(1, 3, dtype=torch.long), max_bytes=-1)
    loaded.layer.experts.pool.close()


class StuckDisk:
    """A disk that reads so many experts; then the time is over, and all further reads end with the test.

    Tells what it was asked for, in this order. Time stands still until then: nothing here depends on how fast the machine is.
    """

    def __init__(self, monkeypatch, pool, num_reads):
        self.pool, self.num_reads, self.order = pool._pool, num_reads, []
        self.is_late, self.end = False, threading.Event()
        self.pool.num_threads = 1  # experts are asked for in the order in which the pool decides
        monkeypatch.setattr("raytraced.store.pool.perf_counter", lambda: float("inf") if self.is_late else 0.0)
        monkeypatch.setattr("raytraced.store.budget.perf_counter", lambda: 0.0)
        monkeypatch.setattr(self.pool.reader, "read", self.read)

    def read(self, expert, target):
        self.order.append(expert)
        if len(self.order) <= self.num_reads:
            ExpertReader.read(self.pool.reader, expert, target)
            return
        with self.pool.changed:
            self.is_late = True
            self.pool.changed.notify_all()
        self.end.wait(60)
        raise OSError("the test is over")

    def close(self):
        self.end.set()
        self.pool.close()


def path_across_blocks(model):
    """A token whose order of activation is not that of the blocks, and this order."""
    for token, nodes in enumerate(model.paths().nodes.tolist()):
        path = [node for node in nodes if node >= 0]
        if len(path) >= 4 and path[1] > 5 >= path[2]:  # one of the second block before one of the first
            return torch.tensor([[token]]), path
    raise AssertionError("no such token")


@pytest.mark.parametrize("kernel", ["", "sparse"])
@pytest.mark.parametrize("num_reads", [0, 1, 3])
def test_experts_that_do_not_arrive_in_time_are_left_out_by_rank(text_store, monkeypatch, num_reads, kernel):
    whole, path = text_store
    token, order = path_across_blocks(whole)
    by_bytes, by_time = raytraced.load(path), raytraced.load(path)
    disk = StuckDisk(monkeypatch, by_time.layer.experts.pool, num_reads)
    with kernels.use(experts=kernel) if kernel else kernels.use(""):
        found = by_time(token, max_ms=1000)
        expected = by_bytes(token, max_bytes=num_reads * open_store(path).run_bytes)
    assert disk.order == order[: num_reads + 1]
    assert [node for node in found.routes[0].nodes.flatten().tolist() if node >= 0] == order[:num_reads]
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.routes[0].active, expected.routes[0].active)
    assert found.num_experts.tolist() == [[num_reads]]
    disk.close()
    by_bytes.layer.experts.pool.close()


def test_rows_of_a_batch_miss_the_same_experts(text_store, monkeypatch):
    whole, path = text_store
    tokens = torch.randint(0, 256, (3, 4))
    loaded = raytraced.load(path)
    disk = StuckDisk(monkeypatch, loaded.layer.experts.pool, 5)
    route, paths = loaded(tokens, max_ms=1000).routes[0], whole.plan(tokens)
    arrived = set(disk.order[:5])
    for text in range(3):
        for token in range(4):
            order = [node for node in paths.nodes[text, token].tolist() if node >= 0]
            kept = [node for node in order if node in arrived]
            assert [node for node in route.nodes[text, token].tolist() if node >= 0] == kept
            assert route.active[text, token].flatten().nonzero()[:, 0].tolist() == sorted(kept)
            assert int(route.num_active[text, token]) == len(kept)
    disk.close()


def test_a_text_goes_on_without_experts_when_nothing_arrives(text_store, monkeypatch):
    _, path = text_store
    prompt = torch.randint(0, 256, (2, 5))
    by_bytes, by_time = raytraced.load(path), raytraced.load(path)
    disk = StuckDisk(monkeypatch, by_time.layer.experts.pool, 0)
    found = continued(by_time, prompt, max_ms=1000)
    expected = continued(by_bytes, prompt, max_bytes=0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not disk.pool.plans
    disk.close()
    by_bytes.layer.experts.pool.close()


@pytest.mark.parametrize("slots", [1, 3, 12])
def test_a_deadline_that_is_met_changes_nothing(text_store, slots):
    _, path = text_store
    prompt = torch.randint(0, 256, (2, 5))
    loaded = raytraced.load(path, memory=slots * open_store(path).run_bytes)
    found, expected = continued(loaded, prompt, max_ms=1e7), continued(loaded, prompt)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    loaded.layer.experts.pool.close()


def test_a_deadline_in_time_is_refused_where_it_means_nothing(text_store):
    whole, path = text_store
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="max_ms=5: is for models loaded from a store"):
        whole(tokens, max_ms=5)
    loaded = raytraced.load(path)
    for value in (0, -1, float("nan"), float("inf"), "5", True):
        with pytest.raises(ValueError, match=r"max_ms=.*must be a number of milliseconds above 0"):
            loaded(tokens, max_ms=value)
    with pytest.raises(ValueError, match="max_ms=5: must be left out with draft_experts"):
        next(loaded.generate(tokens, 3, max_ms=5, draft_experts=1))
    loaded.layer.experts.pool.close()


def test_evaluate_measures_what_a_deadline_in_bytes_costs(text_store, tmp_path, capsys):
    _, path = text_store
    size, data = open_store(path).run_bytes, tmp_path / "own.txt"
    data.write_bytes(b"to be, or not to be. " * 200)
    words = ["evaluate", str(path), "--data", str(data), "--device", "cpu", "--json", "--memory", str(4 * size)]
    found = []
    for deadline in (["--max-bytes", str(size - 1)], ["--max-bytes", str(size)], ["--max-bytes", str(99 * size)], []):
        assert main([*words, *deadline]) == 0
        found.append(json.loads(capsys.readouterr().out))
    none, one, all_reads, without = found
    assert none["mean_experts"] == 0 < one["mean_experts"] < all_reads["mean_experts"]
    assert len({each["bits_per_byte"] for each in (none, one, all_reads)}) == 3
    assert "budgets" not in all_reads
    assert all_reads["mean_experts"] == without["mean_experts"]
    assert all_reads["bits_per_byte"] == without["bits_per_byte"]


def test_evaluate_refuses_a_deadline_in_bytes_where_nothing_is_read(text_store, tmp_path, capsys):
    whole, _ = text_store
    raytraced.save(whole, tmp_path / "model.safetensors")
    (tmp_path / "own.txt").write_bytes(b"to be, or not to be. " * 200)
    for model, data in (("model.safetensors", "own.txt"), ("mre-digits", "digits")):
        name = str(tmp_path / model) if model.endswith("safetensors") else model
        data = str(tmp_path / data) if data.endswith("txt") else data
        assert main(["evaluate", name, "--data", data, "--device", "cpu", "--max-bytes", "5KB"]) == 2
        error = capsys.readouterr().err
        assert "is for models loaded from a store whose paths depend on tokens alone; leave it out" in error
        assert error.count("\n") == 1


@torch.no_grad()
def test_bytes_of_any_type_are_tokens_with_a_deadline_too(text_store):
    whole, path = text_store
    tokens = torch.randint(0, 256, (2, 9))
    stored = raytraced.load(path)
    assert torch.equal(stored(tokens.to(torch.uint8), max_ms=1e7).logits, stored(tokens, max_ms=1e7).logits)
    torch.testing.assert_close(stored(tokens.to(torch.uint8), max_ms=1e7).logits, whole(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_store_takes_any_precision(text_store, dtype):
    whole, path = text_store
    tokens = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        found, expected = (model.to(dtype)(tokens).logits for model in (raytraced.load(path), whole))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
