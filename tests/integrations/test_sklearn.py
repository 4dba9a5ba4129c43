"""scikit-learn's own checks, and what they leave out: seeds, early stopping, class weights, outputs after few experts."""

import joblib
import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import forked
import raytraced as rt
from raytraced.integrations import table_rows
from raytraced.integrations.sklearn import MREClassifier, MRERegressor
from raytraced.integrations.table_rows import merge_rows
from raytraced.integrations.table_training import TableTrainer, split_rows
from raytraced.tasks.registry import named_task
from raytraced.tasks.task import Batch
from raytraced.training.config import TrainConfig
from raytraced.training.objective import Objective, step_seed

SMALL = {"dim": 8, "num_layers": 2, "num_experts": 3, "epochs": 6, "batch_size": 32, "random_state": 0}
IRIS = load_iris(return_X_y=True)
DIABETES = tuple(part[:200] for part in load_diabetes(return_X_y=True))


# two thirds of the epochs of the defaults, which pass too, and few where a check does not ask how well a model learns
CHECKS = parametrize_with_checks([MREClassifier(epochs=20), MRERegressor(epochs=20)])
LEARNS = ("train", "classifiers_classes", "class_weight", "regressors_int", "one_label")


def repeats_training(check):
    """Whether it is the check that trains for longest, with memory that is only read: another one asks for that alone."""
    return "readonly_memmap" in check.keywords


@pytest.mark.parametrize(
    CHECKS.args[0],
    [
        pytest.param(
            estimator if any(word in check.func.__name__ for word in LEARNS) else clone(estimator).set_params(epochs=2),
            check,
            marks=pytest.mark.slow if repeats_training(check) else (),
        )
        for estimator, check in CHECKS.args[1]
    ],
    **CHECKS.kwargs,
)
def test_scikit_learns_own_checks(estimator, check):
    asks_for_answers = any(word in check.func.__name__ for word in ("classifiers", "regressors", "equivalence"))
    check(estimator if asks_for_answers else clone(estimator).set_params(epochs=3))


@pytest.fixture(scope="module")
def classifier():
    return MREClassifier(**SMALL).fit(*IRIS)


@pytest.fixture(scope="module")
def regressor():
    return MRERegressor(**SMALL).fit(*DIABETES)


def test_defaults_learn_real_data():
    X, y = IRIS
    fitted = MREClassifier(random_state=0).fit(X[::2], y[::2])
    assert fitted.score(X[1::2], y[1::2]) > 0.9
    X, y = load_diabetes(return_X_y=True)
    assert MRERegressor(random_state=0).fit(X[::2], y[::2]).score(X[1::2], y[1::2]) > 0.3


@pytest.mark.parametrize(("kind", "data"), [(MREClassifier, IRIS), (MRERegressor, DIABETES)])
def test_same_seed_same_model_and_no_global_generator_is_touched(kind, data):
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    one, two, other = (kind(**SMALL | {"random_state": seed, "epochs": 2}).fit(*data) for seed in (0, 0, 1))
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()
    for name, tensor in one.model_.state_dict().items():
        assert torch.equal(tensor, two.model_.state_dict()[name]), name
    assert not np.array_equal(one._outputs(data[0]), other._outputs(data[0]))


def test_fitting_leaves_the_number_of_threads_alone():
    torch.set_num_threads(2)
    try:
        MREClassifier(**SMALL | {"epochs": 1}).fit(*IRIS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [slice(None), slice(0, 5)])
def test_the_last_of_the_answers_along_the_way_is_the_prediction(classifier, regressor, rows):
    for fitted, (X, _) in ((classifier, IRIS), (regressor, DIABETES)):
        answers = list(fitted.predict_anytime(X[rows]))
        np.testing.assert_array_equal(answers[-1], fitted.predict(X[rows]))
        most = fitted.count_experts(X[rows]).max()
        assert len(answers) - 1 in (most, most + 1)  # that a sequence has ended shows when nothing is added
    np.testing.assert_allclose(list(classifier.predict_proba_anytime(IRIS[0]))[-1], classifier.predict_proba(IRIS[0]))


def test_answers_along_the_way_of_many_rows_are_those_of_their_parts(classifier, monkeypatch):
    rows = IRIS[0][::5]
    assert len(set(classifier.count_experts(rows))) > 1  # some parts end before others
    whole = list(classifier.predict_proba_anytime(rows))
    monkeypatch.setattr("raytraced.integrations.table_rows.MOST_ROWS", 1)
    for one, other in zip(whole, classifier.predict_proba_anytime(rows), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    assert len(list(classifier.predict_anytime(rows, max_experts=2))) == 3


def test_the_number_of_experts_is_the_mean_over_training_rows_and_follows_its_target(classifier):
    assert classifier.num_experts_ == pytest.approx(classifier.count_experts(IRIS[0]).mean())
    # Three layers: in a grid of two, where experts have relative weights, a sequence hardly grows beyond one per layer.
    options = SMALL | {"num_layers": 3, "epochs": 40}
    few, many = (MREClassifier(**options | {"target_experts": t}).fit(*IRIS) for t in (1.5, 4.0))
    assert few.num_experts_ + 0.5 < many.num_experts_
    assert abs(many.num_experts_ - 4.0) < 1


def test_early_stopping_ends_and_keeps_the_best_weights():
    X, y = DIABETES
    options = SMALL | {"epochs": 40, "learning_rate": 0.05, "validation_fraction": 0.5}
    fitted = MRERegressor(**options, patience=3).fit(X[:100], y[:100])
    losses = fitted.validation_loss_
    assert len(losses) == fitted.num_epochs_ < 40
    assert losses.index(min(losses)) == len(losses) - 4
    standard = ((y[:100] - fitted.target_mean_) / fitted.target_scale_)[:, None]
    rows, _ = merge_rows(X[:100], standard, np.ones(100))
    _, validation = split_rows(torch.from_numpy(standard[rows]), 0.5, np.random.RandomState(0).randint(2**31 - 1))
    validation_rows = rows[validation]
    found = (fitted.predict(X[validation_rows]) - y[validation_rows]) / fitted.target_scale_
    assert (found**2).mean() == pytest.approx(min(losses), rel=1e-4)
    assert MRERegressor(**SMALL | {"validation_fraction": 0, "epochs": 1}).fit(X, y).validation_loss_ == []


def test_class_weights_move_answers_to_the_class_that_counts():
    X, y = IRIS
    X, y = X[:, :1], y == 2  # classes that overlap, one with half as many rows
    shares = [
        MREClassifier(**SMALL | {"class_weight": weight}).fit(X, y).predict(X).mean()
        for weight in ({False: 9, True: 1}, None, "balanced", {False: 1, True: 9})
    ]
    assert shares[0] < shares[1] < shares[2] < shares[3]


def weights_of(fitted):
    return fitted.model_.state_dict()


def assert_same_model(one, other):
    for name, tensor in weights_of(one).items():
        assert torch.equal(tensor, weights_of(other)[name]), name


@pytest.mark.parametrize(("kind", "data"), [(MREClassifier, IRIS), (MRERegressor, DIABETES)])
def test_weights_are_repeated_rows_whatever_their_order(kind, data):
    X, y = data
    counts = np.random.default_rng(0).integers(0, 4, len(X))
    order = np.random.default_rng(1).permutation(counts.sum())
    options = SMALL | {"epochs": 2, "validation_fraction": 0.2}
    weighted = kind(**options).fit(X, y, sample_weight=counts)
    repeated = kind(**options).fit(X.repeat(counts, 0)[order], y.repeat(counts)[order])
    assert_same_model(weighted, repeated)
    assert weighted.num_experts_ == pytest.approx(repeated.count_experts(X.repeat(counts, 0)).mean())
    np.testing.assert_allclose(weighted.mean_, X.repeat(counts, 0).mean(0))
    np.testing.assert_allclose(weighted.scale_, X.repeat(counts, 0).std(0))


def test_rows_are_merged_in_the_order_of_their_values():
    random = np.random.default_rng(0)
    X = random.integers(-2, 3, (200, 5)) / 3 * (random.random((200, 5)) < 0.5)
    y = random.integers(0, 2, (200, 1))
    expected = sorted({(*row, *label) for row, label in zip(X.tolist(), y.tolist(), strict=True)})
    for rows in (X, sparse.csr_array(X)):
        kept, weights = merge_rows(rows, y, np.ones(200))
        assert [(*row, *label) for row, label in zip(X[kept].tolist(), y[kept].tolist(), strict=True)] == expected
        for row, weight in zip(kept, weights, strict=True):
            assert weight == ((X[row] == X).all(1) & (y == y[row])[:, 0]).sum()


def test_many_equal_rows_are_as_many_steps_as_different_ones(monkeypatch):
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (steps.append(1), step(self))[1])
    X, y = np.array([[0.0], [1.0]] * 320), np.array([0, 1] * 320)
    MREClassifier(**SMALL | {"epochs": 1, "batch_size": 64}).fit(X, y)
    assert len(steps) == 640 / 64
    steps.clear()
    MREClassifier(**SMALL | {"epochs": 1}).fit(X[:2], y[:2], sample_weight=[1e9, 1e9])
    assert len(steps) == 4096 / 32  # however large weights are


def test_class_weights_and_sample_weights_multiply():
    X, y = IRIS
    by_class = MREClassifier(**SMALL | {"class_weight": {0: 1.0, 1: 0.5, 2: 0.25}}).fit(X, y)
    by_row = MREClassifier(**SMALL).fit(X, y, sample_weight=np.array([1.0, 0.5, 0.25])[y])
    by_class.mean_, by_class.scale_ = by_row.mean_, by_row.scale_  # class weights do not change the scales
    np.testing.assert_allclose(by_class.predict_proba(X), by_row.predict_proba(X), atol=0.2)
    balanced = MREClassifier(**SMALL | {"class_weight": "balanced"})
    assert balanced._class_weights(np.arange(2), y[:100], y[:100], 1.0 + 2 * (y[:100] == 1)) == pytest.approx(
        [2, 2 / 3]
    )


@pytest.mark.parametrize("container", [sparse.csr_array, sparse.csr_matrix, sparse.csc_matrix, sparse.coo_array])
def test_sparse_rows_give_the_model_and_the_answers_of_dense_ones(container):
    X = np.where(IRIS[0] > 3, IRIS[0], 0)
    dense, other = (MREClassifier(**SMALL).fit(rows, IRIS[1]) for rows in (X, container(X)))
    assert_same_model(dense, other)
    np.testing.assert_array_equal(dense.predict_proba(X), other.predict_proba(container(X)))
    for one, two in zip(dense.predict_proba_anytime(X), other.predict_proba_anytime(container(X)), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match=r"^X: 1 of 2 values are NaN or infinity; fill them in first"):
        other.predict(container(np.array([[0.0, np.nan, 1.0, 0.0]])))


def test_wide_sparse_rows_are_never_dense_all_at_once(monkeypatch):
    monkeypatch.setattr("raytraced.integrations.table_rows.MOST_VALUES", 12_000)
    X = sparse.random_array((60, 4000), density=0.01, format="csr", rng=np.random.default_rng(0))
    shapes = []
    dense = table_rows.dense_rows
    watch = lambda X, rows: shapes.append(len(rows)) or dense(X, rows)  # noqa: E731
    monkeypatch.setattr("raytraced.integrations.table_rows.dense_rows", watch)
    monkeypatch.setattr("raytraced.integrations.table_estimator.dense_rows", watch)
    MREClassifier(**SMALL | {"epochs": 1, "batch_size": 2}).fit(X, np.arange(60) % 2).predict(X)
    assert max(shapes) == 3


@pytest.mark.parametrize(("kind", "data"), [(MREClassifier, IRIS), (MRERegressor, DIABETES)])
def test_passes_over_parts_learn_and_continue_after_joblib(kind, data, tmp_path):
    X, y = data
    order = np.random.default_rng(0).permutation(len(X))
    parts = [order[start::3] for start in range(3)]
    first = {"classes": np.unique(y)} if kind is MREClassifier else {}
    whole, stored = kind(**SMALL), kind(**SMALL)
    whole.partial_fit(X[parts[0]], y[parts[0]], **first)
    stored.partial_fit(X[parts[0]], y[parts[0]], **first)
    np.testing.assert_allclose(whole.mean_, X[parts[0]].mean(0))  # the first rows set the scales
    for number in range(1, 45):
        part = parts[number % 3]
        whole.partial_fit(X[part], y[part])
        if number < 4:
            joblib.dump(stored, tmp_path / "model.joblib")
            stored = joblib.load(tmp_path / "model.joblib").partial_fit(X[part], y[part])
            assert_same_model(whole, stored)
    assert whole.num_epochs_ == 45
    assert whole.score(X, y) > (0.9 if kind is MREClassifier else 0.3)


@pytest.mark.parametrize(("kind", "data"), [(MREClassifier, IRIS), (MRERegressor, DIABETES)])
def test_a_warm_start_continues_and_a_cold_one_does_not(kind, data):
    X, y = data
    warm = kind(**SMALL | {"warm_start": True}).fit(X, y)
    before = {name: tensor.clone() for name, tensor in weights_of(warm).items()}
    mean = warm.mean_
    warm.set_params(learning_rate=1e-12).fit(X + 1, y)
    assert all(torch.allclose(before[name], tensor, atol=1e-6) for name, tensor in weights_of(warm).items())
    assert warm.mean_ is mean
    warm.set_params(warm_start=False).fit(X, y)
    assert not all(torch.allclose(before[name], tensor, atol=1e-6) for name, tensor in weights_of(warm).items())
    with pytest.raises(ValueError, match=r"^dim=9: the model to continue has 8; set warm_start=False to start anew$"):
        warm.set_params(warm_start=True, dim=9).fit(X, y)


def test_what_cannot_be_continued_is_one_clear_line():
    X, y = IRIS
    with pytest.raises(ValueError, match=r"^classes=None: the first call of partial_fit needs all labels"):
        MREClassifier(**SMALL).partial_fit(X, y)
    with pytest.raises(ValueError, match=r"^class_weight='balanced': partial_fit does not see all rows"):
        MREClassifier(**SMALL, class_weight="balanced").partial_fit(X, y, classes=[0, 1, 2])
    fitted = MREClassifier(**SMALL | {"epochs": 1, "warm_start": True}).fit(X, y)
    with pytest.raises(ValueError, match=r"^classes: differ from those of the first call; leave them out$"):
        fitted.partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match=r"^y: 3 is not one of the classes of the first call$"):
        fitted.partial_fit(X, y + 1)
    with pytest.raises(ValueError, match=r"^y: has other classes than the last fit; give the same ones, or set warm"):
        fitted.fit(X, y + 1)
    regressor = MRERegressor(**SMALL | {"epochs": 1}).fit(X, X[:, :2])
    with pytest.raises(ValueError, match=r"^y: has 1 targets per row, the model to continue has 2$"):
        regressor.partial_fit(X, y)
    with pytest.raises(ValueError, match=r"^sample_weight: holds -1.0; must be at least 0$"):
        fitted.fit(X, y, sample_weight=np.where(np.arange(150) == 3, -1, 1))


def test_budgets_and_confidence_are_those_of_the_model(classifier, regressor):
    X = IRIS[0]
    inputs = torch.from_numpy((X - classifier.mean_) / classifier.scale_).view(-1, 1, 1, X.shape[1])
    for options in ({"max_experts": 1}, {"confidence": 0.6}, {"confidence": 0.9, "max_experts": 2}):
        expected = classifier.model_(inputs, **options)
        probs = classifier.predict_proba(X, **options)
        np.testing.assert_allclose(probs, expected.logits.detach().softmax(1).numpy())
        np.testing.assert_array_equal(classifier.predict(X, **options), probs.argmax(1))
        np.testing.assert_array_equal(classifier.count_experts(X, **options), expected.num_runs.numpy())
        alone = np.concatenate([classifier.predict_proba(X[[row]], **options) for row in range(0, 150, 30)])
        np.testing.assert_allclose(alone, probs[::30], atol=1e-12)
    assert classifier.count_experts(X, confidence=0.6).mean() < classifier.count_experts(X).mean()
    steps = list(regressor.predict_anytime(DIABETES[0], max_experts=2))
    np.testing.assert_allclose(regressor.predict(DIABETES[0], max_experts=2), steps[-1])
    assert regressor.count_experts(DIABETES[0], max_experts=2).max() == 2


def test_the_loss_of_a_step_is_that_of_the_library():
    X, y = IRIS
    model = rt.build("mre", image_shape=(1, 1, 4), num_classes=3, dim=8, num_layers=2, num_experts=3)
    inputs, labels = torch.from_numpy(X).float().view(-1, 1, 1, 4)[::5], torch.from_numpy(y)[::5]
    options = {"anytime_loss": 0.25, "target_experts": 1.0}
    trainer = TableTrainer(
        model=model, inputs_fn=lambda rows: inputs[rows], targets=labels, weights=torch.ones(30), repeats=1.0, seed=7,
        losses_fn=MREClassifier()._losses, batch_size=30, learning_rate=0.1, weight_decay=0.0, **options,
    )  # fmt: skip
    objective = Objective(model, TrainConfig(model="mre", **options), named_task("images"))
    for trainer.step in range(3):
        own = trainer.loss(torch.arange(30))
        batch = Batch(inputs, labels, torch.arange(30))
        torch.testing.assert_close(own, objective(batch, step_seed(7, trainer.step), 30).loss)


def test_inputs_and_targets_are_standardised_inside():
    X, y = DIABETES
    one = MRERegressor(**SMALL).fit(X, y)
    other = MRERegressor(**SMALL).fit(1024 * X - 3, 4096 * y + 5)
    np.testing.assert_allclose(other.predict(1024 * X - 3), 4096 * one.predict(X) + 5, rtol=1e-3)


def test_several_targets_come_back_as_they_were_given():
    X, y = DIABETES
    both = MRERegressor(**SMALL | {"epochs": 20}).fit(X, np.stack([y, -100 * y], 1))
    assert both.predict(X).shape == (len(X), 2)
    assert both.score(X, np.stack([y, -100 * y], 1)) > 0.3


def test_colour_images_go_through_convolutions():
    random = np.random.default_rng(0)
    y = np.arange(60) % 2
    images = random.integers(0, 256, (60, 3, 8, 8)).astype(float)
    images[y == 1, 0] += 100
    X = images.reshape(60, -1)
    fitted = MREClassifier(**SMALL | {"image_shape": (3, 8, 8), "epochs": 20}).fit(X, y)
    assert fitted.model_.input_block.convolves
    np.testing.assert_allclose(fitted.mean_, np.repeat(images.mean((0, 2, 3)), 64))
    assert fitted.score(X, y) > 0.9


def test_pipeline_grid_search_and_clone():
    pipeline = make_pipeline(StandardScaler(), MREClassifier(**SMALL | {"epochs": 4}))
    search = GridSearchCV(pipeline, {"mreclassifier__dim": np.array([4, 8])}, cv=2).fit(*IRIS)
    assert set(search.cv_results_["param_mreclassifier__dim"]) == {4, 8}
    made = clone(search.best_estimator_[-1])
    assert made.get_params() == search.best_estimator_[-1].get_params()
    assert not hasattr(made, "model_")


def test_joblib_gives_back_the_same_answers(classifier, regressor, tmp_path):
    for fitted, (X, _) in ((classifier, IRIS), (regressor, DIABETES)):
        joblib.dump(fitted, tmp_path / "model.joblib")
        np.testing.assert_array_equal(joblib.load(tmp_path / "model.joblib").predict(X), fitted.predict(X))


def test_the_model_inside_is_saved_without_pickle(classifier, tmp_path):
    rt.save(classifier.model_, tmp_path / "model.safetensors")
    X = IRIS[0]
    inputs = torch.from_numpy((X - classifier.mean_) / classifier.scale_).view(-1, 1, 1, X.shape[1])
    logits = rt.load(tmp_path / "model.safetensors")(inputs).logits
    np.testing.assert_allclose(logits.detach().softmax(1).numpy(), classifier.predict_proba(X))


X, Y = IRIS
HOLED = np.where(np.arange(X.size).reshape(X.shape) == 7, np.nan, X)
WORDS = X.astype(object)
WORDS[3, 1] = "red"
BAD = {
    "words": ({}, WORDS, Y, "X: could not convert string to float: 'red'; encode words as numbers first"),
    "nan": ({}, HOLED, Y, "X: 1 of 600 values are NaN or infinity; fill them in first"),
    "one class": ({}, X, np.zeros(len(X), int), "y: has one class only, 0; a classifier"),
    "one axis": ({}, X[:, 0], Y, "Expected 2D array, got 1D array instead: Reshape your data"),
    "images": ({}, X.reshape(-1, 1, 2, 2), Y, "X has shape (150, 1, 2, 2): must be 2-D; reshape it"),
    "image_shape": ({"image_shape": (1, 3, 3)}, X, Y, "image_shape=(1, 3, 3): holds 9 values, a row has 4"),
    "two axes": ({"image_shape": (2, 2)}, X, Y, "image_shape=(2, 2): must be three whole numbers"),
    "no size": ({"image_shape": (1, -2, -2)}, X, Y, "image_shape=(1, -2, -2): must be three whole numbers"),
    "epochs": ({"epochs": 0}, X, Y, "epochs=0: must be a whole number, at least 1"),
    "a part of one": ({"dim": 2.5}, X, Y, "dim=2.5: must be a whole number, at least 1"),
    "no number": ({"learning_rate": "0.1"}, X, Y, "learning_rate='0.1': must be a number"),
    "fraction": ({"validation_fraction": 1.0}, X, Y, "validation_fraction=1.0: must lie in 0 … 1"),
    "weights": ({"class_weight": {7: 1.0}}, X, Y, "are not in class_weight"),
    "two kinds": ({}, X, np.array(["a", 1, "b"] * 50, object), "y: its labels are of several kinds, int and str; give"),
    "unknown": (
        {},
        X,
        np.array(["a", None] * 75, object),
        "y: its labels are of several kinds, NoneType and str; give",
    ),
    "complex": ({}, X + 1j, Y, "Complex data not supported"),
    "far away": ({}, X * 1e300, Y, "X: holds values up to 7.9e+300, too large to standardise; scale them first"),
    "endless decay": ({"weight_decay": np.inf}, X, Y, "weight_decay=inf: must be at least 0 and finite"),
    "a number as shape": ({"image_shape": 4}, X, Y, "image_shape=4: must be three whole numbers"),
    "negative weight": ({"class_weight": {0: 1, 1: -1, 2: 1}}, X, Y, "must be finite, at least 0, and not 0 for all"),
    "no weight": ({"class_weight": {0: 0, 1: 0, 2: 0}}, X, Y, "must be finite, at least 0, and not 0 for all"),
    "too fast": ({"learning_rate": 1e30}, X, Y, "learning_rate=1e+30: the loss is no longer finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(name):
    options, rows, labels, expected = BAD[name]
    with pytest.raises(ValueError) as caught:
        MREClassifier(**SMALL | options).fit(rows, labels)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith("]")  # no values of an array


def test_words_as_targets_of_a_regressor_are_one_clear_line():
    for words in (np.array(["low"] * len(X)), np.array(["low"] * len(X), dtype=object)):
        with pytest.raises(ValueError, match=r"^y.*low") as caught:
            MRERegressor(**SMALL).fit(X, words)
        assert "\n" not in str(caught.value)


def test_targets_that_are_missing_or_too_large_are_one_clear_line():
    with pytest.raises(ValueError, match=r"^y: 2 of 150 values are missing; leave their rows out$"):
        MRERegressor(**SMALL).fit(X, np.array([None, 1.0, 2.0] + [0.0] * 146 + [None], object))
    with pytest.raises(
        ValueError, match=r"^y: holds values up to 1.5e\+302, too large to standardise; scale them first$"
    ):
        MRERegressor(**SMALL).fit(X, np.arange(150) * 1e300)


def test_what_cannot_be_answered_is_one_clear_line_too(classifier):
    with pytest.raises(ValueError, match="X: 1 of 600 values are NaN"):
        classifier.predict(HOLED)
    with pytest.raises(ValueError, match="3 features"):
        classifier.predict(X[:, :3])


def test_without_scikit_learn_the_extra_is_named():
    program = "import sys; sys.modules['sklearn'] = None; import raytraced.integrations.sklearn"
    done = forked.run(forked.program, program)
    last = done.stderr.splitlines()[-1]
    assert (
        last
        == "ImportError: raytraced.integrations.sklearn: needs scikit-learn; pip install '.[sklearn]' in a clone of raytraced"
    )
