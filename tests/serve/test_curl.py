"""The two requests of docs/serve.md as curl sends them, with a file that is too large for one argument of a command."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from serve.conftest import png

PAGE = Path(__file__).parents[2] / "docs/serve.md"
ARGUMENT = 128 * 1024  # bytes of the longest argument that Linux gives to a program; base64 takes 4 bytes for 3


def curl_requests() -> list[str]:
    """Each command with curl in the blocks of the page, some of two lines."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [part for block in blocks for part in block.split("\n\n") if "curl " in part]


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "base64"))), reason="needs bash, curl and base64")
@pytest.mark.parametrize("request_line", curl_requests(), ids=("in a form", "in JSON"))
def test_the_requests_of_the_page_take_a_large_image(request_line, address, tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (400, 400), dtype=np.uint8)
    (tmp_path / "large.png").write_bytes(png(noise))
    assert (tmp_path / "large.png").stat().st_size * 4 / 3 > ARGUMENT
    line, num_places = re.subn(r"(http://)?localhost:8000", address, request_line)
    line, num_files = re.subn(r"\bimage\.png\b", "large.png", line)
    assert num_places == num_files == 1
    command = ["bash", "-c", f"set -o pipefail\n{line}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == "mre-mnist"
    assert answer["answers"][0]["label"] in "0123456789"
