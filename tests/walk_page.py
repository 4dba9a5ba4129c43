"""Follow a page of the documentation as a new user does: every command and code block, in order.

    python walk_page.py PAGE CLONE     # in a folder of its own, in the environment of the clone

tests/test_guides.py runs it. It needs the standard library only: everything else must come from the environment.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 1800  # for one command
# Names in commands that a user replaces → what `prepare` makes.
PLACEHOLDERS = {"FOLDER": "folder/of/classes", "FILE": "own.txt", "NAME": "digits"}
PREPARED = """
from pathlib import Path
import numpy as np
from PIL import Image
random = np.random.default_rng(0)
for number in range(40):
    path = Path("folder/of/classes", "ab"[number % 2], f"{number}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save("image.png")
Path("own.txt").write_text("a line of a text\\n" * 2000)
"""
# Commands that are not run, and why.
NOT_RUN = {
    r"make (?!demo)": "work on the repository itself, minutes to hours",
    r"python -m experiments": "work on the repository itself, minutes to hours",
    r"pre-commit": "work on the repository itself",
    r"pip install \.$": "the other way to install: the environment is there already",
    r"git (clone|push)": "the clone is there already",
    r".*(push-to-hub|push_to_hub|hf auth|huggingface-cli)": "needs an account",
    r"torchrun .*--(nnodes|master)": "needs several machines",
    r"raytraced resume .*--data images/": "the data of that run has not moved",
}
OURS = ("raytraced", "python", "pip", "make", "torchrun", "source")  # a page's other programs may be missing here
NO_NETWORK = "no source could give it"  # a data set that cannot be downloaded here


def read_blocks(text: str) -> list[tuple[int, str, str]]:
    """Line number, language and content of each fenced block, and of each `pip install` within a sentence."""
    blocks = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    installs = re.finditer(r"`(pip\s+install\s+[^`]+)`", text)
    found = [(each.start(), each[1], each[2]) for each in blocks]
    found += [(each.start(), "bash", " ".join(each[1].split())) for each in installs]
    return [(text.count("\n", 0, start) + 1, language, content) for start, language, content in sorted(found)]


def split_commands(block: str) -> list[str]:
    """The commands of a block of shell lines; one with an open quotation or a final backslash continues."""
    commands, open_lines = [], ""
    for line in block.splitlines():
        open_lines += line
        try:
            words = shlex.split(open_lines, comments=True)
        except ValueError:  # an open quotation, or a final backslash
            open_lines += "\n"
            continue
        commands += [open_lines] if words else []
        open_lines = ""
    return commands


def fill_in(command: str) -> str:
    """A command with paths in place of placeholders, without dots that stand for more of the same."""
    command = re.sub(r"(?<=\s)…(?=\s|$)", "", command)
    return re.sub(rf"\b({'|'.join(PLACEHOLDERS)})\b", lambda found: PLACEHOLDERS[found[1]], command)


class Walk:
    """One page, from top to bottom. What a block leaves, in Python or on disk, the next one finds."""

    def __init__(self, page: Path, clone: Path) -> None:
        self.page, self.clone = page, clone
        self.names = {"__name__": "__main__"}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.num_run = 0

    def prepare(self) -> None:
        """Make the image, the folder of images, the text and the run that pages name."""
        exec(PREPARED, {})
        text = ["--data", "own.txt", "--model", "gpt-mre", "--epochs", "1", "--data-options.steps", "5"]
        for name, options in {"RUN": ["--preset", "quick"], "plays": text}.items():
            if f"--name {name}" not in self.page.read_text(encoding="utf-8"):  # else the page makes it
                words = ["raytraced", "train", *options, "--name", name, "--quiet"]
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)

    def follow(self) -> None:
        for line, language, text in read_blocks(self.page.read_text(encoding="utf-8")):
            if language == "bash":
                for command in split_commands(text):
                    print(f"{self.page.name}:{line}: $ {command}", flush=True)
                    self.run(fill_in(command))
            elif language == "python":
                print(f"{self.page.name}:{line}: a block of Python", flush=True)
                self.execute(line, text)

    def execute(self, line: int, text: str) -> None:
        """Run a block of Python; one whose first line names a file of the repository is written to that file."""
        self.num_run += 1
        if file := re.match(r"# ((?:src|tests|docs)/[\w/]+\.py)\n", text):
            (self.clone / file[1]).write_text(text, encoding="utf-8")
        else:
            exec(compile("\n" * line + text, str(self.page), "exec"), self.names)

    def run(self, command: str) -> None:
        """Run a shell command, which must succeed; a server stays until the page ends."""
        program = next(word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word))
        reason = next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, command)), None)
        if program not in OURS and shutil.which(program) is None:
            reason = f"{program} is not installed here"
        if reason:
            print(f"not run: {command}: {reason}", flush=True)
            return
        self.num_run += 1
        if command.startswith("raytraced serve"):
            self.serve(command)
            return
        in_clone = program in ("pip", "make", "source")
        shell = ["bash", "-c", command]
        ended = subprocess.run(
            shell, cwd=self.clone if in_clone else None, timeout=SECONDS, stderr=subprocess.PIPE, text=True
        )
        sys.stderr.write(ended.stderr)
        if NO_NETWORK in ended.stderr:
            print(f"not run: {command}: the data set cannot be downloaded here", flush=True)
        elif ended.returncode:
            sys.exit(f"{self.page}: {command}: ended with code {ended.returncode}")

    def serve(self, command: str) -> None:
        """Start a server and wait until it prints its address."""
        self.stop_servers()  # pages start one after the other on the same port
        output = Path("server.log")
        with output.open("w") as file:
            shell = ["bash", "-c", f"exec {command.partition('#')[0].rstrip('& ')}"]
            server = subprocess.Popen(shell, stdout=file, stderr=subprocess.STDOUT)
        self.servers.append(server)
        deadline = time.monotonic() + 120
        while "http://" not in output.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.page}: {command}: no server; it printed: {output.read_text()}")
            time.sleep(0.2)

    def stop_servers(self) -> None:
        """End all servers; they must do so within their grace period."""
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
        self.servers.clear()


def main() -> None:
    page, clone = (Path(word).resolve() for word in sys.argv[1:])
    walk = Walk(page, clone)
    if not os.listdir():
        walk.prepare()
    try:
        walk.follow()
    finally:
        walk.stop_servers()
    print(f"{page.name}: {walk.num_run} commands and blocks of code ran")


if __name__ == "__main__":
    main()
