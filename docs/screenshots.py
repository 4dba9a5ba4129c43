"""Record the README's animation of the page in a browser: `make screenshots`."""

import os
import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import raytraced as rt
from raytraced.explore.page import make_page

HERE = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1200, "height": 880}
SHOWN = (900, 660)
COLOURS = 96
FOUR = [[(0.42, 0.12), (0.33, 0.34), (0.28, 0.55), (0.52, 0.55), (0.78, 0.55)], [(0.62, 0.3), (0.61, 0.6), (0.6, 0.9)]]


def film(page: Page) -> list[tuple[Image.Image, int]]:
    """Draw a four, step through its experts, then let a hard test image exit early: frames and their milliseconds."""
    frames: list[tuple[Image.Image, int]] = []

    def take(milliseconds: int) -> None:
        page.wait_for_timeout(350)  # until nothing moves
        picture = Image.open(BytesIO(page.screenshot())).convert("RGB").resize(SHOWN, Image.Resampling.LANCZOS)
        frames.append((picture, milliseconds))

    page.click("#clear")
    take(500)
    box = page.locator("#pad").bounding_box()
    assert box is not None
    for stroke in FOUR:
        for number, (x, y) in enumerate(stroke):
            page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y, steps=2)
            if number == 0:
                page.mouse.down()
            elif number % 2 == 0:
                take(250)
        page.mouse.up()
    page.locator("#step").fill("0")
    take(900)
    while page.locator("#forward").is_enabled():
        page.click("#forward")
        take(400)
    take(1500)
    page.locator("#gallery .thumb:not(.wrong)").last.click()
    take(1500)
    for confidence in (90, 75, 60):
        page.locator("#confidence").fill(str(confidence))
        take(900)
    take(2000)
    return frames


def main() -> None:
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium, or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        html = Path(folder) / "page.html"
        html.write_text(make_page([("mre-digits", rt.load("mre-digits"))]), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(html.as_uri())
        page.wait_for_timeout(1000)
        frames = film(page)
        browser.close()
    # one palette for all: colours must not flicker
    strip = Image.new("RGB", (SHOWN[0], SHOWN[1] * 3))
    for number, index in enumerate((0, len(frames) // 2, len(frames) - 1)):
        strip.paste(frames[index][0], (0, SHOWN[1] * number))
    palette = strip.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3)  # else greys turn blue
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture, _ in frames]
    times = [milliseconds for _, milliseconds in frames]
    path = HERE / "explore.gif"
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=times, loop=0, optimize=True)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
