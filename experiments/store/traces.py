"""Which experts run: traces of two trained decoders; and a store of experts of a larger model's size.

Axes: P prompts, T tokens, B rows, L blocks, N experts per block, D width.
"""

import json
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytraced import build
from raytraced.experts import MLPExperts
from raytraced.store.layout import GridShape, write_store

STORE = "store.safetensors"


@dataclass(frozen=True)
class Sizes:
    """How large the store, the small decoders and their training are.

    Args:
        depth: Blocks.
        num_experts: Experts per block.
        dim: Width of the store's experts.
        hidden: Width of their hidden layer.
        vocab_size: Words of the BPE.
        context: Tokens per row of training, and of each prompt with its continuation.
        steps: Steps of training.
        num_prompts: Texts.
        prefill: Tokens of a prompt.
        decoded: Tokens after it.
    """

    depth: int = 8
    num_experts: int = 32
    dim: int = 512
    hidden: int = 2048
    vocab_size: int = 2048
    context: int = 64
    steps: int = 200
    num_prompts: int = 4
    prefill: int = 8
    decoded: int = 20


SMALL = Sizes(depth=4, num_experts=8, dim=64, hidden=128, vocab_size=512, context=16, steps=3, prefill=4, decoded=6)


def load_sizes(folder: Path) -> Sizes:
    """The sizes that a folder was prepared with."""
    return Sizes(**json.loads((folder / "sizes.json").read_text()))


def load_traces(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Which experts a decoder chose: see `trace`."""
    with np.load(folder / f"{name}.npz") as arrays:
        return dict(arrays)


def read_sources() -> tuple[str, str]:
    """Python's own library: most files to train on, and every tenth to take prompts from."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return "\n".join(t for n, t in enumerate(texts) if n % 10), "\n".join(texts[::10])


def tokenise(training: str, held_out: str, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Both texts as numbers of words of one BPE."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([training], vocab_size, show_progress=False)
    encoded = [torch.tensor(tokenizer.encode(text).ids) for text in (training, held_out)]
    return encoded[0], encoded[1]


def train_small(name: str, tokens: Tensor, sizes: Sizes, **options: Any) -> Any:
    """A small decoder of the same grid, after a short training."""
    torch.manual_seed(0)
    grid = {"dim": 64, "hidden": 128, "depth": sizes.depth, "num_experts": sizes.num_experts, "num_heads": 4}
    model: Any = build(name, **grid, context=sizes.context, vocab_size=sizes.vocab_size, **options).train()
    routing = {id(each) for each in [*model.layer.router.parameters(), *model.routing_parameters()]}
    slow = [each for each in model.parameters() if id(each) in routing and name == "gpt-mre"]
    fast = [each for each in model.parameters() if each not in set(slow)]
    optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 2e-4}], 2e-3)
    for step in range(sizes.steps):
        starts = torch.randint(0, len(tokens) - sizes.context - 1, (16,))
        rows = torch.stack([tokens[start : start + sizes.context + 1] for start in starts])
        out = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), rows[:, 1:].flatten())
        total = loss if out.loss is None else loss + out.loss
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == sizes.steps - 1:
            used = float(out.num_experts.float().mean())
            print(f"{name} step {step}: loss {float(loss.detach()):.3f}, {used:.1f} experts", flush=True)
    return model.eval()


@torch.no_grad()
def trace(model: Any, prompts_PT: Tensor) -> dict[str, np.ndarray]:
    """Which experts each token of some texts runs.

    Returns:
        active (P, T, L, N); nodes (P, T, steps), their order of activation, where the model has one; and, where gates see their
        own block's input, guess (P, T, L, N): what the gate of each block says to the input of the block before it.
    """
    router, seen = model.layer.router, []
    route = type(router).route

    def record(self: Any, step: int, hidden_BD: Tensor, draws: Any) -> Any:
        seen.append(hidden_BD)
        return route(self, step, hidden_BD, draws)

    type(router).route = record
    try:
        out = model(prompts_PT)
    finally:
        type(router).route = route
    found = out.routes[0]
    traces = {"active": found.active.bool().numpy()}
    if found.nodes is not None:
        traces["nodes"] = found.nodes.numpy()
    if seen:
        traces["guess"] = np.zeros_like(traces["active"])
        for block, hidden_BD in enumerate(seen[:-1]):
            indices_Bk = router.gate_logits(block + 1, hidden_BD).topk(router.k, -1).indices.numpy()
            guess_BN = np.zeros((len(indices_Bk), traces["active"].shape[-1]), bool)
            np.put_along_axis(guess_BN, indices_Bk, True, 1)
            traces["guess"][:, :, block + 1] = guess_BN.reshape(*prompts_PT.shape, -1)
    return traces


def prepare(folder: Path, sizes: Sizes) -> None:
    """Train both decoders, note which experts run, and write the store."""
    folder.mkdir(parents=True, exist_ok=True)
    training, held_out = tokenise(*read_sources(), sizes.vocab_size)
    starts = np.linspace(0, len(held_out) - sizes.context - 1, sizes.num_prompts).astype(int)
    prompts_PT = torch.stack([held_out[start : start + sizes.context] for start in starts])
    traces = {"mre": trace(train_small("gpt-mre", training, sizes), prompts_PT)}
    traces["top-k"] = trace(train_small("gpt-top-k", training, sizes, k=1), prompts_PT)
    for name, arrays in traces.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(f"{name}: {arrays['active'].sum((2, 3)).mean():.1f} experts per token")
    write_experts(folder / STORE, sizes)
    (folder / "sizes.json").write_text(json.dumps(asdict(sizes)))


def write_experts(path: Path, sizes: Sizes) -> None:
    """A store of experts with random numbers."""
    num_numbers = MLPExperts(1, 1, sizes.dim, sizes.hidden, 1).num_parameters

    def expert(grid: str, layer: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(layer * sizes.num_experts + number)
        return torch.randn(num_numbers, generator=generator) * sizes.dim**-0.5

    write_store(path, {}, {"experts": GridShape(sizes.depth, sizes.num_experts)}, expert, "")
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB")
