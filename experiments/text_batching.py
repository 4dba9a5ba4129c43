"""How fast texts are generated together: tokens per second of the server's batches, one text and several at once.

    python -m experiments.text_batching      # writes benchmarks/text_batching.md; some minutes, on an idle machine

An untrained `gpt-mre` of the default size, one thread, 48 tokens per text, temperature 1. Batches of different sizes are
timed in turns, five times; a time is the median. *One by one* are the same texts, each in a batch of its own: what they cost
without sharing calls. The tokens of all texts are compared. Prompts have 16 tokens each; where lengths are *mixed*, 4 to 28.

*What independence costs*: one step of the model for 32 texts of one length, as the server runs it (no bit of a text depends
on the others) over a step with one cache for all texts and ordinary matrix products (bits depend on the batch).

*Over HTTP*: `raytraced serve` and as many clients as texts, each of which asks for one text after the other, eight texts
each; the percentiles are those that the server states in `/metrics`.
"""

import argparse
import asyncio
import json
import re
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from experiments import BENCHMARKS
from experiments.reproduce.tables import Table
from experiments.server.client import Client
from experiments.server.process import ServerProcess
from raytraced import GPT, build, save
from raytraced.models.caches import KVCache, TextCaches
from raytraced.serve.answering import Query
from raytraced.serve.generation import Sampling
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import Served
from raytraced.serve.text_batch import TextBatch

SIZES, NUM_TOKENS, ROUNDS = (1, 2, 4, 8, 16, 32, 64), 48, 5
LENGTHS = (4, 28)  # the shortest and the longest prompt where lengths are mixed
HTTP_SIZES, TEXTS_PER_CLIENT = (1, 8, 32), 8
QUANTILE = re.compile(r'raytraced_token_seconds{quantile="([0-9.]+)",token="(\w+)"} (\S+)')


@torch.inference_mode()
def generate_texts(served: Served, prompts: list[Tensor], together: bool) -> tuple[float, list[list[int]]]:
    """The seconds of some texts, and their tokens."""
    texts, queries = list[list[int]](), list[Query]()
    for number, prompt_T in enumerate(prompts):
        texts.append([])
        sampling = Sampling(NUM_TOKENS)
        queries.append(Query(served, prompt_T[None], deliver=lambda _: None, seed=number, sampling=sampling))
    places = {query: texts[number] for number, query in enumerate(queries)}
    metrics, began = Metrics(), perf_counter()
    for group in [queries] if together else [[query] for query in queries]:
        batch = TextBatch(served, metrics)
        for query in group:
            batch.add(query)
        while batch.texts:
            for query, answer, _ in batch.step():
                assert isinstance(answer, dict)
                places[query].append(answer["token"])
    return perf_counter() - began, texts


def measure_batches(served: Served) -> Table:
    """Tokens per second by the number of texts at once."""
    generator = torch.Generator().manual_seed(0)
    equal = [torch.randint(0, 256, (16,), generator=generator) for _ in range(max(SIZES))]
    low, high = LENGTHS
    lengths = torch.randint(low, high + 1, (32,), generator=generator).tolist()
    mixed = [torch.randint(0, 256, (length,), generator=generator) for length in lengths]
    ways = {str(size): (equal[:size], True) for size in SIZES}
    ways |= {"32, mixed lengths": (mixed, True), "32, one by one": (equal[:32], False)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    expected = {id(prompts): generate_texts(served, prompts, together=False)[1] for prompts in (equal, mixed)}
    for _ in range(ROUNDS):
        for name, (prompts, together) in ways.items():
            took, texts = generate_texts(served, prompts, together)
            assert texts == expected[id(mixed if prompts is mixed else equal)][: len(texts)], "a text depends on others"
            seconds[name].append(took)
    speeds = {name: len(prompts) * NUM_TOKENS / median(seconds[name]) for name, (prompts, _) in ways.items()}
    rows = [[name, f"{speed:,.0f}", f"{speed / speeds['1']:.2f}"] for name, speed in speeds.items()]
    return Table("Texts generated together", ["texts at once", "tokens per second", "over one text's"], rows)


@torch.inference_mode()
def measure_independence(model: GPT) -> Table:
    """A step of 32 texts, each computed as if it were alone, over one in which texts share matrix products."""
    prompts_BT = torch.randint(0, 256, (32, 16), generator=torch.Generator().manual_seed(1))
    tokens_B1 = prompts_BT[:, :1]
    seconds: dict[str, list[float]] = {"alone": [], "shared": []}
    for _ in range(ROUNDS):
        shared, caches = KVCache(), [KVCache() for _ in prompts_BT]
        model(prompts_BT, cache=shared)
        for prompt_T, cache in zip(prompts_BT, caches, strict=True):
            model(prompt_T[None], cache=cache)
        for name, cache in (("alone", TextCaches(caches)), ("shared", shared)):
            began = perf_counter()
            for _ in range(NUM_TOKENS):
                model(tokens_B1, cache=cache)
            seconds[name].append((perf_counter() - began) / NUM_TOKENS)
    ms = {name: 1000 * median(found) for name, found in seconds.items()}
    ratio = f"{ms['alone'] / ms['shared']:.2f}"
    rows = [["independent, as served", f"{ms['alone']:.2f}", ratio], ["shared products", f"{ms['shared']:.2f}", "1.00"]]
    return Table("What independence costs", ["step of the model, 32 texts", "ms", "ratio"], rows)


async def ask_for_texts(address: str, num_clients: int) -> float:
    """Let clients generate texts; returns the seconds of all."""

    async def ask(number: int) -> None:
        async with Client(address, timeout=300) as client:
            for text in range(TEXTS_PER_CLIENT):
                seed = number * TEXTS_PER_CLIENT + text
                body = {"prompt": f"{seed:016d}", "max_tokens": NUM_TOKENS, "seed": seed, "stream": True}
                reply = await client.post("/v1/completions", json.dumps(body).encode())
                assert reply.status == 200, reply
                assert reply.body.endswith(b"data: [DONE]\n\n"), reply.body[-300:]

    began = perf_counter()
    await asyncio.gather(*(ask(number) for number in range(num_clients)))
    return perf_counter() - began


def measure_http(model: GPT) -> Table:
    """Tokens per second and times of tokens of a server."""
    rows, first_speed = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, "gpt-mre.safetensors"))
        for num in HTTP_SIZES:
            with ServerProcess(str(Path(folder, "gpt-mre.safetensors"))) as server:

                async def read_metrics(address: str) -> str:
                    async with Client(address) as client:
                        return (await client.get("/metrics")).body.decode()

                seconds = asyncio.run(ask_for_texts(server.address, num))
                found = QUANTILE.findall(asyncio.run(read_metrics(server.address)))
            speed = num * TEXTS_PER_CLIENT * NUM_TOKENS / seconds
            first_speed = first_speed or speed
            ms = {(token, share): f"{1000 * float(value):.1f}" for share, token, value in found}
            times = [ms[token, share] for token in ("first", "next") for share in ("0.5", "0.99")]
            rows.append([str(num), f"{speed:,.0f}", f"{speed / first_speed:.2f}", *times])
    header = ["clients", "tokens per second", "over one client's", "ms to the first token, p50", "p99"]
    return Table("Over HTTP", [*header, "ms between tokens, p50", "p99"], rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build("gpt-mre").eval()
    assert isinstance(model, GPT)
    tables = [measure_batches(Served("gpt-mre", model, "")), measure_independence(model), measure_http(model)]
    note = (__doc__ or "").partition("on an idle machine\n\n")[2].strip()
    lines = [table.markdown() for table in tables]
    lines[0] = lines[0].replace("###", "#", 1)
    lines += [note, "", "Written by `python -m experiments.text_batching`.", ""]
    (BENCHMARKS / "text_batching.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines[:3]))


if __name__ == "__main__":
    main()
