"""The base of the scikit-learn estimators: options, checked rows, training, outputs after 0, 1, … experts.

Axes: B rows, n distinct rows, F features, Y outputs, K answers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytraced.errors import install_extra, require

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"raytraced.integrations.sklearn: needs scikit-learn; {install_extra('sklearn')}") from error

from raytraced.integrations.table_rows import (
    Table,
    canonical_table,
    dense_rows,
    measure_columns,
    merge_rows,
    row_parts,
)
from raytraced.integrations.table_training import TableTrainer, split_rows
from raytraced.models.anytime import anytime
from raytraced.models.output import Model
from raytraced.models.registry import build

Rows = NDArray[np.int64]


@dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn compares and prints estimators itself
class TableEstimator(BaseEstimator):
    """The parts that both estimators share: options, standardised inputs, training, and outputs after 0, 1, … experts."""

    dim: int = 32
    num_layers: int = 3
    num_experts: int = 4
    epochs: int = 30
    batch_size: int = 32
    learning_rate: float = 5e-3
    weight_decay: float = 1.0
    anytime_loss: float = 0.25
    target_experts: float | None = None
    validation_fraction: float = 0.1
    patience: int = 10
    image_shape: tuple[int, int, int] | None = None
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = None

    def _check_options(self) -> None:
        """Refuse options out of range, with a ValueError that names the option, its value and the rule."""
        for name in ("dim", "num_layers", "num_experts", "epochs", "batch_size", "patience"):
            value = getattr(self, name)
            require(isinstance(value, Integral) and int(value) >= 1, name, value, "must be a whole number, at least 1")
        for name in ("learning_rate", "weight_decay", "anytime_loss", "validation_fraction", "target_experts"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) or (value is None and name == "target_experts")
            require(is_number, name, repr(value), "must be a number")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "must be positive and finite")
        rule = "must be at least 0 and finite"
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, rule)
        is_number = self.target_experts is None or 0 < self.target_experts < math.inf
        require(is_number, "target_experts", self.target_experts, "must be positive and finite, or None")
        if (shape := self.image_shape) is not None:
            sizes = tuple(shape) if np.iterable(shape) else ()
            is_image = len(sizes) == 3 and all(isinstance(size, Integral) and int(size) >= 1 for size in sizes)
            require(is_image, "image_shape", shape, "must be three whole numbers (channels, height, width)")
        require(0 <= self.anytime_loss <= 1, "anytime_loss", self.anytime_loss, "must lie in 0 … 1")
        rule = "must lie in 0 … 1 (1 excluded); 0: train on all rows for all epochs"
        require(0 <= self.validation_fraction < 1, "validation_fraction", self.validation_fraction, rule)

    def _check_rows(self, X: Any, *, reset: bool = False, **options: Any) -> Any:
        """X, and y if there is one, as arrays of numbers; a ValueError of one line says what is wrong with them."""
        if len(shape := getattr(X, "shape", ())) > 2:
            raise ValueError(f"X has shape {tuple(shape)}: must be 2-D; reshape it to (len(X), -1), give image_shape")
        options |= {"dtype": (np.float64, np.float32), "ensure_all_finite": False, "reset": reset}
        try:
            checked = validate_data(self, X, accept_sparse=["csr"], **options)
        except ValueError as error:
            lines = str(error).splitlines()
            if "could not convert string" in lines[0]:
                name = "X" if np.asarray(X).dtype.kind in "OUS" else "y"
                raise ValueError(
                    f"{name}: {error}; encode words as numbers first, for example with OneHotEncoder"
                ) from None
            if len(lines) == 1:
                raise
            short = [line for line in (lines[0], lines[-1]) if not line.endswith("]")]
            raise ValueError(" ".join(short)) from None  # without the values of a whole array
        rows_BF = checked[0] if "y" in options else checked
        values = rows_BF.data if sparse.issparse(rows_BF) else rows_BF
        if bad := values.size - int(np.isfinite(values).sum()):
            remedy = "fill them in first, for example with SimpleImputer"
            raise ValueError(f"X: {bad} of {values.size} values are NaN or infinity; {remedy}")
        return checked

    def _check_weights(self, sample_weight: Any, X_BF: Table) -> NDArray[np.float64]:
        """The weights of rows (B,); 1 for each where there are none."""
        weights_B: NDArray[np.float64] = _check_sample_weight(sample_weight, X_BF, dtype=np.float64)
        if (weights_B < 0).any():
            raise ValueError(f"sample_weight: holds {weights_B.min()}; must be at least 0")
        if not weights_B.any():
            raise ValueError("sample_weight: all weights are zero; at least one must be positive")
        return weights_B

    @property
    def _shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the model's inputs: images, or images of one line."""
        channels, height, width = (1, 1, self.n_features_in_) if self.image_shape is None else self.image_shape
        return channels, height, width

    def _inputs(self, X_BF: Table, rows_n: Rows, dtype: type) -> Tensor:
        """Some rows as the model's inputs (n, C, H, W), standardised."""
        standard_nF = (dense_rows(X_BF, rows_n) - self.mean_) / self.scale_
        return torch.from_numpy(standard_nF.astype(dtype)).view(-1, *self._shape)

    def _continues(self) -> bool:
        """Whether `fit` starts from the weights of the last fit."""
        return self.warm_start and hasattr(self, "model_")

    def _prepare(self, X_BF: Table, rows_n: Rows, weights_n: NDArray[np.float64], num_outputs: int, seed: int) -> None:
        """Measure the columns and build a model, or check that the present model has the same sizes."""
        grid = {"dim": self.dim, "num_layers": self.num_layers, "num_experts": self.num_experts}
        if hasattr(self, "model_"):
            for name, value in grid.items():
                old = self.model_.card.options[name]
                require(
                    value == old, name, value, f"the model to continue has {old}; set warm_start=False to start anew"
                )
            return
        C, H, W = self._shape
        if X_BF.shape[1] != C * H * W:
            raise ValueError(f"image_shape={self.image_shape}: holds {C * H * W} values, a row has {X_BF.shape[1]}")
        mean_F, variance_F = measure_columns("X", X_BF, rows_n, weights_n)
        if self.image_shape is not None:
            # Pixels of an image share one scale per channel; columns of a table have one scale each.
            mean_C = mean_F.reshape(C, -1).mean(1)
            variance_F = variance_F + (mean_F - mean_C.repeat(H * W)) ** 2
            mean_F = mean_C.repeat(H * W)
            variance_F = variance_F.reshape(C, -1).mean(1).repeat(H * W)
        scale_F = np.sqrt(variance_F)
        # A constant column carries no information: without this its rounding errors would be scaled up to noise.
        self.mean_ = mean_F
        self.scale_ = np.where(scale_F > 1e-12 * np.maximum(1, np.abs(mean_F)), scale_F, 1.0)
        sizes = {name: int(value) for name, value in grid.items()}  # a grid search passes numpy's integers
        torch.default_generator.manual_seed(seed)  # only the CPU's generator: a GPU's stays as it was
        self.model_: Model = build("mre", image_shape=self._shape, num_classes=num_outputs, **sizes)

    def _fit(
        self,
        X_BF: Table,
        targets_BY: NDArray[Any],
        weights_B: NDArray[np.float64],
        num_outputs: int,
        *,
        one_pass: bool = False,
        class_weights_Y: NDArray[np.float64] | None = None,
    ) -> None:
        """Train on checked rows (B, F); targets are class numbers (B, 1), or standardised numbers (B, Y)."""
        X_BF = canonical_table(X_BF)
        rows_n, weights_n = merge_rows(X_BF, targets_BY, weights_B)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        with torch.random.fork_rng(devices=[]), one_thread():
            self._prepare(X_BF, rows_n, weights_n, num_outputs, seed)
            self.model_.float()
            try:
                factors_n = 1.0 if class_weights_Y is None else class_weights_Y[targets_BY[rows_n, 0]]
                self._train(X_BF, targets_BY, rows_n, weights_n * factors_n, float(weights_n.mean()), seed, one_pass)
            finally:
                # Predict in double precision: a row's output then does not depend on the other rows of its batch.
                self.model_.double()
            _, experts_n = self._answer(X_BF, rows_n)
            self.num_experts_ = float((experts_n * weights_n).sum() / weights_n.sum())

    def _train(
        self,
        X_BF: Table,
        targets_BY: NDArray[Any],
        rows_n: Rows,
        weights_n: NDArray[np.float64],
        repeats: float,
        seed: int,
        one_pass: bool,
    ) -> None:
        """Run all epochs, or one pass that continues with the state of the last one."""
        targets = torch.from_numpy(targets_BY[rows_n])
        targets = targets.float() if targets.is_floating_point() else targets[:, 0]
        trainer = TableTrainer(
            model=self.model_,
            inputs_fn=lambda batch_n: self._inputs(X_BF, rows_n[batch_n.numpy()], np.float32),
            targets=targets,
            weights=torch.from_numpy(weights_n / (weights_n.mean() or 1.0)).float(),
            losses_fn=self._losses,
            repeats=repeats,
            batch_size=int(self.batch_size),
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            anytime_loss=self.anytime_loss,
            target_experts=self.target_experts,
            seed=seed,
            state=getattr(self, "_optimizer_state", None) if one_pass else None,
        )
        if one_pass:
            trainer.step = getattr(self, "_num_steps", 0)
            trainer.run_epoch(torch.arange(len(rows_n)))
            self._optimizer_state: dict[str, Any] | None = trainer.optimizer.state_dict()
            self._num_steps = trainer.step
            self.num_epochs_ = getattr(self, "num_epochs_", 0) + 1
            self.validation_loss_: list[float] = getattr(self, "validation_loss_", [])
            return
        train_n, validation_n = split_rows(targets, self.validation_fraction, seed)
        self.num_epochs_ = trainer.train(train_n, validation_n, int(self.epochs), int(self.patience))
        self.validation_loss_ = trainer.history
        self._optimizer_state, self._num_steps = None, 0

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row (K, B) from outputs (K, B, Y) and targets."""
        raise NotImplementedError

    @torch.no_grad()
    def _answer(self, X_BF: Table, rows_n: Rows | None = None, **options: Any) -> tuple[NDArray[np.float64], Rows]:
        """The model's outputs (B, Y), and the number of experts that each row runs (B,)."""
        self.model_.eval()
        outputs = [self.model_(self._inputs(X_BF, part, np.float64), **options) for part in row_parts(X_BF, rows_n)]
        logits_BY, experts_B = (
            torch.cat(part) for part in ([o.logits for o in outputs], [o.num_runs for o in outputs])
        )
        return logits_BY.numpy(), experts_B.numpy()

    def _checked(self, X: Any) -> Table:
        """Rows (B, F) to predict."""
        check_is_fitted(self)
        return self._check_rows(X)

    def _outputs(self, X: Any, **options: Any) -> NDArray[np.float64]:
        """The model's outputs for rows (B, F), (B, Y)."""
        return self._answer(self._checked(X), **options)[0]

    def _anytime(self, X: Any, max_experts: int | None) -> Iterator[NDArray[np.float64]]:
        """The outputs (B, Y) after 0, 1, 2, … experts, until the last row's sequence has ended."""
        X_BF = self._checked(X)
        inputs = [self._inputs(X_BF, part, np.float64) for part in row_parts(X_BF)]
        parts = [anytime(self.model_, part, max_experts=max_experts) for part in inputs]
        outputs: list[Any] = [None] * len(parts)
        while True:
            with torch.no_grad():
                steps = [next(part, None) for part in parts]
            if all(step is None for step in steps):
                return
            outputs = [last if step is None else step.logits for last, step in zip(outputs, steps, strict=True)]
            yield torch.cat(outputs).numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _forget(self) -> None:
        """Let the next training start with a new model."""
        for name in ("model_", "_optimizer_state", "_num_steps", "num_epochs_", "validation_loss_"):
            self.__dict__.pop(name, None)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: at these sizes threads mostly wait, and n_jobs of scikit-learn's searches uses the cores better."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
