"""Write summary.json, tables.md, table.md, about.json and a stand-alone HTML report."""

import base64
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from experiments.reproduce.claims import evaluate_claims
from experiments.reproduce.command import find_plan
from experiments.reproduce.figures import CAPTIONS
from experiments.reproduce.plan import OWN_FOLDERS, WIDE, Scale, every_run
from experiments.reproduce.records import Record, Results, Store, make_point, shorten, spread
from experiments.reproduce.tables import all_tables, readme_table
from raytraced.files import write_file
from raytraced.tables import clock

QUICK_NOTE = "Quick run: a small version of all experiments, made in minutes to show that the code works. Not a result."
RULE = (
    "Each run keeps the weights of the epoch with the best validation accuracy; the test images are used once, after "
    "the run. All models have the same epochs, batch size, optimizer, weight decay and schedule, and a learning-rate "
    "search over the same grid; the recipe of the paper has its own learning rate, no decay and no schedule."
)


def write_report(results: Results, scale: Scale, folder: Path) -> None:
    """Write all files but the figures, which are in the folder already."""
    quick = QUICK_NOTE if scale.name == "quick" else ""
    claims, tables, about = evaluate_claims(results), all_tables(results), about_all(results, scale)
    summary: dict[str, Any] = {"quick": True} if quick else {}
    for data in results.data():
        summary[data] = {label: over_seeds(results.of(data, label)) for label in results.labels(data)}
    summary["claims"] = {name: asdict(claim) for name, claim in claims.items()}
    readme = readme_table(results, wide_results(folder))
    text = ["# Results", "", *([f"**{quick}**", ""] if quick else []), RULE, "", *(one.markdown() for one in tables)]
    figures = read_figures(folder / "figures")
    page = render("report.html", quick=quick, rule=RULE, about=about, tables=tables, claims=claims, figures=figures)
    write_file(folder / "summary.json", json.dumps(shorten(summary), indent=1, ensure_ascii=False) + "\n")
    write_file(folder / "about.json", json.dumps(about, indent=1) + "\n")
    write_file(folder / "tables.md", "\n".join(text))
    write_file(folder / "table.md", "\n".join([*readme.lines(), "", quick or readme.note, ""]))
    write_file(folder / "report.html", page)


def wide_results(folder: Path) -> Results | None:
    """The records of the union at width 128, which are in a folder of the results; None if it is not there."""
    wide = folder / OWN_FOLDERS["wide"]
    return Store(wide / "records").results(every_run(find_plan(WIDE, wide))) if (wide / "records").is_dir() else None


def render(template: str, /, **values: Any) -> str:
    """Fill in a template of this folder."""
    html = template.endswith("html")
    environment = jinja2.Environment(autoescape=html, trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(Path(__file__).with_name(template).read_text(encoding="utf-8")).render(**values)


def over_seeds(records: list[Record]) -> dict[str, Any]:
    """The means of one model on one data set over its seeds."""
    point = make_point(records)
    return {
        "accuracy_mean": point.accuracy.mean,
        "accuracy_std": point.accuracy.std,
        "seeds": point.accuracy.num,
        "experts_mean": point.experts,
        "macs_mean": point.macs,
        "parameters": records[0].parameters,
        "epochs": records[0].config.epochs,
        "seconds": spread(one.seconds for one in records).mean,
    }


def about_all(results: Results, scale: Scale) -> dict[str, Any]:
    """Duration, versions and rules of the runs."""
    return {
        "scale": scale.name,
        "runs": len(results.all),
        "diverged": [record.key for record in results.all if record.error],
        "training": clock(sum(record.seconds for record in results.whole)) + " on one core",
        "data": {
            name: {"epochs": plan.epochs, "search_epochs": plan.search_epochs, "learning_rates": plan.grid}
            for name, plan in scale.data.items()
        },
        "rule": RULE,
        "versions": results.whole[0].versions,
        "written": time.strftime("%Y-%m-%d"),
    }


def read_figures(folder: Path) -> list[dict[str, str]]:
    """All figures of a folder as data addresses, in the order of the captions."""
    figures = []
    for path in folder.glob("*.png"):
        key = max((key for key in CAPTIONS if path.stem.startswith(key)), key=len)  # fig2-paper is not fig2
        address = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
        figures.append({"key": key, "name": path.stem, "caption": CAPTIONS[key], "address": address})
    return sorted(figures, key=lambda one: (list(CAPTIONS).index(one["key"]), one["name"]))
