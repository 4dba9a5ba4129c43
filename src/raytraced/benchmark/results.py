"""results.json: every finished bar is saved at once, and not measured again while code, machine and settings are the same."""

import hashlib
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raytraced.benchmark.outcome import Outcome
from raytraced.training.files import write_file

# The code that a bar runs; the package's other folders can change and the results stay.
FOLDERS = (".", "baselines", "benchmark", "data", "kernels", "kernels/cpu")
SUFFIXES = (".py", ".cpp", ".h", ".inl")


def code_hash(package: Path) -> str:
    """A hash of the code that bars run, whether committed or not."""
    digest = hashlib.sha256()
    paths = [path for folder in FOLDERS for path in (package / folder).glob("*") if path.suffix in SUFFIXES]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(package).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out there, with + where files differ from it; None outside of a clone."""
    try:
        ask = ["git", "-C", str(folder)]
        head = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*ask, "status", "--porcelain", "-uno", "."], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+" if changed.stdout.strip() else "")


class ResultsFile:
    """The results of one machine; a bar's own entry tells which code and settings it was measured with."""

    def __init__(self, path: Path, machine: dict[str, Any], stamp: dict[str, Any], *, fresh: bool = False) -> None:
        self.path, self.stamp = path, stamp
        self.content: dict[str, Any] = {"machine": machine, "bars": {}, "samples": {}}
        if fresh or not path.exists():
            return
        try:
            old = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); move it away, or measure anew with --fresh") from error
        if isinstance(old, dict) and old.get("machine") == machine:
            self.content |= old

    def is_done(self, key: str) -> bool:
        """Whether a bar was measured with the same code and settings; the commit may be another one, of a text say."""
        bar = self.content["bars"].get(key)
        return bar is not None and all(
            bar["detail"]["measured"].get(name) == self.stamp[name] for name in ("code", "settings")
        )

    def add(self, key: str, outcome: Outcome, seconds: float) -> dict[str, Any]:
        """Save a finished bar."""
        bar = outcome.as_dict()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        bar["detail"]["measured"] = self.stamp | {"at": now, "seconds": round(seconds, 1)}
        self.content["bars"] = dict(sorted((self.content["bars"] | {key: bar}).items()))
        self.content["samples"] = dict(sorted((self.content["samples"] | {key: _rounded(outcome.samples)}).items()))
        self.save()
        return bar

    def save(self) -> None:
        """Write the file whole, or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.path, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")


def _rounded(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [float(f"{value:.5g}") for value in values] for name, values in samples.items()}
