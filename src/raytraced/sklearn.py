"""Raytraced experts as scikit-learn's estimators: `MREClassifier().fit(X, y)`, `MRERegressor().fit(X, y)`.

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

from raytraced.models.table import build
from raytraced.sequence import stop_losses
from raytraced.stopping import anytime
from raytraced.training.objective import PREFIXES, STOP_WEIGHT
from raytraced.words import require

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("raytraced.sklearn: needs scikit-learn; pip install 'raytraced[sklearn]'") from error

ROWS = 4096  # that are answered at once


@dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn compares and shows estimators itself
class _RaytracedEstimator(BaseEstimator):
    """What both have in common: options, standardised inputs, the training loop, answers along the way."""

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
        """X, and y where it is given, as arrays of numbers, or one line that says what is wrong with them."""
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
                    f"{name}: {error}; encode words as numbers first, with OneHotEncoder for instance"
                ) from None
            if len(lines) == 1:
                raise
            told = [line for line in (lines[0], lines[-1]) if not line.endswith("]")]
            raise ValueError(" ".join(told)) from None  # without the values of a whole array
        rows_BF = checked[0] if "y" in options else checked
        if bad := rows_BF.size - int(np.isfinite(rows_BF).sum()):
            remedy = "fill them in first, with SimpleImputer for instance"
            raise ValueError(f"X: {bad} of {rows_BF.size} values are NaN or infinity; {remedy}")
        return checked

    def _standardise(self, X_BF: NDArray[Any], dtype: type) -> Tensor:
        """Rows -> what the model sees (B, C, H, W): an image, or one line of pixels."""
        given = (X_BF - self.mean_) / self.scale_
        return torch.from_numpy(given.astype(dtype)).view(-1, *self._shape)

    @property
    def _shape(self) -> tuple[int, int, int]:
        channels, height, width = (1, 1, self.n_features_in_) if self.image_shape is None else self.image_shape
        return channels, height, width

    def _fit(self, X_BF: NDArray[Any], targets_B: Tensor, weights_B: Tensor, num_outputs: int) -> None:
        """Train a model on checked rows; the targets are class numbers, or standardised numbers (B, Y)."""
        C, H, W = self._shape
        if X_BF.shape[1] != C * H * W:
            raise ValueError(f"image_shape={self.image_shape}: holds {C * H * W} values, a row has {X_BF.shape[1]}")
        # pixels of an image have one scale a channel, columns of a table each their own
        groups = X_BF if self.image_shape is None else X_BF.reshape(len(X_BF), C, -1).transpose(0, 2, 1).reshape(-1, C)
        mean, scale = _measure("X", groups)
        # a column that does not vary says nothing: it must not become noise
        scale = np.where(scale > 1e-12 * np.maximum(1, np.abs(mean)), scale, 1.0)
        pixels = 1 if self.image_shape is None else H * W
        self.mean_, self.scale_ = np.repeat(mean, pixels), np.repeat(scale, pixels)
        inputs = self._standardise(X_BF, np.float32)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        with torch.random.fork_rng(devices=[]), _one_thread():
            torch.default_generator.manual_seed(seed)  # the CPU's alone: a GPU's stays as it was
            grid = {"dim": self.dim, "num_layers": self.num_layers, "num_experts": self.num_experts}
            sizes = {name: int(value) for name, value in grid.items()}  # numpy's whole numbers, of a grid search
            self.model_ = build("mre", image_shape=self._shape, num_classes=num_outputs, **sizes)
            self._train(inputs, targets_B, weights_B, seed)
            # Answers in double precision: a row's own does not then depend on the rows beside it.
            self.model_.double()
            _, experts_B = self._answer(self._standardise(X_BF, np.float64))
            self.num_experts_ = int(experts_B.sum()) / len(X_BF)

    def _split(self, targets_B: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The numbers of the rows to train on, and of those to judge by, none where there are too few."""
        num, rows_B = len(targets_B), np.arange(len(targets_B))
        num_judged = round(num * self.validation_fraction)
        labels_B = None if targets_B.is_floating_point() else targets_B.numpy()
        num_classes = 1 if labels_B is None else len(np.unique(labels_B))
        if num_judged < max(4, num_classes) or num - num_judged < max(4, num_classes):
            return torch.from_numpy(rows_B), torch.empty(0, dtype=torch.int64)
        if labels_B is not None and np.unique(labels_B, return_counts=True)[1].min() < 2:
            labels_B = None  # a class of one row cannot be on both sides
        train_n, judged_n = train_test_split(rows_B, test_size=num_judged, random_state=seed, stratify=labels_B)
        return torch.from_numpy(train_n), torch.from_numpy(judged_n)

    def _train(self, inputs: Tensor, targets_B: Tensor, weights_B: Tensor, seed: int) -> None:
        """AdamW down a half cosine; stops when the rows to judge by say so, and keeps the weights they liked best."""
        train_n, judged_n = self._split(targets_B, seed)
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
                raise ValueError(
                    f"learning_rate={self.learning_rate}: the loss is no longer finite; take a smaller one"
                )
            self.num_epochs_ = epoch + 1
            if len(judged_n):
                outputs, _ = self._answer(inputs[judged_n])
                judged = float((self._losses(outputs, targets_B[judged_n]) * weights_B[judged_n]).mean())
                if not self.validation_loss_ or judged < min(self.validation_loss_):
                    best, best_epoch = deepcopy(model.state_dict()), epoch
                self.validation_loss_.append(judged)
                if epoch - best_epoch >= self.patience:
                    break
        if best is not None:
            model.load_state_dict(best)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row (B,)."""
        raise NotImplementedError

    def _inputs(self, X: Any) -> Tensor:
        """Rows to answer."""
        check_is_fitted(self)
        return self._standardise(self._check_rows(X), np.float64)

    @torch.no_grad()
    def _answer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the model says (B, Y), and how many experts each row runs (B,)."""
        self.model_.eval()
        outputs = [self.model_(part) for part in inputs.split(ROWS)]
        return torch.cat([out.logits for out in outputs]), torch.cat([out.num_experts for out in outputs])

    def _outputs(self, X: Any) -> NDArray[np.float64]:
        return self._answer(self._inputs(X))[0].numpy()

    def _anytime(self, X: Any, max_experts: int | None) -> Iterator[NDArray[np.float64]]:
        """What it says after 0, 1, 2, … experts, until the last row's sequence has ended."""
        parts = [anytime(self.model_, part, max_experts=max_experts) for part in self._inputs(X).split(ROWS)]
        said: list[Any] = [None] * len(parts)
        while True:
            with torch.no_grad():
                steps = [next(part, None) for part in parts]
            if all(step is None for step in steps):
                return
            said = [before if step is None else step.logits for before, step in zip(said, steps, strict=True)]
            yield torch.cat(said).numpy()

    def count_experts(self, X: Any) -> NDArray[np.int64]:
        """How many experts each row runs (B,)."""
        return self._answer(self._inputs(X))[1].numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class MREClassifier(ClassifierMixin, _RaytracedEstimator):
    """A classifier that decides for every row which experts to run, in which order and how many.

    After `fit`: `classes_`, `num_experts_` (the mean number a training row runs), `num_epochs_`, `validation_loss_` (of each
    epoch), `mean_` and `scale_` (of each column), and `model_`, which takes rows so standardised.
    """

    # Rows kept aside cost a classifier more than an early end gains: digits 95.1 % with a tenth of them, 96.4 % without.
    validation_fraction: float = 0.0
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    def fit(self, X: Any, y: Any) -> "MREClassifier":
        """Learn from rows (B, F) and their labels (B,), of whatever kind."""
        self._check_options()
        X_BF, y = self._check_rows(X, y=y)
        try:
            check_classification_targets(y)
            self.classes_, labels_B = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        except TypeError:  # they have no order
            kinds = " and ".join(sorted({type(label).__name__ for label in y.flat}))
            raise ValueError(f"y: its labels are of several kinds, {kinds}; make them one") from None
        if len(self.classes_) < 2:
            raise ValueError(f"y: has one class only, {self.classes_.tolist()[0]!r}; a classifier needs at least two")
        weights_Y = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        are_weights = np.isfinite(weights_Y).all() and (weights_Y >= 0).all() and weights_Y.any()
        require(are_weights, "class_weight", self.class_weight, "must be finite, at least 0, and not 0 for all")
        weights_B = torch.from_numpy(weights_Y[labels_B]).float()
        self._fit(X_BF, torch.from_numpy(labels_B), weights_B / weights_B.mean(), len(self.classes_))
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row (B,)."""
        chosen_B = self._outputs(X).argmax(1)
        return self.classes_[chosen_B]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each class (B, Y), in the order of `classes_`."""
        return _softmax(self._outputs(X))

    def predict_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[Any]]:
        """The likeliest class of each row (B,) after 0, 1, 2, … experts, until every row's sequence has ended."""
        return (self.classes_[logits_BY.argmax(1)] for logits_BY in self._anytime(X, max_experts))

    def predict_proba_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[np.float64]]:
        """The probabilities (B, Y) after 0, 1, 2, … experts."""
        return map(_softmax, self._anytime(X, max_experts))

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


class MRERegressor(RegressorMixin, _RaytracedEstimator):
    """A regressor that decides for every row which experts to run, in which order and how many; of one target or several.

    After `fit`: `num_experts_` (the mean number a training row runs), `num_epochs_`, `validation_loss_` (of each epoch),
    `mean_` and `scale_` (of each column), `target_mean_` and `target_scale_`, and `model_`, from standardised rows to
    standardised targets.
    """

    def fit(self, X: Any, y: Any) -> "MRERegressor":
        """Learn from rows (B, F) and their numbers (B,) or (B, Y)."""
        self._check_options()
        X_BF, y = self._check_rows(X, y=y, multi_output=True, y_numeric=True)
        require(y.dtype.kind not in "US", "y", repr(str(y.flat[0])), "must be numbers, as a regressor's targets are")
        self._target_ndim = y.ndim
        targets_BY = y.reshape(len(y), -1).astype(np.float64)
        if bad := targets_BY.size - int(np.isfinite(targets_BY).sum()):  # of None, which becomes NaN
            raise ValueError(f"y: {bad} of {targets_BY.size} values are missing; leave their rows out")
        mean_Y, scale_Y = _measure("y", targets_BY)
        self.target_mean_, self.target_scale_ = mean_Y, np.where(scale_Y > 0, scale_Y, 1.0)
        standard_BY = torch.from_numpy((targets_BY - self.target_mean_) / self.target_scale_).float()
        self._fit(X_BF, standard_BY, torch.ones(len(y)), targets_BY.shape[1])
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The numbers of each row, (B,) or (B, Y) as they were given."""
        return self._unstandardise(self._outputs(X))

    def predict_anytime(self, X: Any, max_experts: int | None = None) -> Iterator[NDArray[np.float64]]:
        """The numbers of each row after 0, 1, 2, … experts, until every row's sequence has ended."""
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
    """The mean and the deviation of each column, or one line where a number is too large to have them."""
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
    """At these sizes threads only wait for each other; n_jobs of scikit-learn's searches uses the cores better."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
