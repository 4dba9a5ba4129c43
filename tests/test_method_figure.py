import runpy
from pathlib import Path

from PIL import Image

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "method.py"))


def test_the_figure_of_the_method_shows_more_active_nodes_from_panel_to_panel(tmp_path):
    SCRIPT["draw_method"](tmp_path / "method.png")
    image = Image.open(tmp_path / "method.png").convert("RGB")
    blue = tuple(int(SCRIPT["ACTIVE"][i : i + 2], 16) for i in (1, 3, 5))
    third = image.width // 3
    counts = []
    for panel in range(3):
        part = image.crop((panel * third, 0, (panel + 1) * third, image.height))
        counts.append(sum(n for n, colour in part.getcolors(2**24) if colour == blue))
    assert counts[0] == 0 < counts[1] < counts[2]
