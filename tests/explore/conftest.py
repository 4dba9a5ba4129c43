"""Fixtures: the page in an installed Chromium. A logged error or a request to another address fails the test."""

import os
import shutil

import pytest
import torch

import raytraced as rt
from raytraced.explore.page import make_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
HINT = "Chromium is not installed: apt-get install chromium, or set CHROMIUM to its path"


def wait(page, condition):
    """Wait until a condition holds; the page's security policy forbids `wait_for_function`."""
    for _ in range(500):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{condition}: did not become true")


@pytest.fixture(scope="session")
def models():
    """The shipped digits, a small colour model and a small language model."""
    torch.manual_seed(0)
    small = {"num_experts": 4, "output_logit_offset": 2.0}
    colour = rt.build(
        "mre", image_shape=(3, 16, 16), class_names=["cat", "<b>dog</b>", "</script>"], dim=8, num_layers=2, **small
    ).eval()
    text = rt.build("gpt-mre", dim=16, hidden=12, depth=2, num_heads=2, context=48, **small).eval()
    tiny = {"dim": 8, "hidden": 8, "depth": 2, "num_heads": 2, "context": 48, "num_experts": 3}
    context = rt.build("gpt-mre", routing_input="first-block", **tiny).eval()
    return {"mre-digits": rt.load("mre-digits"), "colours": colour, "plays": text, "context": context}


@pytest.fixture(scope="session")
def html(models, tmp_path_factory):
    """The page of these models, as a file."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(make_page(list(models.items())), encoding="utf-8")
    return path


@pytest.fixture(scope="module")  # while it is open, no other test can run an event loop
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tabs():
    """Unused tabs by the options they were opened with: opening one takes as long as loading a page."""
    return {}


@pytest.fixture
def visit(chromium, html, tabs):
    """visit("#model=…", width=…) opens the page; at the end no page may have logged an error or sent a request."""
    used, faults = [], []

    def report(*fault):
        faults.append(": ".join(fault))

    noted = {
        "console": lambda message: report(message.type, message.text),
        "pageerror": lambda error: report(str(error)),
        "request": lambda request: request.url.startswith(("file:", "data:", "blob:", "about:")) or report(request.url),
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
        wait(page, "result !== null")
        return page

    yield visit
    for page, free in used:
        page.mouse.move(0, 0)
        page.goto("about:blank")
        for event, note in noted.items():
            page.remove_listener(event, note)
        free.append(page)
    assert faults == []
