"""Estimators for scikit-learn: `MREClassifier().fit(X, y)` and `MRERegressor().fit(X, y)`.

Axes: B rows, F features, Y classes or targets.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from raytraced.errors import require
from raytraced.models.anytime import anytime
from raytraced.models.registry import build
from raytraced.sequence import stop_losses
from raytraced.training.objective import PREFIXES, STOP_WEIGHT

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("raytraced.integrations.sklearn: needs scikit-learn; pip install 'raytraced[sklearn]'") from error

ROWS = 4096  # rows that go through the model at once


@dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn compares and prints estimators itself
class _RaytracedEstimator(BaseEstimator):
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

    def _check_rows(self, X: Any, **options: Any) -> Any:
        """X, and y if there is one, as arrays of numbers; a ValueError of one line says what is wrong with them."""
        if len(shape := getattr(X, "shape", ())) > 2:
            raise ValueError(f"X has shape {tuple(shape)}: must be 2-D; reshape it to (len(X), -1), give image_shape")
        options |= {"dtype": (np.float64, np.float32), "ensure_all_finite": False, "reset": "y" in options}
        try:
            checked = validate_data(self, X, **options)
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
        if bad := rows_BF.size - int(np.isfinite(rows_BF).sum()):
            remedy = "fill them in first, for example with SimpleImputer"
            raise ValueError(f"X: {bad} of {rows_BF.size} values are NaN or infinity; {remedy}")
        return checked

    def _standardise(self, X_BF: NDArray[Any], dtype: type) -> Tensor:
        """Rows (B, F) as the model's inputs (B, C, H, W): images, or images of one line."""
        standard_BF = (X_BF - self.mean_) / self.scale_
        return torch.from_numpy(standard_BF.astype(dtype)).view(-1, *self._shape)

    @property
    def _shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the model's inputs."""
        channels, height, width = (1, 1, self.n_features_in_) if self.image_shape is None else self.image_shape
        return channels, height, width

    def _fit(self, X_BF: NDArray[Any], targets_B: Tensor, weights_B: Tensor, num_outputs: int) -> None:
        """Train a model on checked rows (B, F); targets are class numbers (B,), or standardised numbers (B, Y)."""
        C, H, W = self._shape
        if X_BF.shape[1] != C * H * W:
            raise ValueError(f"image_shape={self.image_shape}: holds {C * H * W} values, a row has {X_BF.shape[1]}")
        # Pixels of an image share one scale per channel; columns of a table have one scale each.
        groups = X_BF if self.image_shape is None else X_BF.reshape(len(X_BF), C, -1).transpose(0, 2, 1).reshape(-1, C)
        mean, scale = _measure("X", groups)
        # A constant column carries no information: without this its rounding errors would be scaled up to noise.
        scale = np.where(scale > 1e-12 * np.maximum(1, np.abs(mean)), scale, 1.0)
        pixels = 1 if self.image_shape is None else H * W
        self.mean_, self.scale_ = np.repeat(mean, pixels), np.repeat(scale, pixels)
        inputs = self._standardise(X_BF, np.float32)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.default_generator.manual_seed(seed)  # only the CPU's generator: a GPU's stays as it was
            grid = {"dim": self.dim, "num_layers": self.num_layers, "num_experts": self.num_experts}
            sizes = {name: int(value) for name, value in grid.items()}  # a grid search passes numpy's integers
            self.model_ = build("mre", image_shape=self._shape, num_classes=num_outputs, **sizes)
            self._train(inputs, targets_B, weights_B, seed)
            # Predict in double precision: a row's output then does not depend on the other rows of its batch.
            self.model_.double()
            _, experts_B = self._answer(self._standardise(X_BF, np.float64))
            self.num_experts_ = int(experts_B.sum()) / len(X_BF)

    def _split(self, targets_B: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Indices of the training rows and of the validation rows; no validation rows where there are too few."""
        num, rows_B = len(targets_B), np.arange(len(targets_B))
        num_validation = round(num * self.validation_fraction)
        labels_B = None if targets_B.is_floating_point() else targets_B.numpy()
        num_classes = 1 if labels_B is None else len(np.unique(labels_B))
        if num_validation < max(4, num_classes) or num - num_validation < max(4, num_classes):
            return torch.from_numpy(rows_B), torch.empty(0, dtype=torch.int64)
        if labels_B is not None and np.unique(labels_B, return_counts=True)[1].min() < 2:
            labels_B = None  # a class with one row cannot be in both parts
        train_n, validation_n = train_test_split(rows_B, test_size=num_validation, random_state=seed, stratify=labels_B)
        return torch.from_numpy(train_n), torch.from_numpy(validation_n)

    def _train(self, inputs: Tensor, targets_B: Tensor, weights_B: Tensor, seed: int) -> None:
        """Train with AdamW and a half cosine; stop early and keep the weights of the smallest validation loss."""
        train_n, validation_n = self._split(targets_B, seed)
        model, num, generator = self.model_, len(train_n), torch.Generator().manual_seed(seed)
        batch_size = min(int(self.batch_size), num)
        num_steps = self.epochs * math.ceil(num / batch_size)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        self.validation_loss_: list[float] = []
        best, best_epoch, step = None, 0, 0
        for epoch in range(self.epochs):
            model.train()
            order_n = train_n[torch.randperm(num, generator=generator)]
            for batch_n in order_n.split(batch_size):
                number = int(torch.randint(len(PREFIXES), (), generator=generator))
                budgets = PREFIXES[number : number + 1] if self.anytime_loss else ()
                out = model(inputs[batch_n], budgets=budgets, generator=generator)
                losses_n = self._losses(out.logits, targets_B[batch_n])
                for early in out.answers:
                    early_n = self._losses(early.logits, targets_B[batch_n])
                    losses_n = (1 - self.anytime_loss) * losses_n + self.anytime_loss * early_n
                loss = (losses_n * weights_B[batch_n]).mean()
                if self.target_experts is not None:
                    easier_n = losses_n.detach().argsort().argsort() / max(1, len(losses_n) - 1)
                    loss = loss + STOP_WEIGHT * stop_losses(out.routes[0], easier_n, self.target_experts).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.param_groups[0]["lr"] = self.learning_rate * 0.5 * (1 + math.cos(math.pi * step / num_steps))
                optimizer.step()
                step += 1
            if not math.isfinite(float(loss.detach())):
                raise ValueError(f"learning_rate={self.learning_rate}: the loss is no longer finite; set a smaller one")
            self.num_epochs_ = epoch + 1
            if len(validation_n):
                outputs, _ = self._answer(inputs[validation_n])
                validation_loss = float(
                    (self._losses(outputs, targets_B[validation_n]) * weights_B[validation_n]).mean()
                )
                if not self.validation_loss_ or validation_loss < min(self.validation_loss_):
                    best, best_epoch = deepcopy(model.state_dict()), epoch
                self.validation_loss_.append(validation_loss)
                if epoch - best_epoch >= self.patience:
                    break
        if best is not None:
            model.load_state_dict(best)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row (B,) from outputs (B, Y) and targets."""
        raise NotImplementedError

    def _inputs(self, X: Any) -> Tensor:
        """Checked rows as the model's inputs (B, C, H, W)."""
        check_is_fitted(self)
        return self._standardise(self._check_rows(X), np.float64)

    @torch.no_grad()
    def _answer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs (B, Y), and the number of experts that each row runs (B,)."""
        self.model_.eval()
        outputs = [self.model_(part) for part in inputs.split(ROWS)]
        return torch.cat([out.logits for out in outputs]), torch.cat([out.num_experts for out in outputs])

    def _outputs(self, X: Any) -> NDArray[np.float64]:
        """The model's outputs for rows (B, F), (B, Y)."""
        return self._answer(self._inputs(X))[0].numpy()

    def _anytime(self, X: Any, max_experts: int | None) -> Iterator[NDArray[np.float64]]:
        """The outputs (B, Y) after 0, 1, 2, … experts, until the last row's sequence has ended."""
        parts = [anytime(self.model_, part, max_experts=max_experts) for part in self._inputs(X).split(ROWS)]
        outputs: list[Any] = [None] * len(parts)
        while True:
            with torch.no_grad():
                steps = [next(part, None) for part in parts]
            if all(step is None for step in steps):
                return
            outputs = [last if step is None else step.logits for last, step in zip(outputs, steps, strict=True)]
            yield torch.cat(outputs).numpy()

    def count_experts(self, X: Any) -> NDArray[np.int64]:
        """Count the experts that each row runs.

        Args:
            X: Rows (B, F).

        Returns:
            Number of experts (B,).
        """
        return self._answer(self._inputs(X))[1].numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class MREClassifier(ClassifierMixin, _RaytracedEstimator):
    """A classifier that decides for every row which experts to run, in which order and how many.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        epochs: Largest number of passes over the training rows.
        batch_size: Number of rows per training step.
        learning_rate: Learning rate of AdamW at the start; it falls to 0 along a half cosine.
        weight_decay: Weight decay of AdamW.
        anytime_loss: Share of the loss, 0 … 1, that is measured after fewer experts than the whole sequence has; a larger
            share makes early outputs better.
        target_experts: Mean number of experts per row to train for; None leaves it to the loss.
        validation_fraction: Share of the rows that is kept aside to stop early; 0 trains on all rows for all epochs.
        patience: Number of epochs without a smaller validation loss after which training stops.
        image_shape: (channels, height, width) if rows are flattened images; None for tables.
        random_state: Seed or generator of all random numbers.
        class_weight: Weight of each class in the loss by label, "balanced" for weights inversely proportional to the
            classes' numbers of rows, or None for equal weights.

    Attributes (after ``fit``):
        classes_: The labels (Y,), sorted.
        num_experts_: Mean number of experts that a training row runs.
        num_epochs_: Number of epochs that were run.
        validation_loss_: Validation loss of each epoch.
        mean_, scale_: Mean and deviation of each column (F,).
        model_: The model; it takes standardised rows.
    """

    # Validation rows cost a classifier more than early stopping gains: digits 95.1 % with a tenth of them, 96.4 % without.
    validation_fraction: float = 0.0
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    def fit(self, X: Any, y: Any) -> "MREClassifier":
        """Train the classifier.

        Args:
            X: Rows (B, F).
            y: Labels (B,), numbers or strings.

        Returns:
            The classifier itself.
        """
        self._check_options()
        X_BF, y = self._check_rows(X, y=y)
        try:
            check_classification_targets(y)
            self.classes_, labels_B = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        except TypeError:  # labels of several kinds cannot be sorted
            kinds = " and ".join(sorted({type(label).__name__ for label in y.flat}))
            raise ValueError(f"y: its labels are of several kinds, {kinds}; give labels of one kind") from None
        if len(self.classes_) < 2:
            raise ValueError(f"y: has one class only, {self.classes_.tolist()[0]!r}; a classifier needs at least two")
        weights_Y = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        are_weights = np.isfinite(weights_Y).all() and (weights_Y >= 0).all() and weights_Y.any()
        require(are_weights, "class_weight", self.class_weight, "must be finite, at least 0, and not 0 for all")
        weights_B = torch.from_numpy(weights_Y[labels_B]).float()
        self._fit(X_BF, torch.from_numpy(labels_B), weights_B / weights_B.mean(), len(self.classes_))
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict the likeliest class.

        Args:
            X: Rows (B, F).

        Returns:
            Labels (B,).
        """
        chosen_B = self._outputs(X).argmax(1)
        return self.classes_[chosen_B]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Predict probabilities.

        Args:
            X: Rows (B, F).

        Returns:
            The probability of each class (B, Y), in the order of `classes_`.
        """
        return _softmax(self._outputs(X))

    def predict_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[Any]]:
        """Predict the likeliest class after 0, 1, 2, … experts, until every row's sequence has ended.

        Args:
            X: Rows (B, F).
            max_experts: Largest number of experts; None for all.

        Returns:
            An iterator over labels (B,).
        """
        return (self.classes_[logits_BY.argmax(1)] for logits_BY in self._anytime(X, max_experts))

    def predict_proba_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[np.float64]]:
        """Predict probabilities after 0, 1, 2, … experts, until every row's sequence has ended.

        Args:
            X: Rows (B, F).
            max_experts: Largest number of experts; None for all.

        Returns:
            An iterator over probabilities (B, Y).
        """
        return map(_softmax, self._anytime(X, max_experts))

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


class MRERegressor(RegressorMixin, _RaytracedEstimator):
    """A regressor, of one target or several, that decides for every row which experts to run, in which order and how many.

    Args:
        dim: Width of the hidden vectors.
        num_layers: Number of expert layers.
        num_experts: Number of experts per layer.
        epochs: Largest number of passes over the training rows.
        batch_size: Number of rows per training step.
        learning_rate: Learning rate of AdamW at the start; it falls to 0 along a half cosine.
        weight_decay: Weight decay of AdamW.
        anytime_loss: Share of the loss, 0 … 1, that is measured after fewer experts than the whole sequence has; a larger
            share makes early outputs better.
        target_experts: Mean number of experts per row to train for; None leaves it to the loss.
        validation_fraction: Share of the rows that is kept aside to stop early; 0 trains on all rows for all epochs.
        patience: Number of epochs without a smaller validation loss after which training stops.
        image_shape: (channels, height, width) if rows are flattened images; None for tables.
        random_state: Seed or generator of all random numbers.

    Attributes (after ``fit``):
        num_experts_: Mean number of experts that a training row runs.
        num_epochs_: Number of epochs that were run.
        validation_loss_: Validation loss of each epoch.
        mean_, scale_: Mean and deviation of each column (F,).
        target_mean_, target_scale_: Mean and deviation of each target (Y,).
        model_: The model; it maps standardised rows to standardised targets.
    """

    def fit(self, X: Any, y: Any) -> "MRERegressor":
        """Train the regressor.

        Args:
            X: Rows (B, F).
            y: Targets (B,) or (B, Y).

        Returns:
            The regressor itself.
        """
        self._check_options()
        X_BF, y = self._check_rows(X, y=y, multi_output=True, y_numeric=True)
        require(y.dtype.kind not in "US", "y", repr(str(y.flat[0])), "must be numbers, as a regressor's targets are")
        self._target_ndim = y.ndim
        targets_BY = y.reshape(len(y), -1).astype(np.float64)
        if bad := targets_BY.size - int(np.isfinite(targets_BY).sum()):  # None becomes NaN
            raise ValueError(f"y: {bad} of {targets_BY.size} values are missing; leave their rows out")
        mean_Y, scale_Y = _measure("y", targets_BY)
        self.target_mean_, self.target_scale_ = mean_Y, np.where(scale_Y > 0, scale_Y, 1.0)
        standard_BY = torch.from_numpy((targets_BY - self.target_mean_) / self.target_scale_).float()
        self._fit(X_BF, standard_BY, torch.ones(len(y)), targets_BY.shape[1])
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predict the targets.

        Args:
            X: Rows (B, F).

        Returns:
            Targets, (B,) or (B, Y) as in `fit`.
        """
        return self._unstandardise(self._outputs(X))

    def predict_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[np.float64]]:
        """Predict the targets after 0, 1, 2, … experts, until every row's sequence has ended.

        Args:
            X: Rows (B, F).
            max_experts: Largest number of experts; None for all.

        Returns:
            An iterator over targets, (B,) or (B, Y).
        """
        return map(self._unstandardise, self._anytime(X, max_experts))

    def _unstandardise(self, standard_BY: NDArray[np.float64]) -> NDArray[np.float64]:
        targets_BY = standard_BY * self.target_scale_ + self.target_mean_
        return targets_BY[:, 0] if self._target_ndim == 1 else targets_BY

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets, reduction="none").mean(1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _measure(name: str, values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean and the deviation of each column; a ValueError where a number is too large for them."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, scale = values.mean(0, dtype=np.float64), values.std(0, dtype=np.float64)
    if not np.isfinite(scale).all():
        raise ValueError(
            f"{name}: holds values up to {np.abs(values).max():.1e}, too large to standardise; scale them first"
        )
    return mean, scale


def _softmax(logits_BY: NDArray[np.float64]) -> NDArray[np.float64]:
    return torch.from_numpy(logits_BY).softmax(1).numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: at these sizes threads mostly wait, and n_jobs of scikit-learn's searches uses the cores better."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
