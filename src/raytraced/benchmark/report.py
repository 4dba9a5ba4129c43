"""results.json -> a table in words and in Markdown, and plots; a report can be written again without measuring."""

from pathlib import Path
from typing import Any

from raytraced.training.files import write_file

COLUMNS = ("", "what", "value", "bar", "holds", "where it is worst")


def write(content: dict[str, Any], folder: Path) -> None:
    """results.md and the plots beside results.json."""
    from raytraced.benchmark import figures

    plots = figures.draw_all(content, folder)
    write_file(folder / "results.md", markdown(content, plots))


def titles() -> dict[str, str]:
    """What each letter measures."""
    from raytraced.benchmark.bars import BARS

    return {letter: bar.title for letter, bar in BARS.items()}


def rows(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table, one row a bar."""
    names = titles()
    table: list[tuple[str, ...]] = []
    for letter, bar in content["bars"].items():
        detail = bar["detail"]
        value = "not measured" if bar["value"] is None else f"{bar['value']:.3g}"
        limit = f"{detail['rule']} {bar['bar']:g}"
        failed = [name for name, holds in detail.get("conditions", {}).items() if not holds]
        holds = "yes" if bar["holds"] else "**no**" + (f" (not {', '.join(failed)})" if failed else "")
        table.append((letter, names[letter], value, limit, holds, detail["worst"]))
    return table


def text_table(content: dict[str, Any]) -> str:
    """The table for a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, box=SIMPLE_HEAD)
    for row in rows(content):
        table.add_row(*(cell.replace("**", "") for cell in row))
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table, markup=False, highlight=False)
    return capture.get().rstrip()


def markdown(content: dict[str, Any], plots: list[str]) -> str:
    """The whole report."""
    machine = content["machine"]
    lines = [
        "# Speed, measured",
        "",
        "Written by `raytraced benchmark`; docs/speed.md says how each bar is measured.",
        "",
    ]
    lines += [
        f"{machine['processor']}, {machine['cores']} cores ({' '.join(machine['instructions'])}), "
        f"{machine['memory_gb']} GB, {machine['system']}; Python {machine['python']}, torch {machine['torch']} "
        f"({machine['torch_instructions']}, {machine['blas']}); kernels: {machine['kernels']}. "
        "One thread unless a row says otherwise.",
        "",
        *markdown_table(COLUMNS, rows(content)),
        "",
    ]
    lines += [line for plot in plots for line in (f"![{Path(plot).stem}]({plot})", "")]
    lines += ["## Every check", ""]
    lines += markdown_table(("", "check", "value", "quartiles", "bar", "holds", "note"), check_rows(content))
    if "j" in content["bars"]:
        lines += ["", "## Growth of the sequence with the grid (microseconds a sample)", "", *growth_table(content)]
    lines += [
        "",
        "## Times",
        "",
        *markdown_table(("", "what", "threads", "median (ms)", "quartiles (ms)"), time_rows(content)),
    ]
    return "\n".join(lines) + "\n"


def check_rows(content: dict[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = []
    for letter, bar in content["bars"].items():
        for check in bar["detail"]["checks"]:
            value = "–" if check["value"] is None else f"{check['value']:.3g}"
            spread = " … ".join(f"{number:.3g}" for number in check.get("quartiles", []))
            limit = f"{check['rule']} {check['bar']:g}"
            holds = "yes" if check["holds"] else "**no**"
            table.append((letter, check["what"], value, spread, limit, holds, check.get("note", "")))
    return table


def growth_table(content: dict[str, Any]) -> list[str]:
    detail = content["bars"]["j"]["detail"]
    head = ("grid", "steps", "active", "inference", "inference, 8 experts at most", "training", "active in training")
    keys = ("steps", "active", "inference_us", "inference_held_us", "training_us", "active_in_training")
    body = [(row["grid"], *(f"{row[key]:.3g}" for key in keys)) for row in detail["table"]]
    fits = [f"- {what}: exponent {value:.2f}" for what, value in detail["exponents"].items()]
    return [*markdown_table(head, body), "", *fits]


def time_rows(content: dict[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = []
    for letter, bar in content["bars"].items():
        for name, row in bar["detail"].get("times", {}).items():
            low, high = row["quartiles_ms"]
            table.append((letter, name, str(row["threads"]), f"{row['median_ms']:.4g}", f"{low:.4g} … {high:.4g}"))
    return table


def markdown_table(head: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    """A table, a line a row."""
    cells = [head, ("---",) * len(head), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]
