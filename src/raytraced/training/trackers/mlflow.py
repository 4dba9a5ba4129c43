"""MLflow: a local database beside the run folders, unless MLFLOW_TRACKING_URI names a server."""

import logging
import os
import time

from raytraced.training.callbacks import RunInfo
from raytraced.training.trackers.tracker import PROJECT, RunTracker, local_store, run_options

LONGEST_PARAM = 6000
"""characters of a parameter's value that MLflow stores"""


class MLflowTracker(RunTracker):
    """Writes mlflow.db beside the run folders; `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows it.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME have their usual meaning.
    """

    name, package = "mlflow", "mlflow"

    def open(self, info: RunInfo, run_id: str | None) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when the library is imported
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # the terminal shows our own progress
            logging.getLogger(name).setLevel(logging.WARNING)
        store = local_store(info)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(uri or f"sqlite:///{store / 'mlflow.db'}")
        if run_id is not None:
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(title)
        place = None if uri else (store / "mlflow").as_uri()
        experiment = known.experiment_id if known else self.client.create_experiment(title, artifact_location=place)
        run_id = str(self.client.create_run(experiment, run_name=info.run.path.name).info.run_id)
        options = {name: str(value)[:LONGEST_PARAM] for name, value in run_options(info).items()}
        self.client.log_batch(run_id, params=[Param(name, value) for name, value in options.items()])
        return run_id

    def log_epoch(self, figures: dict[str, float], epoch: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[Metric(name, value, now, epoch) for name, value in figures.items()])

    def end(self, results: dict[str, float] | None) -> None:
        if results:
            self.log_epoch(results, self.num_logged)
        self.client.set_terminated(self.run_id, "FINISHED" if results is not None else "KILLED")
