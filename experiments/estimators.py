"""Write benchmarks/sklearn.md: our scikit-learn estimators beside scikit-learn's own on its bundled real data sets.

Every estimator has its defaults, in a pipeline with StandardScaler; 5 folds, the same for all; one thread. Within a fold they
are fitted one after the other in one process, so that other load on the machine slows all of them alike.
"""

import argparse
import os
import platform
import time
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import sklearn
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import raytraced as rt
from experiments import BENCHMARKS
from raytraced.integrations.sklearn import MREClassifier, MRERegressor


def mlp_on_standardised_targets(random_state: int) -> TransformedTargetRegressor:
    """MLPRegressor with standardised targets, as ours has them: separates this difference from the others."""
    return TransformedTargetRegressor(MLPRegressor(random_state=random_state), transformer=StandardScaler())


CLASSIFIERS = {
    "MRE": MREClassifier,
    "MLP": MLPClassifier,
    "HistGradientBoosting": HistGradientBoostingClassifier,
    "linear": LogisticRegression,
}
REGRESSORS = {
    "MRE": MRERegressor,
    "MLP": MLPRegressor,
    "MLP, targets standardised": mlp_on_standardised_targets,
    "HistGradientBoosting": HistGradientBoostingRegressor,
    "linear": Ridge,
}
DATA = {
    "iris": load_iris,
    "wine": load_wine,
    "breast_cancer": load_breast_cancer,
    "digits": load_digits,
    "diabetes": load_diabetes,
}


def measure(name: str) -> dict[str, dict[str, list[float]]]:
    """Scores, fit times and experts of each fold, by estimator."""
    X, y = DATA[name](return_X_y=True)
    kinds, folds = (REGRESSORS, KFold) if name == "diabetes" else (CLASSIFIERS, StratifiedKFold)
    found: dict[str, dict[str, list[float]]] = {kind: {"score": [], "seconds": [], "experts": []} for kind in kinds}
    for fold, (train_n, test_n) in enumerate(folds(5, shuffle=True, random_state=0).split(X, y)):
        for kind, made in kinds.items():
            model = make_pipeline(StandardScaler(), made(random_state=fold))
            started = time.process_time()
            model.fit(X[train_n], y[train_n])
            found[kind]["seconds"].append(time.process_time() - started)
            found[kind]["score"].append(model.score(X[test_n], y[test_n]))
            found[kind]["experts"].append(getattr(model[-1], "num_experts_", np.nan))
    return found


def write_table(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """The text of the page."""
    rows = []
    for name, kinds in found.items():
        X, y = DATA[name](return_X_y=True)
        mlp = kinds["MLP"]["seconds"]
        for kind, lists in kinds.items():
            score = 100 * np.array(lists["score"])
            ratio = median(own / other for own, other in zip(lists["seconds"], mlp, strict=True))
            experts = "" if np.isnan(lists["experts"]).all() else f"{np.mean(lists['experts']):.1f}"
            classes = "" if name == "diabetes" else f", {len(set(y))} classes"
            cells = [
                f"{name} ({X.shape[0]:,} × {X.shape[1]}{classes})",
                kind,
                f"{score.mean():.1f} ± {score.std():.1f}",
            ]
            cells += [f"{ratio:.2g}", f"{median(lists['seconds']):.2g} s", experts]
            rows.append(f"| {' | '.join(cells)} |")
    versions = f"Python {platform.python_version()}, scikit-learn {sklearn.__version__}, torch {torch.__version__}"
    return "\n".join(
        [
            "# Beside scikit-learn's estimators",
            "",
            "Written by `python -m experiments.estimators`. Each estimator has its defaults, in a pipeline with",
            "StandardScaler; the same 5 folds for all. Score: accuracy on the test fold in percent, for diabetes",
            "100 R²; mean ± standard deviation over 5 folds. Linear: LogisticRegression, Ridge. Experts: the mean",
            "number per training row. With its defaults, MLP often ends after 200 epochs before it has converged; on",
            "diabetes it is far from it, since it does not standardise targets: hence the second MLP there.",
            "",
            "Fit time: processor time, one thread, and its ratio to MLP's in the same fold, fitted in the same",
            "process; the median over folds. The machine was loaded with other work, so read the ratios.",
            "",
            f"{versions}, raytraced {rt.__version__}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.",
            "",
            "| data | estimator | score | fit time, MLP = 1 | fit time | experts |",
            "|---|---|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default=str(BENCHMARKS / "sklearn.md"))
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore", ConvergenceWarning
    )  # MLP's 200 epochs are its default, so they are what is measured
    MREClassifier(epochs=1).fit(
        *load_iris(return_X_y=True)
    )  # the first call of a process loads libraries: do not time it
    found = {}
    for name in asked.data:
        with threadpool_limits(1):
            found[name] = measure(name)
        print(
            name, {kind: round(100 * float(np.mean(one["score"])), 1) for kind, one in found[name].items()}, flush=True
        )
    Path(asked.output).write_text(write_table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
