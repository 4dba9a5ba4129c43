"""results/: summary.json, tables.md, about.json and a report in one HTML file that needs no other."""

import base64
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

from raytraced.reproduce.bars import judge_bars
from raytraced.reproduce.claims import judge_all
from raytraced.reproduce.drawing import CAPTIONS, caption_of
from raytraced.reproduce.plan import Scale
from raytraced.reproduce.records import Results
from raytraced.reproduce.summary import summarise, write_summary
from raytraced.reproduce.tables import Table, all_tables
from raytraced.training.files import write_file
from raytraced.training.progress import clock

QUICK_NOTE = "Quick run: a small likeness of the evidence, made in minutes to show that all of it works. Not a result."


def write_report(results: Results, scale: Scale, folder: Path) -> dict[str, Any]:
    """Write everything but the figures, which lie in the folder already; returns the summary."""
    quick = scale.name == "quick"
    claims, bars = judge_all(results), judge_bars(results)
    summary = summarise(results, claims, bars, quick)
    tables = all_tables(results)
    about = describe(results, scale)
    write_summary(folder / "summary.json", summary)
    write_file(folder / "about.json", json.dumps(about, indent=1) + "\n")
    write_file(folder / "tables.md", tables_text(tables, about, quick))
    page = render(
        quick=QUICK_NOTE if quick else "",
        about=about,
        tables={name: html_table(table) for name, table in tables.items()},
        claims=claims,
        bars=bars,
        figures=load_figures(folder / "figures"),
    )
    write_file(folder / "report.html", page)
    return summary


def describe(results: Results, scale: Scale) -> dict[str, Any]:
    """How long it took, on what, and by which rules."""
    return {
        "scale": scale.name,
        "runs": len(results.all),
        "diverged": [record.key for record in results.all if record.error],
        "training": clock(sum(record.seconds for record in results.whole)) + " on one core",
        "epochs": dict(scale.epochs),
        "search": {
            "learning rates": {"union": list(scale.union_grid), "others": list(scale.grid)},
            "epochs": dict(scale.search_epochs),
        },
        "rule": (
            "The weights of the epoch with the best validation accuracy are kept, for every model; the test images are "
            "looked at once, when a run has ended. All models get the same epochs, batch size, optimizer, decay and "
            "schedule, and a learning-rate search over the same grid; the recipe of the paper has its own rate, no decay and "
            "no schedule."
        ),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": results.whole[0].versions if results.whole else {},
        "written": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The name of the CPU, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def tables_text(tables: dict[str, Table], about: dict[str, Any], quick: bool) -> str:
    """All tables as Markdown."""
    head = ["# Results", ""]
    if quick:
        head += [f"**{QUICK_NOTE}**", ""]
    head += [about["rule"], ""]
    return "\n".join([*head, *(table.markdown() for table in tables.values())])


def html_table(table: Table) -> dict[str, Any]:
    """A table for the template; what Markdown sets in bold is marked."""
    rows = [[{"text": cell.strip("*"), "bold": cell.startswith("**")} for cell in row] for row in table.rows]
    return {"title": table.title, "header": table.header, "rows": rows, "note": table.note}


def load_figures(folder: Path) -> list[dict[str, str]]:
    """Every figure that was drawn so far, in the order of the captions, as data addresses."""
    order = list(CAPTIONS)

    def rank(path: Path) -> tuple[int, str]:
        known = [number for number, key in enumerate(order) if path.stem == key or path.stem.startswith(f"{key}-")]
        return max(known, default=len(order)), path.stem

    figures = []
    for path in sorted(folder.glob("*.png"), key=rank):
        content = base64.b64encode(path.read_bytes()).decode()
        figures.append(
            {"name": path.stem, "caption": caption_of(path.stem), "address": f"data:image/png;base64,{content}"}
        )
    return figures


def render(**values: Any) -> str:
    """The page."""
    import jinja2

    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(template).render(**values)
