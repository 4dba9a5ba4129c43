"""The searches for learning rates as Optuna studies, in one journal that many machines may share.

A study begins a trial for every rate that its search needs: those of the grid, then one beyond while the best is at the edge.
The runs of the trials are trained as all others are; their records are the results that the studies hold.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.reproduce.plan import LADDER, Planner, Run, Selection, collect_runs
from experiments.reproduce.records import Results, rates_to_try

if TYPE_CHECKING:
    import optuna

JOURNAL = "searches.log"
Scores = Mapping[float, float | None]  # learning rate → score on validation data, None where the run diverged


def ask_searches(
    planner: Planner, parts: Sequence[str], selected: Selection, results: Results, folder: Path
) -> Planner:
    """Let the studies decide which learning rates are tried.

    Args:
        planner: The plan with the rates and searches known so far.
        parts: The parts that are made.
        selected: The data sets that the user chose.
        results: The records.
        folder: The folder of the results, where the journal is.

    Returns:
        The plan with the rates that each search tries.
    """
    grids = dict(planner.grids)
    for (data, label), runs in searches_of(collect_runs(parts, planner, selected)).items():
        study = open_study(folder, runs)
        report_scores(study, results.searches().get((data, label), {}))
        searched = planner.scale.data[data]
        extends = planner.scale.fixed_lr is None and searched.extends
        grids[data, label] = ask(study, searched.grid, extends)
    return replace(planner, grids=grids)


def report_searches(runs: Sequence[Run], results: Results, folder: Path) -> None:
    """Tell the studies what the runs of their trials have found."""
    for key, some in searches_of(runs).items():
        report_scores(open_study(folder, some), results.searches().get(key, {}))


def searches_of(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """The runs of each search, by data set and model."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.group == "search":
            found.setdefault((run.data, run.family), []).append(run)
    return found


def open_study(folder: Path, runs: Sequence[Run]) -> "optuna.Study":
    """The study of a search; another recipe has another study."""
    if find_spec("optuna") is None:
        raise ValueError("searches need the package optuna; install it with pip install '.[sweep]'")
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = json.dumps(runs[0].public_config | {"lr": None}, sort_keys=True)
    name = f"{runs[0].data}/{runs[0].family}/{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
    return optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)


def rates_of(study: "optuna.Study") -> dict[float, Any]:
    """The trial of each learning rate; of several, as two machines may begin them at once, the first."""
    trials = study.get_trials(deepcopy=False)
    return {one.params["lr"]: one for one in reversed(trials) if "lr" in one.params}


def report_scores(study: "optuna.Study", scores: Scores) -> None:
    """Complete the trials whose runs have ended; a run that no trial asked for becomes one."""
    import optuna

    states = optuna.trial.TrialState
    known = rates_of(study)
    for lr, score in scores.items():
        state = states.FAIL if score is None else states.COMPLETE
        if lr not in known:
            values = {"params": {"lr": lr}, "distributions": {"lr": distribution()}}
            study.add_trial(optuna.trial.create_trial(state=state, value=score, **values))
        elif known[lr].state == states.RUNNING:
            study.tell(known[lr].number, score, state=state)


def ask(study: "optuna.Study", grid: Sequence[float], extend: bool) -> tuple[float, ...]:
    """Begin trials until every rate that the search needs has one; return all rates."""
    import optuna

    while True:
        known = rates_of(study)
        ended = {
            lr: one.value if one.state == optuna.trial.TrialState.COMPLETE else None
            for lr, one in known.items()
            if one.state.is_finished()
        }
        rates = rates_to_try(ended, {*grid, *known}, extend)
        missing = [lr for lr in rates if lr not in known]
        if not missing:
            return tuple(rates)
        study.enqueue_trial({"lr": missing[0]})
        study.ask({"lr": distribution()})


def distribution() -> "optuna.distributions.FloatDistribution":
    """All learning rates that a search may try."""
    import optuna

    return optuna.distributions.FloatDistribution(LADDER[0], LADDER[-1], log=True)
