"""The page in a browser: what a reader does and reads, compared with PyTorch."""

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

if CHROMIUM is None:  # the module, not each test: that is one line in the summary
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
    """The nodes that carry a number, in its order."""
    texts = page.locator("#grid .node").evaluate_all(
        "nodes => nodes.map(node => node.querySelector('text').textContent)"
    )
    numbered = {int(text): node for node, text in enumerate(texts) if text}
    return [numbered[number] for number in sorted(numbered)]


def draw(page, *points):
    """One stroke through points in parts of the pad."""
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
    page = visit("#m=mre-digits")
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
    page, pixels = visit("#m=mre-digits&i=g0"), "Array.from(state.pixels)"
    draw(page, *ring())
    zero = page.evaluate(pixels)
    page.locator("#gallery .thumb").nth(5).click()
    draw(page, *ring())
    assert page.evaluate(pixels) == zero


def test_every_step_is_that_of_pytorch(visit, models, gallery):
    model, (images, labels) = models["mre-digits"], gallery
    image = len(images) - 1  # the hardest
    page = visit(f"#m=mre-digits&i=g{image}")
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
            page.click("#forth")
    assert page.locator("#forth").is_disabled()
    assert "wrong" in page.inner_text("#label")
    assert str(labels[image]) in page.inner_text("#label .wrong")


def test_hovering_tells_a_rate_and_a_chance(visit, models, gallery):
    page = visit("#m=mre-digits&i=g3&k=0")
    entry = models["mre-digits"].layer.router.entry(models["mre-digits"].input_block(gallery[0][3:4]))[0].detach()
    node = int(entry.argmax())
    page.hover(f"[data-node='{node}']")
    told = page.inner_text("#readout")
    assert told.startswith(f"Layer 1, expert {node + 1}: firing rate {float(entry[node]):.3f}")
    assert "it is next" in told


def test_drawn_sequences_are_those_of_pytorch(visit, models, gallery):
    page = visit("#m=mre-digits&i=g12")
    page.check("[name=select][value=sample]")
    for seed in (1, 2, 3):
        page.click("#another")
        generator = torch.Generator().manual_seed(seed)
        out = models["mre-digits"](gallery[0][12:13], select="sample", generator=generator)
        assert order_of(page) == [node for node in out.routes[0].nodes[0].tolist() if node >= 0]
        assert f"s={seed}" in page.url


def test_the_budget_and_sure_change_the_answer(visit, models, gallery):
    model, (images, _) = models["mre-digits"], gallery
    page = visit("#m=mre-digits&i=g20")
    for budget in (0, 1, 3):
        page.locator("#budget").fill(str(budget))
        out = model(images[20:21], max_experts=budget)
        assert len(order_of(page)) == int(out.num_experts)
        assert bars_of(page) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=0.0051)
        assert "budget" in page.inner_text("#why")
    page.locator("#budget").fill(page.locator("#budget").get_attribute("max"))
    assert page.inner_text("#budget-told") == "none"
    stopped = 0
    for sure in (20, 50, 80):
        page.locator("#sure").fill(str(sure))
        out = model(images[20:21], sure=sure / 100)
        assert bars_of(page) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=0.0051)
        assert page.inner_text("#account tbody tr:first-child td") == str(int(out.num_experts))
        stopped += "when sure" in page.inner_text("#why")
    assert stopped


def test_a_file_that_is_no_image_is_refused_in_a_sentence(visit, tmp_path):
    page = visit("#m=mre-digits&i=g4")
    before = page.inner_text("#answer")
    (tmp_path / "broken.png").write_text("not a picture")
    page.set_input_files("#file", tmp_path / "broken.png")
    wait(page, "document.getElementById('message').textContent !== ''")
    assert page.inner_text("#message") == "broken.png: is not an image that this browser can read; give a PNG or a JPEG"
    assert page.inner_text("#answer") == before
    assert not page.locator("#tagline").is_visible()
    page.locator("#gallery .thumb").nth(2).click()  # the next input is not at fault
    assert page.inner_text("#message") == ""
    assert page.locator("#tagline").is_visible()


def test_a_file_is_nothing_to_a_language_model(visit, tmp_path):
    (tmp_path / "own.png").write_bytes(b"")
    page = visit("#m=plays")
    page.set_input_files("#file", tmp_path / "own.png")
    wait(page, "document.getElementById('message').textContent !== ''")
    assert page.inner_text("#message") == "own.png: plays reads text; type it"


def test_an_uploaded_image_is_answered_as_by_pytorch(visit, models, gallery, tmp_path):
    page, colours = visit("#m=colours"), models["colours"]
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "own.png")
    page.set_input_files("#file", tmp_path / "own.png")
    probs = colours(torch.from_numpy(pixels).permute(2, 0, 1)[None]).logits.softmax(-1)[0]
    wait(page, "state.pixels[0] !== 0")
    assert bars_of(page) == pytest.approx(probs.tolist(), abs=0.0051)
    assert label_of(page) == ["cat", "<b>dog</b>", "</script>"][int(probs.argmax())]


def test_a_negative_is_turned_round_and_pasting_and_dropping_are_uploads(visit, gallery):
    page, digit = visit("#m=mre-digits"), gallery[0][2, 0].numpy()
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
        assert "looked inverted" in page.inner_text("#message")


def test_a_link_shows_what_one_saw(visit):
    page = visit("#m=mre-digits")
    draw(page, *ring())
    page.check("[name=select][value=sample]")
    page.click("#another")
    page.locator("#budget").fill("5")
    page.click("#back")
    page.click("[data-node='9']")
    other = visit(f"#{page.url.partition('#')[2]}")
    for part in ("#answer", "#step-told", "#who", "#budget-told"):
        assert other.inner_text(part) == page.inner_text(part)
    assert order_of(other) == order_of(page)


@pytest.mark.parametrize(
    "address", ["#m=gone", "#i=g99999&k=-1&b=x&s=1e9&u=200&n=777", "#m=mre-digits&i=xAAAA", "#&&=", "#m=plays&c=9&l=7"]
)
def test_a_bad_link_still_shows_something(visit, address):
    page = visit(address)
    assert label_of(page)
    if "gone" in address or "xAAAA" in address:
        assert page.inner_text("#message").startswith("the link")


def test_everything_can_be_done_with_the_keyboard(visit):
    page = visit("#m=mre-digits&i=g0")
    seen = []
    for _ in range(80):
        page.keyboard.press("Tab")
        seen.append(
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
        "another",
        "budget",
        "sure",
        "save-png",
    } <= set(seen)
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
    assert page.inner_text("#who-name") == f"Layer {(first + 8) // 8 + 1}, expert {first % 8 + 1}"


def test_test_images_are_one_stop_and_arrows_choose_among_them(visit):
    page = visit("#m=mre-digits&i=g0")
    assert page.locator("#gallery [tabindex='0']").count() == 1
    page.focus("#gallery [tabindex='0']")
    for key, chosen in (("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("ArrowDown", 5), ("ArrowUp", 0)):
        page.keyboard.press(key)
        assert f"i=g{chosen}&" in page.url + "&"
        assert page.evaluate("document.activeElement.dataset.index") == str(chosen)
        assert page.locator("#gallery [tabindex='0']").get_attribute("data-index") == str(chosen)
    page.click("#clear")
    assert page.locator("#gallery [tabindex='0']").count() == 1


def test_play_goes_on_by_itself_and_pauses(visit):
    page = visit("#m=mre-digits&i=g10&k=0", height=899)  # a tab of its own: it keeps the clock
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
    assert page.locator("#forth").is_disabled()
    assert page.inner_text("#play") == "Play"


def test_models_can_be_changed_faster_than_they_open(visit):
    page = visit("#m=plays")
    for number in (0, 1, 2, 1, 0):
        page.evaluate(f"() => {{ $('model').value = {number}; $('model').dispatchEvent(new Event('change')) }}")
    wait(page, "pack.name === 'mre-digits' && $('gallery').children.length > 0")
    assert page.locator("#bars .bar").count() == 10
    page.select_option("#model", label="colours")
    wait(page, "pack.name === 'colours'")
    assert page.locator("#bars .bar").count() == 3
    assert "m=colours" in page.url


@pytest.mark.parametrize("address", ["#m=mre-digits", "#m=colours", "#m=plays"])
def test_a_phone_is_wide_enough(visit, address):
    page = visit(address, width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = page.locator("section").evaluate_all(
        "all => all.map(one => { const b = one.getBoundingClientRect(); return [b.left, b.right] })"
    )
    assert all(left >= 0 and right <= 360 for left, right in boxes)


PARTS = list(product(("#m=mre-digits", "#m=colours", "#m=plays"), (360, 900, 1200, 1920)))
QUICK = [PARTS[0], PARTS[2], PARTS[5], PARTS[8], PARTS[11]]  # every address and every width


@pytest.mark.parametrize(
    ("address", "width"), [pytest.param(*part, marks=() if part in QUICK else pytest.mark.slow) for part in PARTS]
)
def test_every_part_is_as_wide_as_what_it_holds(visit, address, width):
    page = visit(address, width=width)
    over = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.id)"
    assert page.locator("section").evaluate_all(over) == []
    left = "(name) => document.querySelector(name).getBoundingClientRect().left"
    assert page.evaluate(left, "header") == page.evaluate(left, "main")
    assert page.locator("#seed").bounding_box()["y"] == pytest.approx(
        page.locator("#another").bounding_box()["y"], abs=1
    )


def test_the_answer_stands_beside_the_drawing_where_it_would_be_below_the_fold(visit):
    narrow, wide = visit("#m=mre-digits", width=360), visit("#m=mre-digits")
    draw(narrow, *ring())
    assert narrow.locator("#says").is_visible()
    assert narrow.locator("#says").evaluate("element => element.firstChild.textContent") == label_of(narrow) == "0"
    assert not wide.locator("#says").is_visible()


@pytest.mark.parametrize("width", [360, *(pytest.param(n, marks=pytest.mark.slow) for n in (768, 1100)), 1280])
def test_nothing_jumps_while_one_steps_or_turns_a_dial(visit, width):
    page = visit("#m=mre-digits&i=g23", width=width)
    tops = """() => [...document.querySelectorAll("section, .transport, #bars, #chart, #account, #budget")]
        .filter((one) => one.id !== "who").map((one) => one.getBoundingClientRect().top + scrollY)"""
    places = set()
    for step in range(int(page.locator("#step").get_attribute("max")) + 1):
        page.locator("#step").fill(str(step))
        page.locator("#grid .node").first.hover()
        places.add(json.dumps(page.evaluate(tops)))
    for dial, values in (("#sure", (30, 60, 90)), ("#budget", (0, 1, 10))):
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


@pytest.mark.parametrize("address", ["#m=mre-digits", "#m=plays"])
def test_the_picture_can_be_kept(visit, address, tmp_path):
    page = visit(address)
    with page.expect_download() as svg:
        page.click("#save-svg")
    svg.value.save_as(tmp_path / "kept.svg")
    drawing = xml.etree.ElementTree.fromstring((tmp_path / "kept.svg").read_text())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in (tmp_path / "kept.svg").read_text()
    with page.expect_download() as png:
        page.click("#save-png")
    png.value.save_as(tmp_path / "kept.png")
    with Image.open(tmp_path / "kept.png") as image:
        assert image.width == 2 * round(float(drawing.get("width")))
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10


@pytest.mark.parametrize("address", ["#m=mre-digits&k=2", "#m=mre-digits&i=g20&u=50", "#m=plays"])
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
    page, text = visit("#m=plays"), "Oh, söme\ntext"
    page.fill("#text", text)
    tokens = list(text.encode())
    wait(page, f"textFound.length === {len(tokens)}")
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
    assert page.inner_text("#label small").startswith("comes after ,")
    page.locator("[name=block]").nth(1).check()
    assert order_of(page) == [node for node in out.routes[1].nodes[0, 2].tolist() if node >= 0]
    page.fill("#text", "x" * 60)
    assert "looks at 48 bytes; the last 12" in page.inner_text("#text-hint")


def test_a_node_tells_who_uses_it(visit, html):
    page = visit("#m=mre-digits&i=g0&n=2")
    packs = json.loads(re.search(r'id="models">(.*?)</script>', html.read_text(), re.DOTALL)[1])
    shares = [row[2] / 1000 for row in packs[0]["gallery"]["shares"]]
    shown = page.locator("#who-classes em").all_inner_texts()
    assert [float(text.strip("> %\u00a0")) / 100 for text in shown] == pytest.approx(shares, abs=0.0051)
    page.locator("#who-images .thumb").first.click()
    assert 2 in order_of(page)


def test_the_first_expert_is_looked_at_until_one_is_picked(visit):
    page = visit("#m=mre-digits")
    firsts = set()
    for image in range(0, 24, 4):
        page.locator("#gallery .thumb").nth(image).click()
        firsts.add(order_of(page)[0])
        assert page.inner_text("#who-name") == f"Layer 1, expert {order_of(page)[0] + 1}"
        assert page.locator("#grid .chosen").get_attribute("data-node") == str(order_of(page)[0])
    assert len(firsts) > 1
    name = page.inner_text("#who-name")
    for image in range(3):  # an image of the expert's does not put another expert in its place
        page.locator("#who-images .thumb").nth(image).click()
        assert page.inner_text("#who-name") == name


def test_bytes_are_underlined_for_an_expert_that_was_picked(visit):
    page = visit("#m=plays")
    assert page.locator("#bytes .uses").count() == 0
    page.locator("[data-node]").nth(order_of(page)[0]).click()
    assert page.locator("#bytes .uses").count() > 0
    page.click("#back")
    assert page.inner_text("#why") == "The answer is that of all experts in all blocks."


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(["npm", "pack", AXE], cwd=folder, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"{AXE} cannot be had: npm is not installed, or does not reach its registry")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize(
    ("scheme", "address"),
    [
        ("light", "#m=mre-digits&i=g23&k=2"),
        ("dark", "#m=mre-digits&i=g22&u=60&b=4"),
        ("light", "#m=plays&f=first"),
        pytest.param("dark", "#m=mre-digits&i=g23&k=2", marks=pytest.mark.slow),
        pytest.param("light", "#m=mre-digits&i=g22&u=60&b=4", marks=pytest.mark.slow),
        pytest.param("dark", "#m=plays&f=first", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_serious_fault(visit, axe, scheme, address):
    page = visit(address, color_scheme=scheme)
    page.evaluate(axe)
    found = page.evaluate("axe.run().then(({ violations }) => violations)")
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert serious == []
