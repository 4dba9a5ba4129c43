"""Who takes part: every model under the name that tables give it, with the options that make it so. Needs no torch."""

from dataclasses import dataclass, field, replace
from typing import Any

from raytraced.models.table import PAPER
from raytraced.training.config import Preset

# In print. Who has a name here is in the paper's tables.
NAMES = {
    "mlp-total": "MLP (36), residual",
    "mlp-avg": "MLP (24), residual",
    "top-k": "Top-2 MoE",
    "threshold": "Threshold MoE",
    "mre": "MRE, our recipe",
    "mre-paper": "MRE, as in the paper",
}
DATA_NAMES = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "union": "Union (30 classes)",
    "shakespeare": "Shakespeare",
    "enwik8": "enwik8",
    "mix": "Mix of five domains",
}


@dataclass(frozen=True)
class Variant:
    """A model, its options, and how it is trained where that differs from the others."""

    label: str  # its name in tables, figures and summary.json
    model: str  # its name for build
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    preset: Preset = "best"
    lr: float | None = None  # one that is part of the recipe; None: found by the search
    tuned_as: "Variant | None" = None  # whose search it shares
    family: str = ""  # what it is one setting of; empty: its label
    setting: float | None = None


# Said in full, as PAPER is: a record tells what it was made with, and a test asks whether that is still what is built.
RECIPE = {"stream": "residual", "weighting": "rates-to-one", "mask_gradient": "active", "estimator": "none",
          "train_select": "greedy", "reach": 5.0, "sight_rank": 4}  # fmt: skip

# The paper's models, but every rival gets the residual stream that MRE has: plain MLPs of nine layers hardly train.
MLP_TOTAL = Variant("mlp-total", "mlp-total", {"stream": "residual"})
MLP_AVG = Variant("mlp-avg", "mlp-avg", {"stream": "residual"})
TOP_K = Variant("top-k", "top-k")
THRESHOLD = Variant("threshold", "threshold")
MRE = Variant("mre", "mre", RECIPE)
# The paper's system as benchmarks/readings.md found it: its rate, which is not searched for, and no schedule.
MRE_PAPER = Variant("mre-paper", "mre-paper", PAPER, preset="paper", lr=1e-3)
# Its rivals as the paper has them: no residual stream, no decay, 5e-4.
PAPER_RIVALS = tuple(
    Variant(f"{name}-paper", name, {"stream": "last"}, preset="paper", lr=5e-4)
    for name in ("mlp-total", "mlp-avg", "top-k", "threshold")
)
PAPER_VARIANTS = (MLP_TOTAL, MLP_AVG, TOP_K, THRESHOLD, MRE, MRE_PAPER)
# Everyone at the same, constant learning rate, as in the paper's figure 3.
EQUAL_LR = 1e-3
EQUAL_VARIANTS = tuple(replace(one, lr=EQUAL_LR, training={"schedule": "constant"}) for one in PAPER_VARIANTS)

TOP_K_BALANCE = Variant("top-k-balance", "top-k", {"balance": 0.01}, tuned_as=TOP_K)
AUX_FREE = Variant("aux-free", "aux-free")
BALANCE_VARIANTS = (MRE, MRE_PAPER, TOP_K, TOP_K_BALANCE, AUX_FREE)

TOP_1 = Variant("top-1", "top-k", {"k": 1}, tuned_as=TOP_K)
TOP_ANY = Variant("top-any", "top-any", {"removal": 100})
OTHERS = (TOP_ANY, *(Variant(name, name) for name in ("ada-k", "null-experts", "chain")))
ROUTED_VARIANTS = (TOP_1, TOP_K, TOP_K_BALANCE, AUX_FREE, THRESHOLD, *OTHERS)
MULTI_EXIT = Variant("multi-exit", "multi-exit", {"stream": "residual"})
DENSE_VARIANTS = tuple(
    Variant(f"dense-{num}", "dense", {"num_blocks": num}, family="dense", setting=num) for num in (1, 2, 4, 8)
)

# Trained to be stopped early: half of the loss is asked of the answers after each layer or block. Part of our recipe.
SURE_VARIANTS = tuple(
    replace(one, label=f"{one.label}-sure", training={"look_loss": 0.5}, tuned_as=one.tuned_as or one,
            family=f"{one.family}-sure" if one.family else "")
    for one in (*DENSE_VARIANTS, TOP_1, TOP_K, THRESHOLD)
)  # fmt: skip


def sure_variants(wide: bool) -> tuple[Variant, ...]:
    """All that are stopped when sure on a data set; of multi-exit, as wide as MRE, the own loss is that of every exit."""
    width = {} if wide else {"dim": 16}
    exits = replace(MULTI_EXIT, label="multi-exit-sure", options=MULTI_EXIT.options | width, tuned_as=MULTI_EXIT)
    return (MRE, *SURE_VARIANTS, exits)


def compared_variants(wide: bool) -> tuple[Variant, ...]:
    """All that meet on a data set: ours, rivals, controls; models of the paper's sizes if it is not wide."""
    narrow = () if wide else (MRE_PAPER, MLP_TOTAL, MLP_AVG, MULTI_EXIT)
    return (MRE, *narrow, *ROUTED_VARIANTS, *DENSE_VARIANTS)


# Whoever has a knob for its cost: model → option, its default, the other settings. MRE's knob is its target.
KNOBS: dict[str, tuple[str, float, tuple[float, ...]]] = {
    "threshold": ("threshold", 0.5, (0.8, 0.95)),
    "ada-k": ("expert_cost", 0.0, (0.003, 0.03)),
    "null-experts": ("num_null", 8, (4, 24)),
}


def swept_variants(targets: tuple[float, ...]) -> tuple[Variant, ...]:
    """The points along everyone's knob, each trained at the rate that was found for its default."""
    ours = replace(MRE, tuned_as=MRE, family="mre")
    aimed = (replace(ours, label=f"mre-target-{t:g}", training={"target_experts": t}, setting=t) for t in targets)
    turned = (
        Variant(f"{name}-{value:g}", name, {option: value}, tuned_as=Variant(name, name), family=name, setting=value)
        for name, (option, _, settings) in KNOBS.items()
        for value in settings
    )
    return (*aimed, *turned)


def temperature_variants(temperatures: tuple[float, ...]) -> tuple[Variant, ...]:
    """The paper's model, which draws, at several temperatures of its Gumbel-softmax."""
    return tuple(
        replace(MRE_PAPER, label=f"mre-paper-tau-{tau:g}", family="mre-paper", setting=tau,
                options=PAPER | {"temperature": tau})
        for tau in temperatures
    )  # fmt: skip


INIT_VARIANTS = tuple(
    replace(MRE_PAPER, label=f"mre-paper-init-{name}", options=PAPER | {"scale_init": scaled})
    for name, scaled in (("scaled", True), ("plain", False))
)

# On tokens, 32 experts in each block of a decoder. Found on validation bytes: docs/text.md.
TEXT_RECIPE = {"num_layers": 2, "num_experts": 16, "weighting": "rates", "sight_rank": 16, "reach": 0.0}
ONE_LAYER = {"num_layers": 1, "num_experts": 32}
# One layer of all 32: its sequences would end after one expert, did the output node's rate count in full.
WIDE = ONE_LAYER | {"weighting": "rates", "sight_rank": 0, "reach": 0.0, "stop": 0.12}


def text_variants() -> tuple[Variant, ...]:
    """All that meet on tokens; a search each for ours, ours in one layer, dense blocks, one layer of 32, and all stacks."""
    mre = Variant("mre", "gpt-mre", TEXT_RECIPE, {"target_experts": None})
    mre_wide = Variant("mre-wide", "gpt-mre", WIDE, {"target_experts": None})
    shared: tuple[tuple[Variant, ...], ...] = (  # the first one's search is everyone's
        (
            mre,
            replace(mre, label="mre-target-4", training={"target_experts": 4.0}, family="mre", setting=4),
            replace(mre, label="mre-target-8", training={"target_experts": 8.0}, family="mre", setting=8),
            replace(mre, label="mre-elastic", training={"target_experts": None, "anytime_loss": 0.25}),
        ),
        (mre_wide, replace(mre_wide, label="mre-wide-target-4", training={"target_experts": 4.0})),
        tuple(replace(DENSE_VARIANTS[at], model="gpt-dense") for at in (2, 0, 1, 3)),  # 4 blocks, then 1, 2, 8
        (
            *(Variant(f"top-{k}-of-32", "gpt-top-k", ONE_LAYER | {"k": k, "total": "count"}) for k in (4, 1, 2)),
            Variant("threshold-of-32", "gpt-threshold", ONE_LAYER | {"total": "count"}),
            Variant("relu-of-32", "gpt-relu", ONE_LAYER | {"k": 4.0}),
        ),
        (
            *(Variant(f"stack-{k}", "gpt-top-k", {"k": k}) for k in (2, 1)),
            Variant("planned-1", "gpt-planned", {"k": 1}),
            *(Variant(name, f"gpt-{name}") for name in ("threshold", "aux-free", "null-experts", "chain", "relu")),
        ),
    )
    return tuple(replace(one, tuned_as=first) for first, *others in shared for one in (first, *others))


# Models in the package: name → data set and recipe.
SHIPPED = {
    "mre-mnist": ("mnist", MRE),
    "mre-fashion-mnist": ("fashion-mnist", MRE),
    "mre-cifar10": ("cifar10", MRE),
    "mre-digits": ("digits", MRE),
    "mre-paper-fashion-mnist": ("fashion-mnist", MRE_PAPER),
}
