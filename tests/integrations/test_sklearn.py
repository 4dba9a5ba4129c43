"""scikit-learn's own checks, and what they leave out: seeds, early stopping, class weights, outputs after few experts."""

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import forked
import raytraced as rt
from raytraced.integrations.sklearn import MREClassifier, MRERegressor

SMALL = {"dim": 8, "num_layers": 2, "num_experts": 3, "epochs": 6, "batch_size": 32, "random_state": 0}
IRIS = load_iris(return_X_y=True)
DIABETES = tuple(part[:200] for part in load_diabetes(return_X_y=True))


# two thirds of the epochs of the defaults, which pass too: a check fits many times; most do not ask how well
@parametrize_with_checks([MREClassifier(epochs=20), MRERegressor(epochs=20)])
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
    monkeypatch.setattr("raytraced.integrations.sklearn.ROWS", 1)
    for one, other in zip(whole, classifier.predict_proba_anytime(rows), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
    assert len(list(classifier.predict_anytime(rows, max_experts=2))) == 3


def test_the_number_of_experts_is_the_mean_over_training_rows_and_follows_its_target(classifier):
    assert classifier.num_experts_ == pytest.approx(classifier.count_experts(IRIS[0]).mean())
    few, many = (MREClassifier(**SMALL | {"target_experts": t, "epochs": 40}).fit(*IRIS) for t in (1.5, 4.0))
    assert few.num_experts_ < 2.5 < many.num_experts_


def test_early_stopping_ends_and_keeps_the_best_weights():
    X, y = DIABETES
    options = SMALL | {"epochs": 40, "learning_rate": 0.05, "validation_fraction": 0.5}
    fitted = MRERegressor(**options, patience=3).fit(X[:100], y[:100])
    losses = fitted.validation_loss_
    assert len(losses) == fitted.num_epochs_ < 40
    assert losses.index(min(losses)) == len(losses) - 4
    standard = (y[:100] - fitted.target_mean_) / fitted.target_scale_
    _, validation_rows = fitted._split(torch.from_numpy(standard), np.random.RandomState(0).randint(2**31 - 1))
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
    assert last == "ImportError: raytraced.integrations.sklearn: needs scikit-learn; pip install 'raytraced[sklearn]'"
