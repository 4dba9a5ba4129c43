"""results.json: ratios, with the machine and the code that gave them. A finished workload is saved at once, and kept.

Importing this file does not import torch.
"""

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from raytraced.cli.checks import describe_machine as describe_machine
from raytraced.files import write_file

LOADED = 0.1  # the report marks a workload during which other processes took at least this share of the cores
# The code that workloads run, and the part of it that none runs: that part can change and measured ratios stay valid.
MEASURED = ("src/raytraced", "experiments/benchmark")
NOT_MEASURED = (
    "experiments/benchmark/report.py",
    "src/raytraced/cli/",
    "src/raytraced/explore/",
    "src/raytraced/pretrained/",
    "src/raytraced/serve/",
)

# What is measured against what. MEASUREMENTS of layer_workloads.py and model_workloads.py hold the functions.
WORKLOADS = {
    "step": "a training step as `raytraced train` takes it, batch 256: MRE against top-2",
    "epoch": "an epoch of `raytraced train`, loader included: MRE against top-2",
    "baselines": "a training step of every model against that of top-2, all briefly trained",
    "inference": "1,000 images at once: MRE against top-2, and against MLP(36) in plain PyTorch",
    "latency": "single images, one after the other: MRE against MLP(36) in plain PyTorch",
    "kernels": "MRE on 256 images of noise, at initialisation: compiled kernels against plain PyTorch",
    "memory": "resident memory that a training step adds at most: compiled kernels against plain PyTorch",
    "threads": "a training step of MRE at batch 1,024: two threads against one",
    "sequence": "the activation sequence, forward and backward, batch 256: compiled against plain, and against a step",
    "growth": "the activation sequence, batch 256, as the grid grows: against that of 4×8",
    "costly-experts": "experts 512→2048→512, batch 256: MRE against every expert on every row, and against top-2",
    "peers": "four layers of top-2, forward and backward, batch 256: ours against other libraries'",
    "tokens": "a training step of a byte decoder, 16 windows of 128 bytes: MRE against top-2, and against other libraries'",
    "gpu": "on a GPU: the sequence's kernels and grouped experts, batch 4,096, against plain PyTorch there and one core",
    "core-limit": "MRE with experts D→4D→D: against its MACs at the speed of a large matrix product",
}


def chosen(only: str) -> list[str]:
    """The workloads with the given names (all if there are none), in the order of the table."""
    asked = {word.replace("_", "-") for word in only.lower().replace(",", " ").split()}
    for name in sorted(asked - set(WORKLOADS)):
        raise ValueError(f"only={only}: {name} is not a workload; must be one or more of {', '.join(WORKLOADS)}")
    return [name for name in WORKLOADS if not asked or name in asked]


class Outcome(NamedTuple):
    """The ratios of a workload, and the conditions that it checked, such as equal results of both sides."""

    rows: list[dict[str, Any]]
    conditions: dict[str, bool] | None = None


def read_ticks() -> tuple[float, float, float]:
    """Clock ticks of all cores: busy ones, all, and those of this process and of its children that have ended."""
    if not Path("/proc/stat").exists():
        return 0, 0, 0
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks), sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")


def others_share(since: tuple[float, float, float]) -> float | None:
    """The share of the cores that other processes have taken since then; None where the system does not report it."""
    busy, total, own = (now - then for then, now in zip(since, read_ticks(), strict=True))
    return max(0.0, busy - own) / total if total else None


def code_hash(root: Path) -> str:
    """A hash of the code of a repository that workloads run, whether committed or not."""
    digest = hashlib.sha256()
    suffixes = ("py", "cpp", "h", "inl")
    for path in sorted(
        path for folder in MEASURED for suffix in suffixes for path in (root / folder).rglob(f"*.{suffix}")
    ):
        place = path.relative_to(root).as_posix()
        if not place.startswith(NOT_MEASURED):
            digest.update(f"{place}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class ResultsFile:
    """The results of one machine; every workload's entry holds the hash of the code and the settings it was measured with."""

    def __init__(self, path: Path, machine: dict[str, Any], stamp: dict[str, Any], *, fresh: bool = False) -> None:
        self.path, self.stamp = path, stamp
        self.content: dict[str, Any] = {"machine": machine, "code": stamp["code"], "workloads": {}}
        if fresh or not path.exists():
            return
        try:
            old = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); move it away, or measure again with --fresh") from error
        if isinstance(old, dict) and old.get("machine") == machine:
            self.content["workloads"] = old.get("workloads", {})

    def is_done(self, name: str) -> bool:
        """Whether it was measured with the same code and settings."""
        measured = self.content["workloads"].get(name, {}).get("measured", {})
        return all(measured.get(key) == value for key, value in self.stamp.items())

    def add(self, name: str, outcome: Outcome, seconds: float, others: float | None) -> dict[str, Any]:
        """Save a finished workload; the file is written whole, or not at all."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry: dict[str, Any] = {"rows": outcome.rows, "conditions": outcome.conditions or {}}
        entry |= {"others_share_of_cores": others, "measured": self.stamp | {"at": now, "seconds": seconds}}
        # Five significant digits: the measurement is not more precise.
        entry = json.loads(json.dumps(entry), parse_float=lambda digits: float(f"{float(digits):.5g}"))
        entries = self.content["workloads"] | {name: entry}
        self.content["workloads"] = {known: entries[known] for known in WORKLOADS if known in entries}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        return entry
