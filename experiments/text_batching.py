"""How fast texts are generated together: tokens per second of the server's batches, one text and several at once.

    python -m experiments.text_batching      # writes benchmarks/text_batching.md; some minutes

An untrained `gpt-mre` of the default size, one thread, prompts of 16 tokens, 48 tokens each, temperature 1. Batches of
different sizes are timed in turns, three times; a time is the median, in seconds of the processor. *One by one* are the same
texts, each in a batch of its own: what they cost without sharing calls. The tokens of all texts are compared.
"""

import argparse
from statistics import median
from time import process_time

import torch

from experiments import BENCHMARKS
from experiments.reproduce.tables import Table
from raytraced import build
from raytraced.serve.answering import Query
from raytraced.serve.generation import Sampling
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import Served
from raytraced.serve.text_batch import TextBatch

SIZES, NUM_TOKENS, ROUNDS = (1, 2, 4, 8, 16, 32, 64), 48, 3


@torch.inference_mode()
def generate_texts(served: Served, prompts_BT: torch.Tensor, together: bool) -> tuple[float, list[list[int]], Metrics]:
    """The processor seconds of some texts, their tokens, and what was counted."""
    metrics, texts = Metrics(), list[list[int]]()
    queries = []
    for number, prompt_T in enumerate(prompts_BT):
        texts.append([])
        sampling = Sampling(NUM_TOKENS)
        queries.append(Query(served, prompt_T[None], deliver=lambda _: None, seed=number, sampling=sampling))
    places = {query: texts[number] for number, query in enumerate(queries)}
    began = process_time()
    for group in [queries] if together else [[query] for query in queries]:
        batch = TextBatch(served, metrics)
        for query in group:
            batch.add(query)
        while batch.texts:
            for query, answer, _ in batch.step():
                assert isinstance(answer, dict)
                places[query].append(answer["token"])
    return process_time() - began, texts, metrics


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    served = Served("gpt-mre", build("gpt-mre").eval(), "")
    prompts_BT = torch.randint(0, 256, (max(SIZES), 16))
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    apart: list[float] = []
    between: dict[int, Metrics] = {}
    _, expected, _ = generate_texts(served, prompts_BT, together=False)
    for _ in range(ROUNDS):
        for size in SIZES:
            took, texts, between[size] = generate_texts(served, prompts_BT[:size], together=True)
            assert texts == expected[:size], "a text depends on the others"
            seconds[size].append(took)
        apart.append(generate_texts(served, prompts_BT[:32], together=False)[0])
    speeds = {str(size): size * NUM_TOKENS / median(found) for size, found in seconds.items()}
    rows = []
    for size in SIZES:
        recent = sorted(between[size].recent["next"])
        p50, p99 = (1000 * recent[int(share * (len(recent) - 1))] for share in (0.5, 0.99))
        speed = speeds[str(size)]
        rows.append([str(size), f"{speed:,.0f}", f"{speed / speeds['1']:.2f}", f"{p50:.1f}", f"{p99:.1f}"])
    speed = 32 * NUM_TOKENS / median(apart)
    rows.append(["32, one by one", f"{speed:,.0f}", f"{speed / speeds['1']:.2f}", "", ""])
    header = ["texts at once", "tokens per second", "over one text's", "ms between tokens, p50", "p99"]
    note = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    table = Table("Texts generated together", header, rows, note)
    source = "Written by `python -m experiments.text_batching`."
    lines = [table.markdown().replace("###", "#", 1), source, ""]
    (BENCHMARKS / "text_batching.md").write_text("\n".join(lines), encoding="utf-8")
    print(lines[0])


if __name__ == "__main__":
    main()
