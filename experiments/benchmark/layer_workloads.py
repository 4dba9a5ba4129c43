"""Workloads on the activation sequence and on layers: costly experts, a GPU, other libraries' layers, decoders of them.

Axes: B batch, L layers, N experts per layer, T steps, D width, G groups, S samples of a group (B = G·S).
"""

import copy
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.benchmark.model_workloads import (
    BATCH_SIZE,
    SEED,
    STATES,
    Bench,
    TrainingStep,
    fixed_generator,
    forced,
    recipe,
)
from experiments.benchmark.results import Outcome
from experiments.benchmark.timing import Contender
from raytraced import kernels
from raytraced.integrations.replace import HiddenOnly
from raytraced.layer import RoutedLayer, routed_layer
from raytraced.routers.dense import DenseBlocks
from raytraced.routers.raytraced import RaytracedExperts, activation_sequence
from raytraced.routers.top_k import TopK
from raytraced.routing import RoutingNetwork
from raytraced.sequence import Estimator, Select
from raytraced.tasks.registry import find_task
from raytraced.tasks.task import Batch

NUM_LAYERS, NUM_EXPERTS = 4, 8
GRIDS = ((2, 4), (2, 8), (4, 8), (4, 16), (8, 16), (8, 32))
GPU_GRIDS, GPU_BATCH = ((4, 8), (8, 16)), 4096
LIMIT_DIMS, PRODUCT = (16, 128, 512), 1024  # a square product of this size reaches the peak speed of a core
TEXT_DATA, NUM_WINDOWS = "shakespeare", 16  # the bundled text; windows per batch, of 128 bytes each


class ExpertSize(NamedTuple):
    """Widths of an expert with one hidden layer: dim → hidden → dim."""

    dim: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.dim}→{self.hidden}→{self.dim}"


NARROW, COSTLY, TOKEN = ExpertSize(16, 64), ExpertSize(512, 2048), ExpertSize(96, 192)


class SequenceRun:
    """Forward and backward pass of the sequence on fixed entry rates, with fixed gradients of the rates.

    With sampled nodes, as in the paper's training, the mask has a gradient through every draw; with greedily chosen nodes, as
    in our recipe, it has none.
    """

    def __init__(self, routing: RoutingNetwork, entry_BN: Tensor, select: Select = "sample") -> None:
        self.routing, self.entry_BN, self.select, self.generator = routing, entry_BN.detach(), select, fixed_generator()
        self.estimator: Estimator = "none" if select == "greedy" else "reinmax"
        shape = (2, len(entry_BN), routing.num_layers, routing.num_experts)
        self.gradients = torch.randn(shape, generator=fixed_generator()).to(entry_BN).unbind()

    def __call__(self) -> tuple[Any, list[Tensor]]:
        """Return the route, and the gradients of the entry rates and the gates."""
        entry_BN = self.entry_BN.clone().requires_grad_()
        options: Any = {"select": self.select, "estimator": self.estimator, "generator": self.generator}
        route: Any = activation_sequence(self.routing, entry_BN, **options)
        learns = slice(0 if route.active.requires_grad else 1, None)
        torch.autograd.backward((route.active, route.rates.nodes)[learns], self.gradients[learns])
        gradients = [tensor.grad for tensor in (entry_BN, *self.routing.parameters()) if tensor.grad is not None]
        self.routing.zero_grad(set_to_none=True)
        return route, gradients

    def contender(self, name: str) -> Contender:
        return Contender(name, self, experts=self()[0].num_active.float().mean().item())


def measure_sequence(bench: Bench) -> Outcome:
    pairs, equal = [], []
    for state in STATES:
        model: Any = bench.model("mre", state)
        routing = model.layer.router.routing
        with torch.no_grad():
            entry_BN = model.layer.router.entry(model.input_block(next(bench.batches()).inputs))
        drawn = SequenceRun(routing, entry_BN).contender(f"drawn, {state}")
        greedy = SequenceRun(routing, entry_BN, "greedy").contender(f"greedy, {state}")
        whole = bench.step("mre", state)._replace(name=f"a training step, {state}")
        pairs += [(drawn, forced(drawn, "plain")), (greedy, forced(greedy, "plain")), (greedy, whole)]
        equal.append(compare_sequences(routing, entry_BN))
    conditions = {what: all(found[what] for found in equal) for what in equal[0]}
    return Outcome(bench.compare(pairs).rows, conditions)


def compare_sequences(routing: RoutingNetwork, entry_BN: Tensor) -> dict[str, bool]:
    """Compare compiled and plain on the same seed: draws in both precisions, rates in single, gradients in double."""

    def run() -> tuple[Any, Any, list[Tensor]]:
        double, gradients = SequenceRun(copy.deepcopy(routing).double(), entry_BN.double())()
        return SequenceRun(routing, entry_BN)()[0], double, gradients

    single, double, gradients = run()
    with kernels.use("plain"):
        plain_single, plain_double, plain_gradients = run()
    pairs = zip(gradients, plain_gradients, strict=True)
    return {
        "the same draws": single.nodes.equal(plain_single.nodes) and double.nodes.equal(plain_double.nodes),
        "rates within 1e-6": bool(((single.rates.nodes - plain_single.rates.nodes).abs() <= 1e-6).all()),
        "gradients within 1e-5": all(float((a - b).abs().max() / b.abs().max()) <= 1e-5 for a, b in pairs),
    }


def measure_growth(bench: Bench) -> Outcome:
    runs: dict[tuple[int, int], list[Contender]] = {}
    for L, N in GRIDS:
        routing, entry_BN = RoutingNetwork(L, N), torch.randn(BATCH_SIZE, N, generator=fixed_generator()).softmax(-1)
        greedy = torch.no_grad()(partial(activation_sequence, routing, entry_BN, select="greedy"))
        runs[L, N] = [
            Contender("inference", greedy, experts=greedy().num_active.float().mean().item()),
            SequenceRun(routing, entry_BN, "greedy").contender("training"),
            SequenceRun(routing, entry_BN, "sample").contender("training through draws"),
        ]
        for at, one in enumerate(runs[L, N]):
            cost = ((one.experts or 0) + 1) * L * N**3  # of a method that recomputes the whole grid at every step
            runs[L, N][at] = one._replace(name=f"{one.name}, {L}×{N} (T·L·N³ = {cost:,.0f})")
    base = runs.pop((NUM_LAYERS, NUM_EXPERTS))
    return bench.compare([pair for some in runs.values() for pair in zip(some, base, strict=True)])


def raytraced_layer(size: ExpertSize) -> RaytracedExperts:
    """A 4×8 grid of such experts. An offset of 0 runs about as many as a model with our offset does after training."""
    return RaytracedExperts(
        size.dim, NUM_LAYERS, NUM_EXPERTS, hidden=size.hidden, num_hidden=1, output_logit_offset=0.0
    )


def top2_layer(size: ExpertSize) -> RoutedLayer:
    """Our top-2 with the same experts."""
    return routed_layer(TopK, size.dim, NUM_LAYERS, NUM_EXPERTS, hidden=size.hidden, num_hidden=1, k=2)


class LayerStep:
    """Forward and backward pass of a layer as inside a network: the gradient of its input is computed as well."""

    def __init__(self, owner: nn.Module, dim: int, run: Callable[[Tensor], Tensor] | None = None, num: int = 0) -> None:
        self.owner, self.run = owner.train(), run or owner
        both = torch.randn(2, num or BATCH_SIZE, dim, generator=fixed_generator())
        self.hidden_BD, self.gradient_BD = both.to(next(owner.parameters()))

    def __call__(self) -> None:
        self.run(self.hidden_BD.detach().requires_grad_()).backward(self.gradient_BD)
        self.owner.zero_grad(set_to_none=True)


def measure_costly_experts(bench: Bench) -> Outcome:
    hidden_BD = torch.randn(BATCH_SIZE, COSTLY.dim, generator=fixed_generator())

    def contenders(name: str, layer: RoutedLayer) -> list[Contender]:
        run, experts = HiddenOnly(layer), layer(hidden_BD).route.num_active.float().mean().item()
        inference = Contender(f"inference, {name}", torch.no_grad()(partial(run, hidden_BD)), experts=experts)
        return [inference, Contender(f"step, {name}", LayerStep(run, COSTLY.dim), experts=experts)]

    mre, top2 = contenders("MRE", raytraced_layer(COSTLY)), contenders("top-2", top2_layer(COSTLY))
    dense, num = [forced(one, "dense", "experts") for one in mre], NUM_LAYERS * NUM_EXPERTS
    every = [one._replace(name=one.name.replace("MRE, dense", "every expert"), experts=num) for one in dense]
    return bench.compare([*zip(mre, every, strict=True), *zip(mre, top2, strict=True)])


def measure_gpu(bench: Bench, device: str = "cuda") -> Outcome:
    """The sequence for some grids, and a layer of costly experts in bfloat16."""
    pairs, equal = [], []
    ways: tuple[tuple[Select, str], ...] = (("greedy", "greedy"), ("sample", "drawn"))
    for L, N in GPU_GRIDS:
        here = RoutingNetwork(L, N), torch.randn(GPU_BATCH, N, generator=fixed_generator()).softmax(-1)
        there = RoutingNetwork(L, N).to(device), here[1].to(device)
        there[0].load_state_dict(here[0].state_dict())
        for select, way in ways:
            fast = waiting(SequenceRun(*there, select).contender(f"sequence, {way}, {L}×{N}"), device)
            core = SequenceRun(*here, select).contender(f"sequence, {way}, {L}×{N}, one core")
            pairs += [(fast, forced(fast, "plain", "sequence")), (fast, core)]
        equal.append(compare_sequences(*there))
    layer = raytraced_layer(COSTLY).to(device, torch.bfloat16)
    run = LayerStep(HiddenOnly(layer), COSTLY.dim, num=GPU_BATCH)
    step = waiting(Contender(f"experts {COSTLY}, bfloat16", run), device)
    grouped, sparse, dense = (forced(step, word, "experts") for word in ("grouped", "sparse", "dense"))
    pairs += [(grouped, sparse), (grouped, dense)]
    conditions = {what: all(found[what] for found in equal) for what in equal[0]}
    return Outcome(bench.compare(pairs).rows, conditions)


def waiting(one: Contender, device: str) -> Contender:
    """The same contender, waiting until the device has finished: a call alone only fills its queue."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run() -> None:
        one.run()
        wait()

    return one._replace(run=run)


# A function that builds a layer of another library, and the numbers of groups into which a batch is split. The cost of
# dispatch grows with the square of a group's size, and each expert has a fixed capacity per group: one group drops the
# fewest rows, eight are faster.
Peer = tuple[Callable[[], nn.Module], dict[str, int]]
GROUPS = {"1 group": 1, "8 groups": 8}


class Stack(nn.Module):
    """Layers of another library, each added to the residual stream as in our models."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(NUM_LAYERS))

    def forward(self, hidden_BD: Tensor, num_groups: int = 1) -> Tensor:
        stream_GSD = hidden_BD.view(num_groups, -1, hidden_BD.shape[-1])
        for layer in self.layers:
            result: Any = layer(stream_GSD)
            stream_GSD = stream_GSD + (result if isinstance(result, Tensor) else result[0])
        return stream_GSD.view(hidden_BD.shape)


def mixture_of_experts(size: ExpertSize) -> Peer:
    """`MoE` with its defaults: some second choices and all rows past an expert's capacity are dropped."""
    from mixture_of_experts import MoE

    return partial(MoE, size.dim, num_experts=NUM_EXPERTS, hidden_dim=size.hidden), GROUPS


def st_moe(size: ExpertSize) -> Peer:
    """`MoE` with its defaults, which drop rows too; its experts are gated, and narrower for the same number of MACs."""
    from st_moe_pytorch import MoE

    widen = size.hidden / size.dim
    return partial(MoE, size.dim, num_experts=NUM_EXPERTS, gating_top_n=2, expert_hidden_mult=widen), GROUPS


def mixtral(size: ExpertSize) -> Peer:
    """`MixtralSparseMoeBlock`, its inner width chosen for the same number of MACs: its experts have three matrices."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": size.dim, "intermediate_size": 2 * size.hidden // 12 * 4}  # for rows of 16 bytes
    config = MixtralConfig(num_local_experts=NUM_EXPERTS, num_experts_per_tok=2, **sizes)
    config._experts_implementation = "grouped_mm"  # the fastest of its three here

    def block() -> nn.Module:
        made = MixtralSparseMoeBlock(config)
        for parameter in made.parameters():  # the block does not initialise them
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        return made

    return block, {"grouped_mm": 1}


PEERS: dict[str, Callable[[ExpertSize], Peer]] = {
    "mixture-of-experts": mixture_of_experts,
    "st-moe-pytorch": st_moe,
    "Mixtral (transformers)": mixtral,
}


# The steps of another library's layers: variant → step.
Steps = dict[str, Callable[[], object]]


def layer_steps(size: ExpertSize, layer: Callable[[], nn.Module], variants: dict[str, int]) -> Steps:
    """Steps of the layers alone."""
    stack = Stack(layer)
    return {way: LayerStep(stack, size.dim, partial(stack, num_groups=num)) for way, num in variants.items()}


def peer_steps(
    name: str, size: ExpertSize, make_steps: Callable[..., Steps] = layer_steps, experts: int = 8
) -> list[Contender] | str:
    """A contender for each variant of another library's layers, run once to check it; or the reason why there is none."""
    try:
        steps = make_steps(size, *PEERS[name](size))
        for step in steps.values():
            step()
    except ImportError as error:
        return f"not installed ({error}): pip install '.[bench]'"
    except Exception as error:  # any exception of another library is reported in the table
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return [Contender(f"{name}, {variant}, {size}", step, experts=experts) for variant, step in steps.items()]


def against_peers(
    bench: Bench, ours: Contender, size: ExpertSize, found: dict[str, list[Contender] | str], *pairs: Contender
) -> list[dict[str, Any]]:
    """Rows of our contenders against the last of `pairs`, then of the first against each library in its fastest variant."""
    others = [one for ways in found.values() if not isinstance(ways, str) for one in ways]
    timings = bench.time([ours, *pairs, *others])
    rows = [timings.row(one, pairs[-1]) for one in (ours, *pairs[:-1]) if pairs]
    for name, ways in found.items():
        if isinstance(ways, str):
            rows.append({"what": ours.name, "against": f"{name}, {size}", "ratio": None, "note": ways})
        else:
            rows.append(timings.row(ours, min(ways, key=timings.median)))
    return rows


def measure_peers(bench: Bench) -> Outcome:
    rows: list[dict[str, Any]] = []
    for size in (NARROW, COSTLY):
        ours = Contender(f"ours, {size}", LayerStep(HiddenOnly(top2_layer(size)), size.dim), experts=8)
        rows += against_peers(bench, ours, size, {name: peer_steps(name, size) for name in PEERS})
    return Outcome(rows)


class PeerPart(nn.Module):
    """A layer of another library as the experts of a decoder block; two of them run."""

    def __init__(self, layer: Callable[[], nn.Module], num_groups: int) -> None:
        super().__init__()
        self.layer, self.num_groups = layer(), num_groups

    def forward(self, hidden_nD: Tensor) -> Tensor:
        result: Any = self.layer(hidden_nD.view(self.num_groups, -1, hidden_nD.shape[-1]))
        update_nD: Tensor = (result if isinstance(result, Tensor) else result[0]).reshape(hidden_nD.shape)
        return update_nD


def token_step(batches: list[Batch], model: str, layer: Callable[[], nn.Module] | None = None, **options: Any) -> Any:
    """The training step of a byte decoder, with its own experts or, in each block, with what `layer` builds."""
    torch.manual_seed(SEED)
    task = find_task(TEXT_DATA)
    decoder: Any = task.build(model, task.load(TEXT_DATA), options)
    if layer is not None:
        decoder.layer = DenseBlocks(decoder.layer.dim, len(decoder.blocks), expert=layer)
    return TrainingStep(recipe(TEXT_DATA, model), decoder, cycle(batches))


def measure_tokens(bench: Bench) -> Outcome:
    loader = find_task(TEXT_DATA).loader(find_task(TEXT_DATA).load(TEXT_DATA), "train", NUM_WINDOWS, {}, seed=SEED)
    batches: list[Batch] = list(islice(loader.epoch(0), 8))
    # With a larger `stop` fewer experts run; the table shows how many.
    mre = token_step(batches, "gpt-mre").contender("gpt-mre")
    fewer = token_step(batches, "gpt-mre", stop=8.0).contender("gpt-mre, stop 8")
    top2 = token_step(batches, "gpt-top-k").contender("gpt-top-k")

    def peer_decoders(size: ExpertSize, layer: Callable[[], nn.Module], variants: dict[str, int]) -> Steps:
        ways = variants | ({"one window per group": NUM_WINDOWS} if len(variants) > 1 else {})
        return {way: token_step(batches, "gpt-top-k", partial(PeerPart, layer, num)) for way, num in ways.items()}

    found = {name: peer_steps(name, TOKEN, peer_decoders, round(top2.experts or 0)) for name in PEERS}
    return Outcome(against_peers(bench, mre, TOKEN, found, fewer, top2))


def measure_core_limit(bench: Bench) -> Outcome:
    a, b, out = (torch.randn(PRODUCT, PRODUCT) for _ in range(3))
    product = Contender(f"{PRODUCT}×{PRODUCT} matrices", partial(torch.mm, a, b, out=out))
    steps = []
    for dim in LIMIT_DIMS:
        layer = raytraced_layer(ExpertSize(dim, 4 * dim))
        run = LayerStep(HiddenOnly(layer), dim)
        cost, experts = step_macs(layer, run.hidden_BD)
        steps.append((Contender(f"width {dim}", run, experts=experts), cost / PRODUCT**3))
    timings = bench.time([product, *(one for one, _ in steps)])
    against = {"against": f"its MACs at the speed of {product.name}"}
    return Outcome([timings.row(one, product, times=times) | against for one, times in steps])


def step_macs(layer: RoutedLayer, hidden_BD: Tensor) -> tuple[float, float]:
    """MACs of a forward and a backward pass, which costs twice the forward pass, and the mean number of experts."""
    with torch.no_grad():
        route = layer(hidden_BD).route
    forward_B = torch.as_tensor(sum(cost.macs for cost in layer.cost(route).values()))
    return 3 * float(forward_B.expand(len(hidden_BD)).sum()), float(route.num_active.float().mean())


MEASUREMENTS: dict[str, Callable[[Bench], Outcome]] = {
    "sequence": measure_sequence,
    "growth": measure_growth,
    "costly-experts": measure_costly_experts,
    "gpu": measure_gpu,
    "peers": measure_peers,
    "tokens": measure_tokens,
    "core-limit": measure_core_limit,
}
