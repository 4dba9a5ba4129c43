"""What a benchmark says while it runs: a live bar on a terminal, a line a bar elsewhere."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """One bar over all letters, which moves within a letter too."""

    def __init__(self, letters: list[str], todo: list[str]) -> None:
        self.num_done = len(letters) - len(todo)
        self.live = sys.stdout.isatty()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(),
            disable=not self.live,
            # a thread that redraws while times are taken would disturb them
            auto_refresh=False,
        )
        self.task = self.bars.add_task("benchmark", total=len(letters), completed=self.num_done)
        if self.num_done:
            self.say(f"{self.num_done} of {len(letters)} measured before with this code on this machine: kept")

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()
        if kind is KeyboardInterrupt:
            self.say("stopped; what is finished is saved, the same command goes on")

    def say(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, letter: str, title: str) -> None:
        self.bars.update(self.task, description=f"{letter}  {title}", refresh=True)

    def tick(self, share: float) -> None:
        """How much of a letter is done."""
        self.bars.update(self.task, completed=self.num_done + min(share, 0.99), refresh=True)

    def finish(self, letter: str, bar: dict[str, Any]) -> None:
        self.num_done += 1
        self.bars.update(self.task, completed=self.num_done, refresh=True)
        verdict = "holds" if bar["holds"] else "does not hold"
        value = "not measured" if bar["value"] is None else f"{bar['value']:.4g}"
        self.say(f"{letter}  {value} ({bar['detail']['rule']} {bar['bar']:g}): {verdict}  [{bar['detail']['worst']}]")
