"""Going on with a run: exactly as it was started, or otherwise, which is then stated in its folder."""

from dataclasses import fields, replace
from typing import Any

from raytraced.training.checkpoint import newest_checkpoint
from raytraced.training.config import PRIVATE_FIELDS, TrainConfig
from raytraced.training.run_folder import RunFolder


def started_config(run: RunFolder) -> tuple[TrainConfig, list[str]]:
    """What a run was started or last continued with, and the options of which config.yaml now says something else."""
    stated = run.read_continuations()
    checkpoint = None if stated else newest_checkpoint(run.last)[0]
    known = stated[-1]["config"] if stated else checkpoint.state.get("config") if checkpoint else None
    if known is None:  # nothing is trained yet
        return run.config, []
    config, written = TrainConfig(**known), run.config
    names = (one.name for one in fields(config) if one.name not in PRIVATE_FIELDS)
    return config, [name for name in names if getattr(config, name) != getattr(written, name)]


def continue_with(run: RunFolder, config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    """The configuration with some options changed, stated in the run's folder."""
    history = run.read_metrics()
    changed = replace(config, **changes)
    if changed.epochs <= len(history):
        raise ValueError(f"epochs={changed.epochs}: must be more than the {len(history)} that are done")
    before = {name: getattr(config, name) for name in changes}
    told = {name: {"from": before[name], "to": value} for name, value in changes.items()}
    run.add_continuation(changed, told, {"after_epoch": len(history)})
    return changed
