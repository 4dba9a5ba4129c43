"""All models of the experiments: their labels in tables, and their options. Needs no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from raytraced.models.registry import PAPER, SHIPPED_IMAGES
from raytraced.training.config import Preset

# The models of the paper's tables: label → name in print.
NAMES = {
    "mlp-total": "MLP (36), residual",
    "mlp-avg": "MLP (24), residual",
    "top-k": "Top-2 MoE",
    "threshold": "Threshold MoE",
    "mre": "MRE, our recipe",
    "mre-paper": "MRE, as in the paper",
}
BUDGETS_NAME = "MRE, all budgets"
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
    """A model, its options, and the training options in which it differs from the others."""

    label: str  # its name in tables, figures and summary.json
    model: str  # its name in the registry
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    preset: Preset = "best"
    lr: float | None = None  # a rate that is part of the recipe; None: the search finds it
    tuned_as: "Variant | None" = None  # the variant whose search it shares
    family: str = ""  # the model of which it is one setting; empty: its label
    setting: float | None = None


# Written in full, like PAPER: records hold these options, and a test compares them with the models that are built now.
RECIPE = {"stream": "residual", "weighting": "rates-to-one", "mask_gradient": "active", "estimator": "none",
          "train_select": "greedy", "output_logit_offset": 5.0, "input_rank": 4}  # fmt: skip

# The paper's models. All baselines have a residual stream, as MRE has: plain MLPs of nine layers hardly train.
MLP_TOTAL = Variant("mlp-total", "mlp-total", {"stream": "residual"})
MLP_AVG = Variant("mlp-avg", "mlp-avg", {"stream": "residual"})
TOP_K = Variant("top-k", "top-k")
THRESHOLD = Variant("threshold", "threshold")
MRE = Variant("mre", "mre", RECIPE)
# The paper's model by the reading of benchmarks/readings.md: a fixed learning rate without search, and no schedule.
MRE_PAPER = Variant("mre-paper", "mre-paper", PAPER, preset="paper", lr=1e-3)
# The baselines as in the paper: no residual stream, no decay, a learning rate of 5e-4.
PAPER_BASELINES = tuple(
    Variant(f"{name}-paper", name, {"stream": "last"}, preset="paper", lr=5e-4)
    for name in ("mlp-total", "mlp-avg", "top-k", "threshold")
)
# The text as it is written, and one change at a time towards MRE_PAPER: equation 1 without a residual stream, normal weights.
LITERAL = PAPER | {"stream": "last", "gate_init": "normal"}
READING_VARIANTS = (
    Variant("literal", "mre-paper", LITERAL, preset="paper", lr=5e-3),
    Variant("literal-1e-3", "mre-paper", LITERAL, preset="paper", lr=1e-3),
    Variant("literal-1e-3-uniform", "mre-paper", LITERAL | {"gate_init": "uniform"}, preset="paper", lr=1e-3),
)
LONG_EPOCHS = 60
MRE_PAPER_LONG = replace(MRE_PAPER, label=f"mre-paper-{LONG_EPOCHS}-epochs")
# Our recipe without a loss on early answers and without a target: trained as the baselines of the same table are.
MRE_FINAL = Variant("mre-final-loss", "mre", RECIPE, {"exit_loss": 0.0, "target_experts": None})
# The second recipe, trained for all budgets: chosen on validation images in benchmarks/image-recipe.md; its rules are in
# benchmarks/aims-images.md.
ALL_BUDGETS = RECIPE | {"weighting": "relative", "stop_range": [0.05, 20.0]}
MRE_BUDGETS = Variant("mre-budgets", "mre", ALL_BUDGETS, {"exit_loss": 0.0, "target_experts": None})
MRE_BUDGETS_EXITS = Variant("mre-budgets-exits", "mre", ALL_BUDGETS, {"exit_loss": 0.5, "target_experts": None})
PAPER_VARIANTS = (MLP_TOTAL, MLP_AVG, TOP_K, THRESHOLD, MRE, MRE_PAPER)
# All models at the same constant learning rate, as in the paper's figure 3.
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

# Trained for early exit: half of the loss is that of the exits after each layer or block, as in our recipe. Each has a search
# of its own, as our recipe has.
EXIT_BASELINES = tuple(
    replace(one, label=f"{one.label}-exits", training={"exit_loss": 0.5}, tuned_as=None,
            family=f"{one.family}-exits" if one.family else "")
    for one in (*DENSE_VARIANTS, TOP_1, TOP_K, THRESHOLD)
)  # fmt: skip


def exit_variants(wide: bool) -> tuple[Variant, ...]:
    """All models with early exit on a data set. Multi-exit, as wide as MRE, has its own loss over all exits."""
    width = {} if wide else {"dim": 16}
    exits = replace(MULTI_EXIT, label="multi-exit-exits", options=MULTI_EXIT.options | width)
    return (MRE, *EXIT_BASELINES, exits)


def wide_variants() -> tuple[Variant, ...]:
    """The models of the union at a larger width, the most important ones first; each has a search of its own."""
    return (MRE_FINAL, MRE_BUDGETS, THRESHOLD, TOP_K, replace(TOP_1, tuned_as=None), *reversed(DENSE_VARIANTS))


def compared_variants(wide: bool) -> tuple[Variant, ...]:
    """All models that are compared on a data set: ours, baselines, controls; the paper's sizes only if it is not wide."""
    narrow = () if wide else (MRE_PAPER, MLP_TOTAL, MLP_AVG, MULTI_EXIT)
    return (MRE, *narrow, *ROUTED_VARIANTS, *DENSE_VARIANTS)


# Models whose cost can be set: model → option, its default, the other settings. For MRE it is target_experts.
COST_SETTINGS: dict[str, tuple[str, float, tuple[float, ...]]] = {
    "threshold": ("threshold", 0.5, (0.8, 0.95)),
    "ada-k": ("expert_cost", 0.0, (0.003, 0.03)),
    "null-experts": ("num_null", 8, (4, 24)),
}


def swept_variants(targets: tuple[float, ...]) -> tuple[Variant, ...]:
    """All other settings of models whose cost can be set, each trained at the learning rate of its default."""
    ours = replace(MRE, tuned_as=MRE, family="mre")
    aimed = (replace(ours, label=f"mre-target-{t:g}", training={"target_experts": t}, setting=t) for t in targets)
    turned = (
        Variant(f"{name}-{value:g}", name, {option: value}, tuned_as=Variant(name, name), family=name, setting=value)
        for name, (option, _, settings) in COST_SETTINGS.items()
        for value in settings
    )
    return (*aimed, *turned)


def temperature_variants(temperatures: tuple[float, ...]) -> tuple[Variant, ...]:
    """The paper's model at several temperatures of its Gumbel-softmax."""
    return tuple(
        replace(MRE_PAPER, label=f"mre-paper-tau-{tau:g}", family="mre-paper", setting=tau,
                options=PAPER | {"temperature": tau})
        for tau in temperatures
    )  # fmt: skip


INIT_VARIANTS = tuple(
    replace(MRE_PAPER, label=f"mre-paper-init-{name}", options=PAPER | {"scale_init": scaled})
    for name, scaled in (("scaled", True), ("plain", False))
)

# On tokens: 16 experts in each block of a decoder. Where weights are normalised, they sum to the number of experts, as MRE's.
EXPERTS_PER_BLOCK = {"num_experts": 16}
COUNTED = EXPERTS_PER_BLOCK | {"total": "count"}
# Our decoder, written in full, and its slow gates: docs/lab/paths.md.
SLOW_GATES = {"target_experts": None, "lr_routing": 4e-4}
DECODER = EXPERTS_PER_BLOCK | {"routing_input": "token", "routing_dim": 16, "weighting": "relative", "weight_scale": 2.0,
                               "stop": 0.2, "entry_scale": 16.0, "input_init_std": 3.0, "input_rank": 16,
                               "output_logit_offset": 8.0}  # fmt: skip
STOP_RANGE = [0.02, 1.0]  # of the model that is trained for all budgets


def text_variants() -> tuple[Variant, ...]:
    """The main rows of the comparison on text, the most important ones first. One search per group, that of its first row."""
    mre = Variant("mre", "gpt-mre", DECODER, SLOW_GATES)
    top = Variant("top-2", "gpt-top-k", COUNTED | {"k": 2})
    planned = Variant("planned-2", "gpt-planned", COUNTED | {"k": 2})
    hashed = Variant("hash-1", "gpt-hash", EXPERTS_PER_BLOCK | {"k": 1}, tuned_as=planned)
    return (
        mre,
        top,
        planned,
        hashed,
        replace(hashed, label="hash-2", options=EXPERTS_PER_BLOCK | {"k": 2}),
        replace(mre, label="mre-range", options=DECODER | {"stop_range": STOP_RANGE}, tuned_as=mre),
        replace(top, label="top-1", options=COUNTED | {"k": 1}, tuned_as=top),
        replace(top, label="top-4", options=COUNTED | {"k": 4}, tuned_as=top),
        Variant("matryoshka", "gpt-matryoshka", COUNTED | {"k": 2, "most": 8}, tuned_as=top),
        Variant("threshold", "gpt-threshold", COUNTED, tuned_as=top),
        Variant("dense-2", "gpt-dense", {"hidden": 256}),  # as wide as two experts
        Variant("seq-top-2", "gpt-seq-top-k", COUNTED | {"k": 2}, tuned_as=top),
        Variant("aux-free-2", "gpt-aux-free", COUNTED | {"k": 2}, tuned_as=top),
        replace(top, label="top-2-balance", options=COUNTED | {"k": 2, "balance": 0.01}, tuned_as=top),
        # An eighth of the bytes runs all 16 experts: two per byte on the mean.
        Variant("depths-2", "gpt-mixture-of-depths", EXPERTS_PER_BLOCK | {"capacity": 0.125}, tuned_as=top),
    )


# The rows of the comparison on words, the most important ones first.
WORD_ROWS = ("mre-range", "hash-2", "top-2-balance", "top-4", "mre", "hash-1", "planned-2", "top-2", "dense-2")


def word_variants() -> tuple[Variant, ...]:
    """The rows of the comparison on words: fewer than on bytes, with the same options."""
    main = {one.label: one for one in text_variants()}
    return tuple(main[label] for label in WORD_ROWS)


# The rows of the comparison at the main size: in each family of baselines those that were best over bytes and words.
MAIN_ROWS = ("mre-range", "hash-1", "planned-2", "top-2-balance", "hash-2", "top-4-balance", "dense-2")


def main_text_variants() -> tuple[Variant, ...]:
    """The rows of the comparison at the main size; each has a search of its own."""
    known = {one.label: one for one in (*text_variants(), *more_text_variants())}
    return tuple(replace(known[label], tuned_as=None) for label in MAIN_ROWS)


# The models that a comparison of language models trains, by its part of the plan; more of them follow on bytes.
TEXT_ROWS = {"text": text_variants, "words": word_variants, "main": main_text_variants}


def two_tokens(labels: Iterable[str]) -> tuple[Variant, ...]:
    """Models whose paths depend on two tokens: every second block has that of the token before. Each has its own search."""
    main = {one.label: one for one in text_variants()}
    return tuple(
        replace(main[label], label=f"{label}-pair", options=main[label].options | {"path_tokens": 2}, tuned_as=None)
        for label in labels
    )


def pair_text_variants() -> tuple[Variant, ...]:
    """The models on bytes whose paths depend on two tokens."""
    return two_tokens(("mre", "mre-range", "hash-1", "hash-2", "planned-2"))


def main_pair_variants() -> tuple[Variant, ...]:
    """The same at the main size, the most important ones first; one model of MRE stands for all, as there."""
    return two_tokens(("mre-range", "hash-1", "hash-2", "planned-2"))


# The models of two tokens that are compared with those of a part.
PAIR_ROWS = {"text": pair_text_variants, "main": main_pair_variants}


def more_text_variants() -> tuple[Variant, ...]:
    """Further rows on text, which are trained after all seeds of the main ones."""
    main = {one.label: one for one in text_variants()}
    top, planned, dense = main["top-2"], main["planned-2"], main["dense-2"]
    first_block = planned.options | {"routing_input": "first-block"}
    balanced = {
        k: replace(top, label=f"top-{k}-balance", options=COUNTED | {"k": k, "balance": 0.01}, tuned_as=top)
        for k in (1, 4, 8)
    }
    aux_free = {k: Variant(f"aux-free-{k}", "gpt-aux-free", COUNTED | {"k": k}, tuned_as=top) for k in (1, 4)}
    return (
        replace(top, label="top-8", options=COUNTED | {"k": 8}, tuned_as=top),
        balanced[1],
        balanced[4],
        aux_free[1],
        replace(planned, label="planned-1", options=COUNTED | {"k": 1}, tuned_as=planned),
        replace(planned, label="planned-4", options=COUNTED | {"k": 4}, tuned_as=planned),
        replace(planned, label="first-block-2", options=first_block, tuned_as=planned),
        Variant("relu-2", "gpt-relu", EXPERTS_PER_BLOCK | {"k": 2.0}, tuned_as=top),
        balanced[8],
        aux_free[4],
        *(replace(dense, label=f"dense-{num}", options={"hidden": 128 * num}, tuned_as=dense) for num in (1, 4, 8)),
    )


def searched_text_variants() -> tuple[Variant, ...]:
    """All models on bytes, each with a search of its own."""
    return tuple(replace(one, tuned_as=None) for one in (*text_variants(), *more_text_variants()))


# How each shipped image model was trained: name → data set and recipe.
SHIPPED_RECIPES = {
    name: (name.removeprefix("mre-").removeprefix("paper-"), MRE_PAPER if "paper" in name else MRE)
    for name in SHIPPED_IMAGES
}
