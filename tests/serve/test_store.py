"""A server whose experts stay on disk (`--memory`): the same texts as with all experts in memory, read ahead along paths."""

import json
import urllib.request

import pytest
import torch

import raytraced
from experiments.server.process import ServerProcess
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.serve.answering import Query
from raytraced.serve.app import Server
from raytraced.serve.generation import Sampling
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import serve_model
from raytraced.serve.text_batch import TextBatch
from raytraced.store.layout import open_store
from serve.conftest import running

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the compiled kernels are not built")


@pytest.fixture(scope="module", params=[1, 2], ids=["one token", "two tokens"])
def folder(request, tmp_path_factory):
    """One language model, whose paths depend on one token or two, as a plain file and as a store."""
    folder = tmp_path_factory.mktemp("stored")
    torch.manual_seed(0)
    sizes = {"dim": 16, "hidden": 8, "depth": 3, "num_heads": 2, "context": 64, "num_experts": 4}
    model = raytraced.build("gpt-mre", path_tokens=request.param, **sizes)
    raytraced.save(model, folder / "plain.safetensors")
    raytraced.save(model, folder / "store.safetensors", store=True)
    return folder


@torch.inference_mode()
def generate(served, num_texts=5, length=12):
    """The tokens of some texts of different lengths that are generated together, and the plans that were made for them."""
    batch, texts, plans = TextBatch(served, Metrics()), {}, []
    for number in range(num_texts):
        prompt = torch.tensor([[7 * number + 1, 3, number]])
        query = Query(served, prompt, lambda _: None, seed=number, sampling=Sampling(length + number))
        texts[query] = []
        batch.add(query)
    while batch.texts:
        for query, answer, _ in batch.step():
            texts[query].append(answer["token"])
        plans += batch.ahead.values()
    return list(texts.values()), plans, batch


def test_texts_of_a_store_are_the_same_and_their_experts_are_read_ahead(folder):
    memory = 6 * open_store(folder / "store.safetensors").run_bytes  # of 12 experts
    stored = serve_model(str(folder / "store.safetensors"), memory=str(memory))
    pool = stored.model.layer.experts.pool
    expected, none, _ = generate(serve_model(str(folder / "plain.safetensors")))
    found, plans, batch = generate(stored)
    assert found == expected
    assert not none
    # every token but a text's last is followed by a pass for which experts are read before it begins
    assert len(plans) >= max(map(len, found)) - 1
    assert batch.ahead == {}
    assert not pool._pool.plans  # all are closed
    assert pool.stats.num_reads > 0
    pool.close()


def test_a_server_with_a_limit_of_memory_answers_as_one_without(folder):
    memory = 6 * open_store(folder / "store.safetensors").run_bytes
    body = json.dumps({"prompt": ["Once", "upon"], "max_tokens": 20, "temperature": 0}).encode()

    def ask(address):
        request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return [choice["text"] for choice in json.load(response)["choices"]]

    with ServerProcess("mre-digits", str(folder / "store.safetensors"), "--memory", str(memory)) as server:
        stored = ask(server.address)  # the limit is for stores; other models are served beside them
    for address in running(Server([serve_model(str(folder / "plain.safetensors"))])):
        assert stored == ask(address)


def test_a_limit_of_memory_without_a_store_is_refused_in_one_line(folder, capsys):
    assert main(["serve", str(folder / "plain.safetensors"), "--memory", "1MB", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "memory=1MB: none of the models is a store; `raytraced store RUN FILE` writes one, serve that" in line
