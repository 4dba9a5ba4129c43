"""Who takes part: every model under the name that tables give it, with the options that make it so. Needs no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

from raytraced.models import GRID, OURS


@dataclass(frozen=True)
class Variant:
    """A model, its options, and how it is trained where that differs from the others."""

    label: str
    """its name in tables, figures and summary.json"""
    model: str
    """its name for build_model"""
    options: dict[str, Any] = field(default_factory=dict)
    """options of the model"""
    training: dict[str, Any] = field(default_factory=dict)
    """options of training"""
    preset: str = "best"
    """the training preset it starts from"""
    lr: float | None = None
    """a learning rate that is part of the recipe; None: found by the search"""
    tuned_as: str | None = None
    """the label whose learning rate it takes; None: its own"""


# The paper's models, but every rival gets the residual stream that MRE has: plain MLPs of nine layers hardly train.
MLP_TOTAL = Variant("mlp-total", "mlp-total", {"stream": "residual"})
MLP_AVG = Variant("mlp-avg", "mlp-avg", {"stream": "residual"})
TOP_K = Variant("top-k", "top-k")
THRESHOLD = Variant("threshold", "threshold")
# Our recipe said in full: a run of another one is another run.
RECIPE = {name: value for name, value in OURS.items() if name not in GRID}
MRE = Variant("mre", "mre", RECIPE)
# The text as written: its own learning rate, which is not searched for, and no schedule.
MRE_PAPER = Variant("mre-paper", "mre-paper", preset="paper", lr=5e-3)

PAPER_VARIANTS = (MLP_TOTAL, MLP_AVG, TOP_K, THRESHOLD, MRE, MRE_PAPER)

TOP_K_BALANCE = Variant("top-k-balance", "top-k", {"balance": 0.01}, tuned_as="top-k")
AUX_FREE = Variant("aux-free", "aux-free")
BALANCE_VARIANTS = (MRE, MRE_PAPER, TOP_K, TOP_K_BALANCE, AUX_FREE)

DENSE_VARIANTS = tuple(Variant(f"dense-{blocks}", "dense", {"num_blocks": blocks}) for blocks in (1, 2, 4, 8))

RIVAL_VARIANTS = (
    Variant("top-1", "top-k", {"k": 1}, tuned_as="top-k"),
    TOP_K,
    TOP_K_BALANCE,
    AUX_FREE,
    THRESHOLD,
    Variant("ada-k", "ada-k"),
    Variant("top-any", "top-any"),
    Variant("null-experts", "null-experts"),
    Variant("chain", "chain"),
)

UNROUTED_VARIANTS = (
    MLP_TOTAL,
    MLP_AVG,
    Variant("multi-exit", "multi-exit", {"stream": "residual"}),
)

ROUTED_RIVALS = tuple(variant.label for variant in RIVAL_VARIANTS)
DENSE_CONTROLS = tuple(variant.label for variant in DENSE_VARIANTS)
NO_RIVALS = ("mre-paper", *DENSE_CONTROLS)
"""labels that are neither ours nor a rival: the text as written, and the controls"""


def with_cost(cost: float) -> Variant:
    """Ours with the cost dial turned to `cost`."""
    return replace(MRE, label=f"mre-cost-{cost:g}", training={"expert_cost": cost}, tuned_as="mre")


def tuned_mre(label: str, options: dict[str, Any]) -> Variant:
    """Ours with some options changed, at its own learning rate."""
    return replace(MRE, label=label, options=RECIPE | options, tuned_as="mre")


def is_ours(label: str) -> bool:
    """Whether a label is MRE by our recipe, at any setting of the cost dial."""
    return label == "mre" or label.startswith("mre-cost-")


def frontier_variants(dials: tuple[float, ...]) -> tuple[Variant, ...]:
    """All that is drawn in the frontier: ours along the dial, the routed rivals, the others, the controls."""
    return (MRE, *map(with_cost, dials), MRE_PAPER, *RIVAL_VARIANTS, *UNROUTED_VARIANTS, *DENSE_VARIANTS)


def union_variants(dials: tuple[float, ...]) -> tuple[Variant, ...]:
    """What meets on the 30-class union: width 64 and 64-wide experts in the same grid, so that capacity matters."""
    chosen = (MRE, *map(with_cost, dials), *RIVAL_VARIANTS, *DENSE_VARIANTS)
    return tuple(replace(variant, options={"dim": 64} | variant.options) for variant in chosen)


def temperature_variants(temperatures: tuple[float, ...]) -> tuple[Variant, ...]:
    """Gumbel-softmax at several temperatures: the text as written, and our recipe with that estimator."""
    written = (
        replace(MRE_PAPER, label=f"mre-paper-tau-{value:g}", options={"temperature": value}) for value in temperatures
    )
    ours = (tuned_mre(f"mre-tau-{value:g}", {"estimator": "gumbel", "temperature": value}) for value in temperatures)
    return (*written, *ours)


def init_variants() -> tuple[Variant, ...]:
    """Routing weights drawn with the paper's scaling of the initialisation, and without."""
    return tuple(
        tuned_mre(f"mre-init-{name}", {"scale_init": scaled}) for name, scaled in (("scaled", True), ("plain", False))
    )
