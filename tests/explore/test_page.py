"""The page in a browser: every control works, and its displays agree with PyTorch."""

import io
import json
import re
import subprocess
import tarfile
import xml.etree.ElementTree
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

import raytraced as rt
from explore.conftest import CHROMIUM, HINT, wait
from explore.engine import inflated

if CHROMIUM is None:  # skip the module: one line in the summary, not one per test
    pytest.skip(HINT, allow_module_level=True)
AXE = "axe-core@4.10.3"


@pytest.fixture(scope="session")
def gallery(html):
    """The test images that the page holds (B, 1, 8, 8), and their labels."""
    packs = json.loads(re.search(r'id="models">(.*?)</script>', html.read_text(), re.DOTALL)[1])
    packed = next(pack for pack in packs if pack["name"] == "mre-digits")["gallery"]
    images = np.cumsum(np.frombuffer(inflated(packed["images"]), np.uint8), dtype=np.uint8)
    return torch.from_numpy(images.reshape(-1, 1, 8, 8)), packed["labels"]


def bars_of(page):
    """The class probabilities on the screen."""
    return [float(text.strip("> %\u00a0")) / 100 for text in page.locator("#bars em").all_inner_texts()]


def label_of(page):
    return page.locator("#label").evaluate("element => element.firstChild.textContent")


def order_of(page):
    """The active nodes in the order of their numbers."""
    texts = page.locator("#grid .node").evaluate_all(
        "nodes => nodes.map(node => node.querySelector('text').textContent)"
    )
    numbered = {int(text): node for node, text in enumerate(texts) if text}
    return [numbered[number] for number in sorted(numbered)]


def draw(page, *points):
    """Draw one stroke through points, in fractions of the pad's sides."""
    box = page.locator("#pad").bounding_box()
    where = [(box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in points]
    page.mouse.move(*where[0])
    page.mouse.down()
    for point in where[1:]:
        page.mouse.move(*point, steps=2)
    page.mouse.up()


def ring(centre_x=0.5, centre_y=0.5, across=0.22, down=0.36):
    angles = np.linspace(0, 2 * np.pi, 11)
    return [(centre_x + across * np.sin(angle), centre_y - down * np.cos(angle)) for angle in angles]


def test_a_drawn_digit_is_read(visit):
    page = visit("#model=mre-digits")
    for digit, strokes in {
        "0": [ring()],
        "1": [[(0.4, 0.25), (0.52, 0.12), (0.52, 0.88)]],
        "4": [[(0.4, 0.12), (0.3, 0.55), (0.75, 0.55)], [(0.62, 0.3), (0.6, 0.9)]],
    }.items():
        page.click("#clear")
        for points in strokes:
            draw(page, *points)
        assert label_of(page) == digit


def test_a_stroke_after_a_test_image_begins_a_new_drawing(visit):
    page, pixels = visit("#model=mre-digits&image=g0"), "Array.from(state.pixels)"
    draw(page, *ring())
    zero = page.evaluate(pixels)
    page.locator("#gallery .thumb").nth(5).click()
    draw(page, *ring())
    assert page.evaluate(pixels) == zero


def test_every_step_is_that_of_pytorch(visit, models, gallery):
    model, (images, labels) = models["mre-digits"], gallery
    image = len(images) - 1  # the hardest
    page = visit(f"#model=mre-digits&image=g{image}")
    steps = list(rt.anytime(model, images[image : image + 1]))
    nodes = [node for node in model(images[image : image + 1]).routes[0].nodes[0].tolist() if node >= 0]
    assert len(nodes) > 2
    while page.locator("#back").is_enabled():
        page.click("#back")
    for number in range(len(nodes) + 1):
        assert order_of(page) == nodes[:number]
        probs = steps[number].logits.softmax(-1)[0]
        assert bars_of(page) == pytest.approx(probs.tolist(), abs=0.0051)
        assert label_of(page) == str(int(probs.argmax()))
        if number < len(nodes):
            assert page.locator("#grid .node.next").get_attribute("data-node") == str(nodes[number])
            page.click("#forward")
    assert page.locator("#forward").is_disabled()
    assert "wrong" in page.inner_text("#label")
    assert str(labels[image]) in page.inner_text("#label .wrong")


def test_hovering_over_a_node_shows_its_rate_and_its_probability(visit, models, gallery):
    page = visit("#model=mre-digits&image=g3&step=0")
    entry = models["mre-digits"].layer.router.entry(models["mre-digits"].input_block(gallery[0][3:4]))[0].detach()
    node = int(entry.argmax())
    page.hover(f"[data-node='{node}']")
    line = page.inner_text("#readout")
    assert line.startswith(f"Layer 1, expert {node + 1}: firing rate {float(entry[node]):.3f}")
    assert "it is next" in line


def test_seeds_sample_different_sequences_and_a_seed_the_same_again(visit):
    page = visit("#model=mre-digits&image=g12")
    page.check("[name=select][value=sample]")
    first, orders = order_of(page), []
    for seed in (1, 2, 3):
        page.click("#next-seed")
        orders.append(order_of(page))
        assert f"seed={seed}" in page.url
    assert len({str(order) for order in orders}) > 1
    page.fill("#seed", "0")
    page.press("#seed", "Enter")
    assert order_of(page) == first
    page.check("[name=select][value=greedy]")
    assert "seed=" not in page.url


def test_the_budget_and_the_confidence_change_the_answer(visit, models, gallery):
    model, (images, _) = models["mre-digits"], gallery
    page = visit("#model=mre-digits&image=g20")
    for budget in (0, 1, 3):
        page.locator("#budget").fill(str(budget))
        out = model(images[20:21], max_experts=budget)
        assert len(order_of(page)) == int(out.num_experts)
        assert bars_of(page) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=0.0051)
        assert "budget" in page.inner_text("#end")
    page.locator("#budget").fill(page.locator("#budget").get_attribute("max"))
    assert page.inner_text("#budget-text") == "no limit"
    num_early = 0
    for confidence in (20, 50, 80):
        page.locator("#confidence").fill(str(confidence))
        out = model(images[20:21], confidence=confidence / 100)
        assert bars_of(page) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=0.0051)
        assert page.inner_text("#cost tbody tr:first-child td") == str(int(out.num_experts))
        num_early += "Early exit" in page.inner_text("#end")
    assert num_early


def expected_stop(place):
    """The value of stop at a place of the slider, to three digits."""
    return float(f"{16 * 2 ** (-place / 4):.3g}")


@torch.no_grad()
def test_the_stop_changes_the_experts_of_images_as_in_pytorch(visit, models, gallery):
    model, (images, _) = models["mre-digits"], gallery
    page, nums = visit("#model=mre-digits&image=g20"), []
    own = page.locator("#stop").input_value()
    rows = model.card.dial["rows"]
    for place in ("0", "10", "24", "40"):
        page.locator("#stop").fill(place)
        out = model(images[20:21], stop=expected_stop(int(place)))
        assert order_of(page) == [node for node in out.routes[0].nodes[0].tolist() if node >= 0]
        assert bars_of(page) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=0.0051)
        assert f"stop={expected_stop(int(place)):g}" in page.url
        nums.append(int(out.num_experts))
        exact = [row["experts"] for row in rows if row["stop"] == expected_stop(int(place))]
        assert [f"· {num:.1f} experts" in page.inner_text("#stop-text") for num in exact] == [True] * len(exact)
    assert nums[0] < nums[-1]
    other = visit(f"#{page.url.partition('#')[2]}")
    assert order_of(other) == order_of(page)
    assert other.inner_text("#stop-text") == page.inner_text("#stop-text")
    page.locator("#stop").fill(own)
    assert "(own)" in page.inner_text("#stop-text")
    assert "stop=" not in page.url
    assert order_of(page) == [node for node in model(images[20:21]).routes[0].nodes[0].tolist() if node >= 0]


@torch.no_grad()
def test_the_table_of_paths_is_that_of_the_model_under_any_budget_and_stop(visit, models):
    model, page = models["plays"], visit("#model=plays")
    page.fill("#text", "to be\nto be")
    wait(page, "textResults.length === 11")

    def rows():
        return page.locator("#table-rows tbody tr").evaluate_all(
            "all => all.map(row => [Number(row.dataset.row), ...[...row.children].map(cell => cell.textContent.trim())])"
        )

    def expected(tokens, **options):
        paths = model.paths(**options)
        steps = [" ".join(f"{block + 1}:{expert + 1}" for block, expert in path) for path in paths.steps()]
        return [(token, int(paths.num_active[token]), steps[token]) for token in tokens]

    def shown():
        return [(token, int(num), path) for token, _, num, path in rows()]

    assert shown() == expected(list(dict.fromkeys(b"to be\nto be")))
    assert [name for _, name, *_ in rows()] == ["t", "o", "space", "b", "e", "new line"]
    page.hover("#bytes span[data-byte='3']")
    assert page.locator("#table-rows .now").get_attribute("data-row") == str(ord("b"))
    page.check("[name=rows][value=all]")
    assert shown() == expected(range(256))
    assert "rows=all" in page.url
    page.hover("#bytes span[data-byte='0']")
    page.hover("#bytes span[data-byte='3']")
    box, row = (page.locator(each).bounding_box() for each in ("#table-rows", "#table-rows .now"))
    assert box["y"] < row["y"] < row["y"] + row["height"] <= box["y"] + box["height"]
    page.locator("#budget").fill("2")
    page.locator("#stop").fill("30")
    assert shown() == expected(range(256), max_experts=2, stop=expected_stop(30))
    page.locator("#grid .node").nth(order_of(page)[0]).click()
    marked = page.locator("#table-rows b").all_inner_texts()
    assert set(marked) == {f"1:{order_of(page)[0] % 4 + 1}"}
    num = page.evaluate("new Set(model.paths({ maxExperts: 2, stop: state.stop }).map(String)).size")
    assert f"256 bytes have {num} different paths" in page.inner_text("#table-hint")
    page.check("[name=select][value=sample]")
    assert "The table is greedy" in page.inner_text("#table-hint")


def test_a_model_whose_path_depends_on_the_text_has_no_table(visit):
    page = visit("#model=context")
    assert "depends on the text before a byte" in page.inner_text("#table-hint")
    assert not page.locator("#table-rows").is_visible()
    assert page.locator("[name=rows]").first.is_disabled()
    assert not visit("#model=mre-digits").locator("#table").is_visible()


def test_a_file_that_is_not_an_image_is_refused_in_a_sentence(visit, tmp_path):
    page = visit("#model=mre-digits&image=g4")
    before = page.inner_text("#answer")
    (tmp_path / "broken.png").write_text("not a picture")
    page.set_input_files("#file", tmp_path / "broken.png")
    wait(page, "document.getElementById('message').textContent !== ''")
    assert (
        page.inner_text("#message") == "broken.png: is not an image that this browser can read; choose a PNG or a JPEG"
    )
    assert page.inner_text("#answer") == before
    assert not page.locator("#tagline").is_visible()
    page.locator("#gallery .thumb").nth(2).click()  # the message is about the last input alone
    assert page.inner_text("#message") == ""
    assert page.locator("#tagline").is_visible()


def test_a_language_model_refuses_a_file(visit, tmp_path):
    (tmp_path / "own.png").write_bytes(b"")
    page = visit("#model=plays")
    page.set_input_files("#file", tmp_path / "own.png")
    wait(page, "document.getElementById('message').textContent !== ''")
    assert page.inner_text("#message") == "own.png: plays reads text; type it instead"


def test_an_uploaded_image_is_answered_as_by_pytorch(visit, models, gallery, tmp_path):
    page, colours = visit("#model=colours"), models["colours"]
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "own.png")
    page.set_input_files("#file", tmp_path / "own.png")
    probs = colours(torch.from_numpy(pixels).permute(2, 0, 1)[None]).logits.softmax(-1)[0]
    wait(page, "state.pixels[0] !== 0")
    assert bars_of(page) == pytest.approx(probs.tolist(), abs=0.0051)
    assert label_of(page) == ["cat", "<b>dog</b>", "</script>"][int(probs.argmax())]


def test_a_negative_is_inverted_and_images_can_be_pasted_and_dropped(visit, gallery):
    page, digit = visit("#model=mre-digits"), gallery[0][2, 0].numpy()
    content = io.BytesIO()
    Image.fromarray(255 - digit).save(content, "PNG")
    for kind, target in (("paste", "clipboardData"), ("drop", "dataTransfer")):
        page.click("#clear")
        page.evaluate(
            """([kind, target, bytes]) => {
                const transfer = new DataTransfer();
                transfer.items.add(new File([new Uint8Array(bytes)], "negative.png", { type: "image/png" }));
                const event = new Event(kind, { bubbles: true, cancelable: true });
                Object.defineProperty(event, target, { value: transfer });
                document.body.dispatchEvent(event);
            }""",
            [kind, target, list(content.getvalue())],
        )
        wait(page, "state.pixels.some(Boolean)")
        assert page.evaluate("Array.from(state.pixels)") == digit.ravel().tolist()
        assert "is inverted" in page.inner_text("#message")


def test_a_link_restores_the_display(visit):
    page = visit("#model=mre-digits")
    draw(page, *ring())
    page.check("[name=select][value=sample]")
    page.click("#next-seed")
    page.locator("#budget").fill("5")
    page.click("#back")
    page.click("[data-node='9']")
    other = visit(f"#{page.url.partition('#')[2]}")
    for part in ("#answer", "#step-text", "#usage", "#budget-text"):
        assert other.inner_text(part) == page.inner_text(part)
    assert order_of(other) == order_of(page)


@pytest.mark.parametrize(
    "address",
    [
        "#model=gone",
        "#image=g99999&step=-1&budget=x&seed=1e9&confidence=200&node=777&stop=-1",
        "#model=plays&stop=1e99&rows=some",
        "#model=mre-digits&image=xAAAA",
        "#model=mre-digits&image=xA",
        "#&&=",
        "#model=plays&byte=9&block=7",
    ],
)
def test_a_bad_link_still_shows_something(visit, address):
    page = visit(address)
    assert label_of(page)
    if "gone" in address or "image=x" in address:
        assert page.inner_text("#message").startswith("The link")


def test_every_control_works_with_the_keyboard(visit):
    page = visit("#model=mre-digits&image=g0")
    focused = []
    for _ in range(80):
        page.keyboard.press("Tab")
        focused.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset.node || document.activeElement.className"
            )
        )
    assert {
        "model",
        "pad",
        "clear",
        "upload",
        "play",
        "back",
        "step",
        "seed",
        "next-seed",
        "budget",
        "stop",
        "confidence",
        "save-png",
    } <= set(focused)
    page.focus("#pad")  # a stroke down the middle
    page.keyboard.press("Space")
    for _ in range(10):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert label_of(page) == "1"
    page.focus("#step")
    before = len(order_of(page))
    page.keyboard.press("ArrowLeft")
    assert len(order_of(page)) == before - 1
    page.focus("#grid .node[tabindex='0']")
    first = int(page.evaluate("document.activeElement.dataset.node"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.node") == str(first + 8)
    assert page.inner_text("#usage-name") == f"Layer {(first + 8) // 8 + 1}, expert {first % 8 + 1}"


def test_the_tab_key_stops_once_at_the_test_images_and_arrow_keys_select_one(visit):
    page = visit("#model=mre-digits&image=g0")
    assert page.locator("#gallery [tabindex='0']").count() == 1
    page.focus("#gallery [tabindex='0']")
    for key, chosen in (("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("ArrowDown", 5), ("ArrowUp", 0)):
        page.keyboard.press(key)
        assert f"image=g{chosen}&" in page.url + "&"
        assert page.evaluate("document.activeElement.dataset.index") == str(chosen)
        assert page.locator("#gallery [tabindex='0']").get_attribute("data-index") == str(chosen)
    page.click("#clear")
    assert page.locator("#gallery [tabindex='0']").count() == 1


def test_play_advances_by_itself_and_pauses(visit):
    page = visit("#model=mre-digits&image=g10&step=0", height=899)  # a separate tab: the clock stays installed in it
    page.clock.install()
    page.click("#play")
    page.clock.run_for(1900)
    assert len(order_of(page)) == 2
    assert page.inner_text("#play") == "Pause"
    page.click("#play")
    page.clock.run_for(5000)
    assert len(order_of(page)) == 2
    page.click("#play")
    page.clock.run_for(60_000)
    assert page.locator("#forward").is_disabled()
    assert page.inner_text("#play") == "Play"


def test_models_can_be_changed_faster_than_they_open(visit):
    page = visit("#model=plays")
    for number in (0, 1, 2, 1, 0):
        page.evaluate(f"() => {{ $('model').value = {number}; $('model').dispatchEvent(new Event('change')) }}")
    wait(page, "pack.name === 'mre-digits' && $('gallery').children.length > 0")
    assert page.locator("#bars .bar").count() == 10
    page.select_option("#model", label="colours")
    wait(page, "pack.name === 'colours'")
    assert page.locator("#bars .bar").count() == 3
    assert "model=colours" in page.url


@pytest.mark.parametrize(
    "address", ["#model=mre-digits", pytest.param("#model=colours", marks=pytest.mark.slow), "#model=plays"]
)
def test_a_phone_is_wide_enough(visit, address):
    page = visit(address, width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = page.locator("section").evaluate_all(
        "all => all.map(one => { const b = one.getBoundingClientRect(); return [b.left, b.right] })"
    )
    assert all(left >= 0 and right <= 360 for left, right in boxes)


PARTS = list(product(("#model=mre-digits", "#model=colours", "#model=plays"), (360, 900, 1200, 1920)))
QUICK = [PARTS[0], PARTS[2], PARTS[5], PARTS[8], PARTS[11]]  # every address and every width


@pytest.mark.parametrize(
    ("address", "width"), [pytest.param(*part, marks=() if part in QUICK else pytest.mark.slow) for part in PARTS]
)
def test_no_panel_overflows(visit, address, width):
    page = visit(address, width=width)
    over = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.id)"
    assert page.locator("section").evaluate_all(over) == []
    left = "(name) => document.querySelector(name).getBoundingClientRect().left"
    assert page.evaluate(left, "header") == page.evaluate(left, "main")
    assert page.locator("#seed").bounding_box()["y"] == pytest.approx(
        page.locator("#next-seed").bounding_box()["y"], abs=1
    )


def test_a_narrow_page_shows_the_answer_beside_the_drawing_too(visit):
    narrow, wide = visit("#model=mre-digits", width=360), visit("#model=mre-digits")
    draw(narrow, *ring())
    assert narrow.locator("#near-answer").is_visible()
    assert (
        narrow.locator("#near-answer").evaluate("element => element.firstChild.textContent") == label_of(narrow) == "0"
    )
    assert not wide.locator("#near-answer").is_visible()


@pytest.mark.parametrize("width", [360, *(pytest.param(n, marks=pytest.mark.slow) for n in (768, 1100)), 1280])
def test_steps_and_sliders_move_no_panel(visit, width):
    page = visit("#model=mre-digits&image=g23", width=width)
    tops = """() => [...document.querySelectorAll("section, .transport, #bars, #chart, #cost, #budget")]
        .filter((one) => one.id !== "usage").map((one) => one.getBoundingClientRect().top + scrollY)"""
    places = set()
    for step in range(int(page.locator("#step").get_attribute("max")) + 1):
        page.locator("#step").fill(str(step))
        page.locator("#grid .node").first.hover()
        places.add(json.dumps(page.evaluate(tops)))
    for dial, values in (("#confidence", (30, 60, 90)), ("#stop", (0, 16, 37)), ("#budget", (0, 1, 10))):
        for value in values:
            page.locator(dial).fill(str(value))
            places.add(json.dumps(page.evaluate(tops)))
    assert len(places) == 1


def test_light_dark_and_less_motion(visit):
    colour = "() => getComputedStyle(document.body).backgroundColor"
    moves = "() => getComputedStyle(document.querySelector('.node .fill')).transitionDuration"
    light, dark = visit(color_scheme="light"), visit(color_scheme="dark", reduced_motion="reduce")
    assert (light.evaluate(colour), dark.evaluate(colour)) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
    assert light.evaluate(moves) != "0s"
    assert dark.evaluate(moves) == "0s"


@pytest.mark.parametrize("address", ["#model=mre-digits", "#model=plays"])
def test_the_picture_can_be_saved(visit, address, tmp_path):
    page = visit(address)
    with page.expect_download() as svg:
        page.click("#save-svg")
    svg.value.save_as(tmp_path / "saved.svg")
    drawing = xml.etree.ElementTree.fromstring((tmp_path / "saved.svg").read_text())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in (tmp_path / "saved.svg").read_text()
    with page.expect_download() as png:
        page.click("#save-png")
    png.value.save_as(tmp_path / "saved.png")
    with Image.open(tmp_path / "saved.png") as image:
        assert image.width == 2 * round(float(drawing.get("width")))
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10


@pytest.mark.parametrize(
    "address", ["#model=mre-digits&step=2", "#model=mre-digits&image=g20&confidence=50", "#model=plays"]
)
def test_no_text_of_the_picture_is_cut_off(visit, address):
    page = visit(address, width=360)
    rights = page.evaluate("""() => {
        const frame = new DOMParser().parseFromString(picture(), "image/svg+xml").documentElement;
        document.body.append(frame);
        const { right } = frame.getBoundingClientRect();
        return [...frame.querySelectorAll("text")].map((one) => right - one.getBoundingClientRect().right);
    }""")
    assert len(rights) > 3
    assert min(rights) >= 0


def test_a_text_is_coloured_by_what_pytorch_runs(visit, models):
    page, text = visit("#model=plays"), "Oh, söme\ntext"
    page.fill("#text", text)
    tokens = list(text.encode())
    wait(page, f"textResults.length === {len(tokens)}")
    with torch.no_grad():
        out = models["plays"](torch.tensor([tokens]))
    route = [[node for node in row if node >= 0] for row in out.routes[0].nodes[0].tolist()]
    labels = page.locator("#bytes span").evaluate_all(
        "all => all.map(one => [Number(one.dataset.byte), one.getAttribute('aria-label')])"
    )
    assert len(labels) == len(text)
    for byte, label in labels:
        assert label.partition(": experts ")[2] == (", ".join(str(node + 1) for node in route[byte]) or "none")
    page.hover("#bytes span[data-byte='2']")
    assert order_of(page) == route[2]
    assert page.inner_text("#label small").startswith("predicted after “,”")
    page.fill("#text", "x" * 60)
    assert "reads 48 bytes; the last 12" in page.inner_text("#text-hint")


def test_the_usage_of_an_expert_is_shown_per_class(visit, html):
    page = visit("#model=mre-digits&image=g0&node=2")
    packs = json.loads(re.search(r'id="models">(.*?)</script>', html.read_text(), re.DOTALL)[1])
    shares = [row[2] / 1000 for row in packs[0]["gallery"]["shares"]]
    shown = page.locator("#usage-classes em").all_inner_texts()
    assert [float(text.strip("> %\u00a0")) / 100 for text in shown] == pytest.approx(shares, abs=0.0051)
    page.locator("#usage-images .thumb").first.click()
    assert 2 in order_of(page)


def test_the_usage_of_the_first_expert_is_shown_until_one_is_picked(visit):
    page = visit("#model=mre-digits")
    firsts = set()
    for image in range(0, 24, 4):
        page.locator("#gallery .thumb").nth(image).click()
        firsts.add(order_of(page)[0])
        assert page.inner_text("#usage-name") == f"Layer 1, expert {order_of(page)[0] + 1}"
        assert page.locator("#grid .chosen").get_attribute("data-node") == str(order_of(page)[0])
    assert len(firsts) > 1
    name = page.inner_text("#usage-name")
    for image in range(3):  # selecting an image of the expert does not replace the expert
        page.locator("#usage-images .thumb").nth(image).click()
        assert page.inner_text("#usage-name") == name


def test_bytes_are_underlined_for_an_expert_that_was_picked(visit):
    page = visit("#model=plays")
    assert page.locator("#bytes .uses").count() == 0
    page.locator("[data-node]").nth(order_of(page)[0]).click()
    assert page.locator("#bytes .uses").count() > 0
    page.click("#back")
    assert page.inner_text("#end") == "The answer uses all experts of all blocks."


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"{AXE} cannot be downloaded: npm is not installed, or does not reach its registry")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize(
    ("scheme", "address"),
    [
        ("light", "#model=mre-digits&image=g23&step=2"),
        pytest.param("dark", "#model=mre-digits&image=g22&confidence=60&budget=4", marks=pytest.mark.slow),
        ("dark", "#model=plays&colour=first"),
        pytest.param("dark", "#model=mre-digits&image=g23&step=2", marks=pytest.mark.slow),
        pytest.param("light", "#model=mre-digits&image=g22&confidence=60&budget=4", marks=pytest.mark.slow),
        pytest.param("light", "#model=plays&colour=first", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_serious_accessibility_fault(visit, axe, scheme, address):
    page = visit(address, color_scheme=scheme)
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(({ violations }) => violations)")
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []
