"""Write benchmarks/sklearn-defaults.md: the settings from which the defaults of our scikit-learn estimators were chosen.

A setting is evaluated on a quarter of each fold's training rows, never on the fold's test rows: benchmarks/sklearn.md has
these.
"""

import argparse
import platform
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

import raytraced as rt
from experiments import BENCHMARKS
from experiments.estimators import DATA
from raytraced.integrations.sklearn import MREClassifier, MRERegressor

# rows kept aside to stop early by, decay, learning rate, epochs
SETTINGS = [
    (0.1, 0.1, 0.005, 60),
    (0.0, 0.1, 0.005, 60),
    (0.0, 0.1, 0.005, 30),
    (0.0, 1.0, 0.005, 30),
    (0.1, 1.0, 0.005, 30),
    (0.1, 1.0, 0.002, 30),
    (0.2, 1.0, 0.002, 30),
    (0.0, 1.0, 0.002, 30),
    (0.0, 1.0, 0.002, 10),
    (0.0, 3.0, 0.002, 15),
]
NAMES = ("validation_fraction", "weight_decay", "learning_rate", "epochs")


def validate(data: str, setting: tuple[float, ...]) -> np.ndarray:
    """The score on the validation quarter of each fold's training rows."""
    X, y = DATA[data](return_X_y=True)
    is_number = data == "diabetes"
    made, folds = (MRERegressor, KFold) if is_number else (MREClassifier, StratifiedKFold)
    options: dict[str, Any] = dict(zip(NAMES, setting, strict=True))
    scores = []
    for fold, (train_n, _) in enumerate(folds(5, shuffle=True, random_state=0).split(X, y)):
        labels = None if is_number else y[train_n]
        fit_n, validation_n = train_test_split(train_n, test_size=0.25, random_state=fold, stratify=labels)
        model = made(random_state=fold, **options).fit(X[fit_n], y[fit_n])
        scores.append(100 * model.score(X[validation_n], y[validation_n]))
    return np.array(scores)


def write_page(found: dict[tuple[float, ...], dict[str, np.ndarray]]) -> str:
    """The text of the page; scores of the defaults are bold."""
    classifier, regressor = (
        tuple(made().get_params()[name] for name in NAMES) for made in (MREClassifier, MRERegressor)
    )
    chosen = {classifier: " (classifier)", regressor: " (regressor)"}
    data = list(next(iter(found.values())))
    rows = []
    for setting, scores in found.items():
        shown = f"{setting[0]:g} | {setting[1]:g} | {setting[2]:g} | {setting[3]:g}{chosen.get(setting, '')}"
        cells = []
        for name, one in scores.items():
            cell = f"{one.mean():.1f} ± {one.std():.1f}"
            cells.append(f"**{cell}**" if setting == (regressor if name == "diabetes" else classifier) else cell)
        rows.append(f"| {shown} | {' | '.join(cells)} |")
    versions = f"Python {platform.python_version()}, scikit-learn {sklearn.__version__}, torch {torch.__version__}"
    return "\n".join(
        [
            "# Where the defaults of the estimators come from",
            "",
            "Written by `python -m experiments.estimator_defaults`. The five folds are those of",
            "[the comparison](sklearn.md). Three quarters of a fold's training rows train, a quarter validates; its",
            "test rows are not used. Every row trains in some fold, so a little of the choice may show there.",
            "Accuracy in percent, for diabetes 100 R²; mean ± standard deviation over 5 folds. Bold: the defaults.",
            "",
            f"{versions}, raytraced {rt.__version__}.",
            "",
            f"| validation | decay | learning rate | epochs | {' | '.join(data)} |",
            "|---:|---:|---:|---:|" + "---:|" * len(data),
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default=str(BENCHMARKS / "sklearn-defaults.md"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[float, ...], dict[str, np.ndarray]] = {}
    for setting in SETTINGS:
        found[setting] = {data: validate(data, setting) for data in DATA}
        print(setting, {data: round(float(one.mean()), 1) for data, one in found[setting].items()}, flush=True)
    Path(asked.output).write_text(write_page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
