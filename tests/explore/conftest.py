"""An installed Chromium with a page in it: nothing that the page does may be logged as an error, or leave the machine."""

import os
import shutil

import pytest
import torch

import raytraced as rt
from raytraced.explore.page import make_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
HINT = "no Chromium is installed: apt-get install chromium, or name its file with CHROMIUM=…"


def wait(page, condition):
    """Until a condition holds; the page's own rules forbid `wait_for_function` to evaluate texts."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{condition}: does not come true")


@pytest.fixture(scope="session")
def models():
    """The shipped digits, a small colour model and a small language model."""
    torch.manual_seed(0)
    small = {"num_layers": 2, "num_experts": 4, "reach": 2.0}
    colour = rt.build(
        "mre", image_shape=(3, 16, 16), class_names=["cat", "<b>dog</b>", "</script>"], dim=8, **small
    ).eval()
    text = rt.build("gpt-mre", dim=16, hidden=12, depth=2, num_heads=2, context=48, **small).eval()
    return {"mre-digits": rt.load("mre-digits"), "colours": colour, "plays": text}


@pytest.fixture(scope="session")
def html(models, tmp_path_factory):
    """The page of these models, as a file."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(make_page(list(models.items())), encoding="utf-8")
    return path


@pytest.fixture(scope="module")  # while it is there, nobody else can run an event loop
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tabs():
    """Tabs that no test is using, by what they were opened with: another takes as long as a whole page."""
    return {}


@pytest.fixture
def visit(chromium, html, tabs):
    """visit("#m=…", width=…) opens the page; in the end no page has logged an error or asked for anything elsewhere."""
    used, faults = [], []

    def tell(*fault):
        faults.append(": ".join(fault))

    noted = {
        "console": lambda message: tell(message.type, message.text),
        "pageerror": lambda error: tell(str(error)),
        "request": lambda request: request.url.startswith(("file:", "data:", "blob:", "about:")) or tell(request.url),
    }

    def visit(address="", width=1280, height=900, **options):
        options |= {"viewport": {"width": width, "height": height}}
        free = tabs.setdefault(repr(options), [])
        page = free.pop() if free else chromium.new_context(**options).new_page()
        used.append((page, free))
        page.set_default_timeout(10_000)
        for event, note in noted.items():
            page.on(event, note)
        page.goto(f"{html.as_uri()}{address}")
        wait(page, "found !== null")
        return page

    yield visit
    for page, free in used:
        page.mouse.move(0, 0)
        page.goto("about:blank")
        for event, note in noted.items():
            page.remove_listener(event, note)
        free.append(page)
    assert faults == []
