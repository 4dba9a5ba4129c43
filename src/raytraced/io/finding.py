"""Where a model is: a path, a run in the runs folder, or a shipped model. Importing this file does not import torch."""

import os
from pathlib import Path

from raytraced.errors import did_you_mean

PRETRAINED = Path(__file__).parent.parent / "pretrained"
MODEL_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
)  # the file of a model, or the index of several files


def find_weights(folder: Path) -> Path | None:
    """The file of the model that a folder holds, or the index of its files; None where there is none.

    It may be a pipe, a folder or a dead link: `raytraced.load` says so, where "no model" would be misleading.
    """
    return next((folder / name for name in MODEL_FILES if os.path.lexists(folder / name)), None)


def find_model_place(source: str | Path, runs_dir: str | Path = "runs") -> Path:
    """Find what a name or path refers to; `raytraced.load` and every command use this function.

    Args:
        source: A file (or the name under which a store was written as several), a run folder, the name of a run in
            `runs_dir`, or the name of a shipped model; tried in this order.
        runs_dir: Folder that holds run folders.

    Returns:
        A file, or a folder that holds model.safetensors or the config.yaml of a run.
    """
    path = Path(source)
    for file in (path, Path(f"{path}.index.json")):
        if file.exists() and not file.is_dir():
            return file
    for folder in (path, Path(runs_dir) / path):
        if find_weights(folder) or (folder / "config.yaml").is_file():
            return folder
    shipped = PRETRAINED / f"{source}.safetensors"
    if path.name == str(source) and shipped.is_file():
        return shipped
    if path.is_dir():
        raise ValueError(f"{source}: holds no model.safetensors")
    runs = [file.parent.name for file in Path(runs_dir).glob("*/config.yaml")]
    names = sorted(file.stem for file in PRETRAINED.glob("*.safetensors"))
    remedy = did_you_mean(path.name, [*runs, *names], f"`raytraced runs --runs-dir {runs_dir}` lists the runs")
    shipped_models = f"a shipped model ({', '.join(names)})"
    raise ValueError(f"{source}: is neither a run folder, a file, nor {shipped_models}; {remedy}")


def find_model_file(source: str | Path, runs_dir: str | Path = "runs") -> Path:
    """Find the file of the trained model that a name or path refers to.

    Args:
        source: As for `find_model_place`.
        runs_dir: Folder that holds run folders.

    Returns:
        The model.safetensors file, or the index of several files.
    """
    place = find_model_place(source, runs_dir)
    if not place.is_dir():
        return place
    file = find_weights(place)
    if file is None:
        raise ValueError(f"{place}: holds no model.safetensors; the run is not complete: `raytraced resume {place}`")
    return file
