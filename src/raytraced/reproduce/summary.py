"""summary.json: data set → model → figures, and the claims and bars. Needs no torch, but for the claims."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytraced.reproduce.bars import Bar
from raytraced.reproduce.claims import Claim
from raytraced.reproduce.records import Record, Results, shorten, spread
from raytraced.training.files import write_file


def summarise_model(records: list[Record]) -> dict[str, Any]:
    """The figures of one model on one data set, over its seeds."""
    accuracy = spread(one.accuracy for one in records)
    return {
        "accuracy_mean": accuracy.mean,
        "accuracy_std": accuracy.std,
        "seeds": accuracy.num,
        "experts_mean": spread(one.experts for one in records).mean,
        "macs_mean": spread(one.macs["total"] for one in records).mean,
        "parameters": records[0].parameters,
        "epochs": records[0].epochs,
        "seconds": spread(one.seconds for one in records).mean,
    }


def summarise(results: Results, claims: dict[str, Claim], bars: dict[str, Bar], quick: bool) -> dict[str, Any]:
    """The content of summary.json; a quick likeness says so."""
    summary: dict[str, Any] = {"quick": True} if quick else {}
    for data in results.data():
        summary[data] = {label: summarise_model(results.of(data, label)) for label in results.labels(data)}
    summary["claims"] = {name: asdict(claim) for name, claim in claims.items()}
    summary["bars"] = {number: asdict(bar) for number, bar in bars.items()}
    return summary


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write it, a field a line."""
    write_file(path, json.dumps(shorten(summary), indent=1, ensure_ascii=False) + "\n")
