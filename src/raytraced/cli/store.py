"""`raytraced store`: a model in a file from which each expert can be read by itself; torch is imported only when it runs."""

from pathlib import Path
from typing import Literal

from raytraced.cli.training import find_source
from raytraced.errors import printable, require


def store(
    run: str,
    output: str,
    max_shard_size: str | None = None,
    weights: Literal["last", "best"] = "last",
    runs_dir: str = "runs",
) -> None:
    """Write a trained model as a store, whose experts are read when they are needed: for models larger than memory.

    Args:
        output: The file to write, for example large.safetensors.
        max_shard_size: Size above which the store is written as several files and an index, such as 5GB; default: one file.
    """
    path = Path(output)
    require(path.suffix == ".safetensors", "output", output, "must end in .safetensors")
    require(path.parent.is_dir(), "output", output, "its folder does not exist; make it first")
    source = find_source(run, runs_dir, weights)
    from raytraced.io.finding import find_model_file
    from raytraced.io.saving import load, save
    from raytraced.store.layout import open_store
    from raytraced.store.reader import format_size

    same = path.exists() and path.samefile(find_model_file(source, runs_dir))
    require(not same, "output", output, "is the model itself; write the store to another file")
    save(load(source), path, store=True, max_shard_size=max_shard_size)
    file = open_store(find_model_file(path))
    total, rest = len(file.runs) * file.run_bytes, sum(tensor.nbytes for tensor in file.tensors.values())
    experts = f"{len(file.runs)} experts of {format_size(file.run_bytes)}, {format_size(total)} in all"
    files = "" if len(file.shards) == 1 else f", {len(file.shards)} files"
    print(f"{printable(file.path)}: {experts}; everything else takes {format_size(rest)}{files}")
