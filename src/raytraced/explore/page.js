// The page around engine.js: one state, what follows from it, and the address that holds it. Read after the others.

const $ = (id) => document.getElementById(id);
const PACKS = JSON.parse($("models").textContent);
const DRAWING = 280; // pixels of the longer side of the drawing, before it is made small
const BEAT = 900; // milliseconds of a step while it plays
const SLICE = 10; // milliseconds of thinking between two looks at a long text
const FRAME = 17; // milliseconds between two paints
const MOST_BARS = 12;
const MOST_UPLOAD = 20e6;
const percent = (value) =>
  value > 0.9995 && value < 1 ? ">99.9\u00a0%" : `${(100 * value).toFixed(value < 0.0995 || (value >= 0.9945 && value < 1) ? 1 : 0)}\u00a0%`;
const plural = (num, word) => `${num} ${word}${num === 1 ? "" : "s"}`;

// What one sees follows from this; all of it is in the address.
const state = {
  model: 0, input: "", pixels: null, sample: false, seed: 0, budget: null, sure: null, step: null, node: null,
  text: "To be, or not to be, that is the question:", byte: null, block: 0, colour: "count",
};
let model = null, pack = null, gallery = [], found = null, tokens = [], player = null;

function make(tag, attributes = {}, ...children) {
  const svg = ["circle", "path", "g", "text", "rect", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function tell(message) {
  $("message").textContent = message;
}

// ---------------------------------------------------------------- the model and its gallery

let turns = 0;

/** Make a model the one that is shown; false if by then another was asked for. */
async function open(index) {
  const turn = ++turns, wanted = PACKS[index], opened = await openModel(wanted);
  const bytes = wanted.gallery ? await inflate(wanted.gallery.images) : [];
  if (turn !== turns) return false;
  pause();
  clearTimeout(later);
  [pack, model, state.model, state.block] = [wanted, opened, index, 0];
  for (let i = 1; i < bytes.length; i++) bytes[i] += bytes[i - 1]; // packed as differences
  gallery = (pack.gallery?.labels ?? []).map((label, i) => {
    const size = pack.image_shape.reduce((a, b) => a * b, 1), pixels = bytes.subarray(i * size, (i + 1) * size);
    const thought = model.think(pixels);
    return { label, pixels, answer: largest(thought.logits), thought };
  });
  document.body.className = pack.kind === "text" ? "texts" : "images";
  const longest = Math.max(...(pack.classes ?? ["new line"]).map((name) => name.length));
  document.body.style.setProperty("--names", `${0.6 * longest + 1.6}em`);
  if (pack.kind === "image") openImages();
  else openTexts();
  $("budget").max = layerShown().M;
  layOutGrid();
  return true;
}

function layerShown() {
  return pack.kind === "text" ? model.blocks[state.block].layer : model.layer;
}

function openImages() {
  const [channels, height, width] = pack.image_shape, canDraw = channels === 1, scale = DRAWING / Math.max(height, width);
  document.body.classList.toggle("can-draw", canDraw);
  $("pad").width = Math.round(width * scale);
  $("pad").height = Math.round(height * scale);
  $("pad").setAttribute("aria-label", canDraw ? "Drawing" : "The image");
  $("pad-hint").textContent = canDraw
    ? "Draw with the mouse or a finger; with arrow keys, Space puts the pen down. Or drop or paste an image."
    : "Choose a test image; or upload, drop or paste one of your own.";
  const wrong = gallery.filter(({ label, answer }) => label !== answer).length;
  $("gallery-hint").textContent = gallery.length
    ? `Chosen: ${gallery.length - wrong} right, ${wrong} wrong ✗`
    : "None: the data set was not at hand when this page was made.";
  $("gallery").replaceChildren(...gallery.map((_, i) => thumb(i)));
}

/** A button that shows a test image and chooses it. */
function thumb(i) {
  const { label, answer, pixels } = gallery[i], wrong = label !== answer;
  const name = `${pack.classes[label]}${wrong ? `, taken for ${pack.classes[answer]}` : ""}`;
  const canvas = make("canvas");
  paintPixels(canvas, pixels);
  return make("button", {
    type: "button", class: `thumb${wrong ? " wrong" : ""}`, title: name, "aria-label": `Test image ${i + 1}: ${name}`,
    "data-index": i, onclick: () => choose(`g${i}`, pixels),
  }, canvas);
}

function paintPixels(canvas, pixels) {
  const [channels, height, width] = pack.image_shape, size = height * width;
  [canvas.width, canvas.height] = [width, height];
  const image = new ImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = pixels[(channels === 1 ? 0 : c) * size + i];
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** A new image to think about; `drawn` if the pad shows it, as a drawing that strokes are added to. */
function choose(input, pixels, drawn = false) {
  Object.assign(state, { input, pixels: Uint8Array.from(pixels), step: null });
  isDrawing = drawn;
  tell("");
  if (!drawn) showOnPad();
  think();
}

function showOnPad() {
  const small = make("canvas"), context = padContext();
  paintPixels(small, state.pixels);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, $("pad").width, $("pad").height);
}

// ---------------------------------------------------------------- thinking

function think() {
  const options = { sample: state.sample, seed: state.seed, maxExperts: state.budget, sure: state.sure };
  if (pack.kind === "image") {
    found = model.think(state.pixels, options);
    paintPixels($("seen"), state.pixels);
    const chosen = state.input[0] === "g" ? Number(state.input.slice(1)) : null;
    Array.from($("gallery").children, (button, i) => {
      button.setAttribute("aria-pressed", i === chosen);
      button.tabIndex = i === (chosen ?? 0) ? 0 : -1; // one stop for the Tab key, arrows go on
    });
  } else thinkText(options);
  paint();
}

/** The expert that is looked at: the one picked, else the first that is active. */
function nodeShown() {
  return state.node ?? found.nodes[0] ?? 0;
}

function numSteps() {
  return found.states.length - 1;
}

function stepShown() {
  return Math.min(state.step ?? numSteps(), numSteps());
}

function truth() {
  return pack.kind === "image" && state.input[0] === "g" ? gallery[Number(state.input.slice(1))].label : null;
}

function paint() {
  const step = stepShown(), last = numSteps();
  $("step").max = last;
  $("step").value = step;
  $("step").setAttribute("aria-valuetext", `${step} of ${last} experts`);
  $("back").disabled = step === 0;
  $("forth").disabled = step === last;
  $("step-told").textContent = tellStep(step);
  $("budget").value = state.budget ?? layerShown().M;
  const each = pack.kind === "text" ? " in each block" : "";
  $("budget-told").textContent = state.budget === null ? "none" : `at most ${state.budget}${each}`;
  $("sure").value = Math.round(100 * (state.sure ?? 1));
  $("sure-told").textContent = state.sure === null ? "off" : `at ${percent(state.sure)}`;
  $("seed").value = state.seed;
  document.querySelector(`[name=select][value=${state.sample ? "sample" : "greedy"}]`).checked = true;
  paintGrid(step);
  paintAnswer(step);
  paintAccount(step);
  paintWho();
  if (pack.kind === "text") paintBytes();
  writeAddress();
}

function nodeName(node) {
  const { N } = layerShown();
  return `layer ${Math.floor(node / N) + 1}, expert ${(node % N) + 1}`;
}

/** What happens at a step, in a sentence. */
function tellStep(step) {
  const { choice, chances } = found.states[step], { M } = layerShown();
  const ran = step ? `After ${plural(step, "expert")}` : "Before any expert";
  if (step === numSteps() && found.why === "sure") {
    return `The whole path has ${plural(step, "expert")}; ${found.ran.length} of them ran before it was sure.`;
  }
  if (choice === null) return `${ran}. ${tellWhy()}`;
  const how = state.sample ? "drawn with a chance of" : "with the largest chance,";
  const next = choice === M ? "the output node" : nodeName(choice);
  return `${ran}. Next: ${next}, ${how} ${percent(chances[choice])}${choice === M ? "; that ends it" : ""}.`;
}

function tellWhy() {
  const { M } = layerShown(), told = found.states.at(-1).chances[M];
  if (found.why === "sure") {
    const end = found.looks.length - 1, spared = found.nodes.length - found.ran.length;
    const after = end ? `after layer ${end}` : "before any layer";
    return `Stopped when sure ${after}: ${percent(found.looks[end].probability)} ≥ ${percent(state.sure)}. ` +
      `${plural(spared, "expert")} of the path did not run.`;
  }
  if (found.why === "budget") return `Stopped by the budget: ${plural(state.budget, "expert")}.`;
  if (found.why === "all") return "Stopped because every expert is active.";
  return state.sample
    ? `Stopped because the output node was drawn; its chance was ${percent(told)}.`
    : `Stopped because the output node had the largest chance, ${percent(told)}.`;
}

// ---------------------------------------------------------------- steps and dials

function pause() {
  clearInterval(player);
  player = null;
  $("play").textContent = "Play";
}

function go(step) {
  state.step = step >= numSteps() ? null : Math.max(0, step);
  paint();
}

function wireControls() {
  $("play").addEventListener("click", () => {
    if (player) return pause();
    if (stepShown() === numSteps()) go(0);
    $("play").textContent = "Pause";
    player = setInterval(() => {
      go(stepShown() + 1);
      if (stepShown() === numSteps()) pause();
    }, BEAT);
  });
  const byHand = (step) => {
    pause();
    go(step);
  };
  $("back").addEventListener("click", () => byHand(stepShown() - 1));
  $("forth").addEventListener("click", () => byHand(stepShown() + 1));
  $("step").addEventListener("input", () => byHand(Number($("step").value)));
  const change = (values) => {
    pause();
    Object.assign(state, { step: null, ...values });
    think();
  };
  for (const radio of document.getElementsByName("select")) {
    radio.addEventListener("change", () => change({ sample: radio.value === "sample" }));
  }
  const seedOf = (text) => (/^\d{1,10}$/.test(text) ? Math.min(Number(text), 2 ** 32 - 1) : 0);
  $("seed").addEventListener("change", () => change({ seed: seedOf($("seed").value), sample: true }));
  $("another").addEventListener("click", () => change({ seed: (state.seed + 1) % 2 ** 32, sample: true }));
  $("budget").addEventListener("input", () => {
    const most = Number($("budget").value);
    change({ budget: most === layerShown().M ? null : most });
  });
  $("sure").addEventListener("input", () => change({ sure: $("sure").value === "100" ? null : Number($("sure").value) / 100 }));
  $("gallery").addEventListener("keydown", (event) => {
    const all = [...$("gallery").children], columns = all.filter((each) => each.offsetTop === all[0].offsetTop).length;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const to = all[all.indexOf(event.target) + moves[event.key]];
    if (!(event.key in moves)) return;
    event.preventDefault();
    to?.click();
    to?.focus();
  });
  $("who-images").addEventListener("click", () => (state.node = nodeShown()), true); // its images must not exchange it
  $("model").addEventListener("change", () => show(new URLSearchParams({ m: PACKS[$("model").value].name })));
  let size = 0;
  new ResizeObserver(() => {
    if (!found || $("stage").clientWidth === size) return;
    size = $("stage").clientWidth;
    layOutGrid();
    paint();
  }).observe($("stage"));
}

// ---------------------------------------------------------------- the address

function writeAddress() {
  const query = new URLSearchParams({ m: pack.name });
  const isText = pack.kind === "text";
  if (isText) query.set("t", state.text);
  else query.set("i", state.input);
  if (state.sample) query.set("s", state.seed);
  if (state.budget !== null) query.set("b", state.budget);
  if (state.sure !== null && !isText) query.set("u", Math.round(100 * state.sure));
  if (state.step !== null) query.set("k", state.step);
  if (state.node !== null) query.set("n", state.node);
  if (isText) query.set("c", state.byte);
  if (isText && state.block) query.set("l", state.block);
  if (isText && state.colour !== "count") query.set("f", state.colour);
  history.replaceState(null, "", `#${query}`);
}

/** A whole number of the address within bounds, else what is said instead. */
function numberIn(query, key, most, otherwise) {
  const text = query.get(key);
  return /^\d{1,10}$/.test(text ?? "") && Number(text) <= most ? Number(text) : otherwise;
}

/** Show what an address tells; what it does not tell, or tells wrong, is as at first. */
async function show(query) {
  const index = PACKS.findIndex(({ name }) => name === query.get("m"));
  tell(query.get("m") && index < 0 ? `the link is of the model ${query.get("m")}, which this page does not have` : "");
  if (!(await open(Math.max(index, 0)))) return;
  $("model").value = state.model;
  const { M } = layerShown(), sure = numberIn(query, "u", 100, null);
  Object.assign(state, {
    sample: query.has("s"), seed: numberIn(query, "s", 2 ** 32 - 1, 0), budget: numberIn(query, "b", M, null),
    sure: sure === null || pack.kind === "text" ? null : sure / 100, step: numberIn(query, "k", M, null),
    node: numberIn(query, "n", M - 1, null), text: query.get("t") ?? state.text, byte: numberIn(query, "c", 1e6, null),
    colour: query.get("f") === "first" ? "first" : "count",
  });
  if (pack.kind === "text") {
    state.block = numberIn(query, "l", model.blocks.length - 1, 0);
    document.querySelector(`[name=colour][value=${state.colour}]`).checked = true;
    openTexts();
    return think();
  }
  isDrawing = false;
  [state.input, state.pixels] = readInput(query.get("i"));
  showOnPad();
  think();
}

/** An image of the gallery (g and its number) or of one's own (x and its bytes); the hardest that is answered right if it is neither. */
function readInput(input) {
  const size = pack.image_shape.reduce((a, b) => a * b, 1), index = gallery.findLastIndex(({ label, answer }) => label === answer);
  const start = Math.max(index, 0), first = gallery[start]?.pixels ?? new Uint8Array(size);
  if (/^g\d{1,4}$/.test(input ?? "") && gallery[Number(input.slice(1))]) return [input, gallery[Number(input.slice(1))].pixels];
  if (/^x[\w-]*$/.test(input ?? "")) {
    const bytes = fromBase64(input.slice(1));
    if (bytes.length === size) return [input, bytes];
    tell(`the link has an image of ${bytes.length} bytes; ${pack.name} takes ${size}`);
  }
  return [gallery.length ? `g${start}` : `x${toBase64(first)}`, first];
}

// ---------------------------------------------------------------- begin

$("model").append(...PACKS.map(({ name }, i) => make("option", { value: i }, name)));
for (const wire of [wireDrawing, wireFiles, wireText, wireControls, wirePictures]) wire();
addEventListener("hashchange", () => show(new URLSearchParams(location.hash.slice(1))));
show(new URLSearchParams(location.hash.slice(1)));
