"""Walk the guides as a new user: fresh clone, environment activated as README says, every page in an empty folder.

`make test-slow` runs it. Left out, with a reason: commands that download data, need a GPU or several hosts, or never end.
The clone's environment borrows the installed packages of this one, so that little is downloaded.
"""

import os
import re
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", DOCS / "index.md", DOCS / "serve.md", *sorted((DOCS / "guides").glob("*.md"))]
LEFT_OUT = {
    r"^make ": "run by the fixture, or a target of the repository that is tested by itself",
    r"^(source|pip) ": "done once, by the fixture",
    r"^torchrun ": "several processes are tested in tests/training",
    r"--rdzv|-m raytraced\.cli\.main": "the second line of torchrun",
    r"(mnist|cifar10|enwik8|mix|union)\b": "downloads a data set",
    r"^raytraced serve": "runs until it is stopped; tested in tests/serve",
    r"^(curl|docker|python) ": "needs a running server, or a file of the repository",
    r"--data images/": "a folder of the reader",
    r"^raytraced data get NAME": "a placeholder",
    r"--tracker": "needs the package of the tracker; tests/training/test_trackers.py trains with each",
}
PLACEHOLDERS = {"FOLDER": "folder/of/classes", "FILE": "own.txt", " …": "", "--trials 40": "--trials 3"}
# budgets that the small model which stands for the reader's has, too
PLACEHOLDERS |= {"plays --experts 4": "plays --experts 2", "plays --effort 0.8": "plays --effort 0.98"}
SHORTER = {"trials: 20": "trials: 2", "epochs: 10": "epochs: 1"}  # in files that the reader writes
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A fresh clone in which `make demo` has run."""
    folder = tmp_path_factory.mktemp("new-user") / "raytraced"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=1500)
    subprocess.run([sys.executable, "-m", "venv", str(folder / ".venv")], check=True, timeout=1500)
    (packages,) = (folder / ".venv/lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    run("make demo", folder)
    return folder


def run(script: str, folder: Path) -> str:
    """Run a shell script; what it printed is shown if it fails."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAYTRACED_KERNELS")}
    result = subprocess.run(
        ["bash", "-e", "-c", script], cwd=folder, env=known, capture_output=True, text=True, timeout=1500
    )
    assert result.returncode == 0, f"{script}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


@pytest.fixture
def empty_folder(clone, tmp_path) -> Path:
    """An empty folder, but for the reader's own files, with the runs that the start page makes."""
    random = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "folder/of/classes" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "image.png")
    (tmp_path / "own.txt").write_text("line by line, a text that repeats itself\n" * 400)
    small = "--data-options.steps 2 --data-options.context 16 --model-options.num_experts 2"
    small += " --model-options.dim 8 --model-options.num_heads 2 --model-options.hidden 8"
    train = "raytraced train --quiet --epochs 1"
    run(
        f"{activate(clone)}; {train} --name RUN; {train} --data shakespeare --model gpt-mre --name plays {small}",
        tmp_path,
    )
    return tmp_path


def activate(clone: Path) -> str:
    return f"source {clone}/.venv/bin/activate"


def commands(block: str) -> list[str]:
    """The commands of a shell block that a new user can run here."""
    lines = block.replace("\\\n", " ").splitlines()
    stripped = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return [line for line in stripped if line and not any(re.search(pattern, line) for pattern in LEFT_OUT)]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_can_be_followed_from_top_to_bottom(page, clone, empty_folder):
    content = page.read_text(encoding="utf-8")
    for name, text in re.findall(r"`(\w+\.yaml)`:\n\n```text\n(.*?)^```$", content, re.MULTILINE | re.DOTALL):
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (empty_folder / name).write_text(text)
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", content, re.MULTILINE | re.DOTALL)
    script = []
    for language, text in blocks:
        if language == "bash":
            for command in commands(text):
                for name, value in PLACEHOLDERS.items():
                    command = command.replace(name, value)
                is_training = re.match(r"raytraced (train|resume)", command)
                run(f"{activate(clone)}; {command}{' --epochs 1' if is_training else ''}", empty_folder)
        elif file := re.match(r"# (src/raytraced/[\w/]+\.py)\n", text):
            (clone / file[1]).write_text(text)
        elif file := re.match(r"# (\w+\.py)\n", text):  # a file that the reader writes
            (empty_folder / file[1]).write_text(text)
        else:
            script.append(text)
    if script:
        (empty_folder / "page.py").write_text("\n\n".join(script))
        run(f"{activate(clone)}; PYTHONPATH={clone}/tests/extensions python page.py", empty_folder)
