// The page around engine.js: the state, the display of the state, and the address that stores it. Loaded after the other scripts.

const $ = (id) => document.getElementById(id);
const PACKS = JSON.parse($("models").textContent);
const DRAWING = 280; // pixels of the longer side of the drawing, before it is scaled down
const STEP_MS = 900; // of each step while the sequence plays
const SLICE_MS = 10; // of computing between two updates of a long text
const FRAME_MS = 17; // between two paints
const MAX_BARS = 12;
const MOST_STOP = 16; // the left end of the slider; a step to the right divides by the fourth root of 2
const STOP_STEPS = 52;
const MAX_UPLOAD = 20e6; // bytes
const percent = (value) =>
  value > 0.9995 && value < 1 ? ">99.9\u00a0%" : `${(100 * value).toFixed(value < 0.0995 || (value >= 0.9945 && value < 1) ? 1 : 0)}\u00a0%`;
const plural = (num, word) => `${num} ${word}${num === 1 ? "" : "s"}`;
const capitalized = (text) => text[0].toUpperCase() + text.slice(1);

// The display depends on this alone, and the address stores all of it.
const state = {
  model: 0, input: "", pixels: null, sample: false, seed: 0, budget: null, stop: null, confidence: null, step: null,
  node: null, text: "To be, or not to be, that is the question:", byte: null, colour: "count", rows: "text",
};
let model = null, pack = null, gallery = [], result = null, tokens = [], player = null;

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

function showMessage(message) {
  $("message").textContent = message;
}

// ---------------------------------------------------------------- the model and its gallery

let numRequests = 0;

/** Show a model; false if another one was requested before it was ready. */
async function open(index) {
  const request = ++numRequests, requested = PACKS[index], opened = await openModel(requested);
  const bytes = requested.gallery ? await inflate(requested.gallery.images) : [];
  if (request !== numRequests) return false;
  pause();
  clearTimeout(nextSlice);
  [pack, model, state.model] = [requested, opened, index];
  for (let i = 1; i < bytes.length; i++) bytes[i] += bytes[i - 1]; // packed as differences
  gallery = (pack.gallery?.labels ?? []).map((label, i) => {
    const size = numPixels(), pixels = bytes.subarray(i * size, (i + 1) * size);
    const answered = model.run(pixels);
    return { label, pixels, answer: largest(answered.logits), final: answered.states.at(-1) };
  });
  document.body.className = pack.kind === "text" ? "texts" : "images";
  const longest = Math.max(...(pack.classes ?? ["new line"]).map((name) => name.length));
  document.body.style.setProperty("--names", `${0.6 * longest + 1.6}em`);
  if (pack.kind === "image") openImages();
  else openTexts();
  $("budget").max = layerShown().M;
  $("stop").max = STOP_STEPS;
  layOutGrid();
  return true;
}

function layerShown() {
  return model.layer;
}

/** The bytes of an image: channels × height × width. */
function numPixels() {
  return pack.image_shape.reduce((a, b) => a * b, 1);
}

function openImages() {
  const [channels, height, width] = pack.image_shape, canDraw = channels === 1, scale = DRAWING / Math.max(height, width);
  document.body.classList.toggle("can-draw", canDraw);
  $("pad").width = Math.round(width * scale);
  $("pad").height = Math.round(height * scale);
  $("pad").setAttribute("aria-label", canDraw ? "Drawing" : "The image");
  $("pad-hint").textContent = canDraw
    ? "Draw with the mouse, a finger or the arrow keys (Space lowers and lifts the pen). You can also drop or paste an image."
    : "Choose a test image, or upload, drop or paste your own image.";
  const numWrong = gallery.filter(({ label, answer }) => label !== answer).length;
  $("gallery-hint").textContent = gallery.length
    ? `${gallery.length - numWrong} answered correctly, ${numWrong} wrong (✗).`
    : "None: this page was made without the data set.";
  $("gallery").replaceChildren(...gallery.map((_, i) => thumb(i)));
}

/** A button that shows a test image and selects it. */
function thumb(i) {
  const { label, answer, pixels } = gallery[i], wrong = label !== answer;
  const name = `${pack.classes[label]}${wrong ? `, classified as ${pack.classes[answer]}` : ""}`;
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

/** Run a new image; `drawn` if the pad already shows it, as a drawing that strokes are added to. */
function choose(input, pixels, drawn = false) {
  Object.assign(state, { input, pixels: Uint8Array.from(pixels), step: null });
  isDrawing = drawn;
  showMessage("");
  if (!drawn) showOnPad();
  update();
}

function showOnPad() {
  const small = make("canvas"), context = padContext();
  paintPixels(small, state.pixels);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, $("pad").width, $("pad").height);
}

// ---------------------------------------------------------------- run the model, show the result

/** The index of the test image shown, null for another image. */
function galleryIndex() {
  return state.input[0] === "g" ? Number(state.input.slice(1)) : null;
}

function update() {
  const options = { sample: state.sample, seed: state.seed, maxExperts: state.budget, stop: state.stop, confidence: state.confidence };
  if (pack.kind === "image") {
    result = model.run(state.pixels, options);
    paintPixels($("model-input"), state.pixels);
    const chosen = galleryIndex();
    Array.from($("gallery").children, (button, i) => {
      button.setAttribute("aria-pressed", i === chosen);
      button.tabIndex = i === (chosen ?? 0) ? 0 : -1; // the Tab key stops once, arrow keys move on
    });
  } else updateText(options);
  paint();
}

/** The expert whose usage is shown: the one picked, else the first that is active. */
function nodeShown() {
  return state.node ?? result.nodes[0] ?? 0;
}

function numSteps() {
  return result.states.length - 1;
}

function stepShown() {
  return Math.min(state.step ?? numSteps(), numSteps());
}

/** The label of the test image shown, null for another image or a text. */
function trueLabel() {
  return pack.kind === "image" && galleryIndex() !== null ? gallery[galleryIndex()].label : null;
}

function paint() {
  const step = stepShown(), last = numSteps();
  $("step").max = last;
  $("step").value = step;
  $("step").setAttribute("aria-valuetext", `${step} of ${last} experts`);
  $("back").disabled = step === 0;
  $("forward").disabled = step === last;
  $("step-text").textContent = describeStep(step);
  $("budget").value = state.budget ?? layerShown().M;
  $("budget-text").textContent = state.budget === null ? "no limit" : `at most ${plural(state.budget, "expert")}`;
  $("stop").value = stopPlace(state.stop ?? ownStop());
  $("stop-text").textContent = describeStop();
  $("stop").setAttribute("aria-valuetext", $("stop-text").textContent);
  $("confidence").value = Math.round(100 * (state.confidence ?? 1));
  $("confidence-text").textContent = state.confidence === null ? "off" : percent(state.confidence);
  $("seed").value = state.seed;
  document.querySelector(`[name=select][value=${state.sample ? "sample" : "greedy"}]`).checked = true;
  paintGrid(step);
  paintAnswer(step);
  paintCost(step);
  paintUsage();
  if (pack.kind === "text") {
    paintBytes();
    paintTable();
  }
  writeAddress();
}

/** The model's own stop as a number; a rule without one, "drawn", weights the output node by 1. */
function ownStop() {
  const { stop } = layerShown().options;
  return typeof stop === "number" ? stop : 1;
}

/** The place of a value of stop on the slider, which is logarithmic. */
function stopPlace(stop) {
  return Math.max(0, Math.min(STOP_STEPS, Math.round(4 * Math.log2(MOST_STOP / stop))));
}

/** The value of stop at a place of the slider; null at the place of the model's own. */
function stopAt(place) {
  return place === stopPlace(ownStop()) ? null : Number((MOST_STOP * 2 ** (-place / 4)).toPrecision(3));
}

/** The value of stop, and the mean number of experts that the model's card has for it. */
function describeStop() {
  const own = layerShown().options.stop, stop = state.stop ?? own, mean = meanExperts(state.stop ?? ownStop());
  const value = typeof stop === "number" ? stop.toPrecision(2).replace(/\.?0+$/, "") : `“${stop}”`;
  return `${value}${state.stop === null ? " (own)" : ""}${mean === null ? "" : ` · ${mean.toFixed(1)} experts`}`;
}

/** Mean experts at a value of stop, between the rows of the card's table (stop, experts); null without a table. */
function meanExperts(stop) {
  const rows = pack.dial, next = rows.findIndex(([each]) => each <= stop);
  if (!rows.length || next === 0 || next < 0) return rows.length ? rows.at(next)[1] : null;
  const [[high, few], [low, many]] = [rows[next - 1], rows[next]];
  return few + ((many - few) * Math.log(high / stop)) / Math.log(high / low);
}

function nodeName(node) {
  const { N } = layerShown();
  return `${pack.kind === "text" ? "block" : "layer"} ${Math.floor(node / N) + 1}, expert ${(node % N) + 1}`;
}

/** A sentence about a step. */
function describeStep(step) {
  const { choice, probs } = result.states[step], { M } = layerShown();
  if (step === numSteps() && result.ended === "confidence") {
    return `The sequence has ${plural(step, "expert")}; ${result.ran.length} ran before the early exit.`;
  }
  const done = step ? `After ${plural(step, "expert")}` : "Before the first expert";
  if (choice === null) return `${done}. ${describeEnd()}`;
  const rule = state.sample ? "drawn with probability" : "the most probable candidate,";
  const next = choice === M ? "the output node" : nodeName(choice);
  return `${done}. Next: ${next}, ${rule} ${percent(probs[choice])}${choice === M ? "; this ends the sequence" : ""}.`;
}

/** A sentence about what ended the sequence. */
function describeEnd() {
  const { M } = layerShown(), prob = result.states.at(-1).probs[M];
  if (result.ended === "confidence") {
    const taken = result.exits.length - 1, numSaved = result.nodes.length - result.ran.length;
    const where = taken ? `after layer ${taken}` : "before layer 1";
    return `Early exit ${where}: confidence ${percent(result.exits[taken].confidence)} ≥ ${percent(state.confidence)}. ` +
      `${plural(numSaved, "expert")} of the sequence did not run.`;
  }
  if (result.ended === "budget") return `Stopped by the budget: ${plural(state.budget, "expert")}.`;
  if (result.ended === "all") return "Stopped because every expert is active.";
  return state.sample
    ? `Stopped because the output node was drawn, with probability ${percent(prob)}.`
    : `Stopped because the output node was the most probable candidate, ${percent(prob)}.`;
}

// ---------------------------------------------------------------- controls

function pause() {
  clearInterval(player);
  player = null;
  $("play").textContent = "Play";
}

function goToStep(step) {
  state.step = step >= numSteps() ? null : Math.max(0, step);
  paint();
}

/** Change some options and run the model again. */
function change(values) {
  pause();
  Object.assign(state, { step: null, ...values });
  update();
}

function wireSteps() {
  $("play").addEventListener("click", () => {
    if (player) return pause();
    if (stepShown() === numSteps()) goToStep(0);
    $("play").textContent = "Pause";
    player = setInterval(() => {
      goToStep(stepShown() + 1);
      if (stepShown() === numSteps()) pause();
    }, STEP_MS);
  });
  const stepByHand = (step) => {
    pause();
    goToStep(step);
  };
  $("back").addEventListener("click", () => stepByHand(stepShown() - 1));
  $("forward").addEventListener("click", () => stepByHand(stepShown() + 1));
  $("step").addEventListener("input", () => stepByHand(Number($("step").value)));
}

function wireOptions() {
  for (const radio of document.getElementsByName("select")) {
    radio.addEventListener("change", () => change({ sample: radio.value === "sample" }));
  }
  const readSeed = (text) => (/^\d{1,10}$/.test(text) ? Math.min(Number(text), 2 ** 32 - 1) : 0);
  $("seed").addEventListener("change", () => change({ seed: readSeed($("seed").value), sample: true }));
  $("next-seed").addEventListener("click", () => change({ seed: (state.seed + 1) % 2 ** 32, sample: true }));
  $("budget").addEventListener("input", () => {
    const limit = Number($("budget").value);
    change({ budget: limit === layerShown().M ? null : limit });
  });
  $("stop").addEventListener("input", () => change({ stop: stopAt(Number($("stop").value)) }));
  $("confidence").addEventListener("input", () => {
    const threshold = Number($("confidence").value);
    change({ confidence: threshold === 100 ? null : threshold / 100 });
  });
}

function wireGallery() {
  $("gallery").addEventListener("keydown", (event) => {
    const all = [...$("gallery").children], columns = all.filter((each) => each.offsetTop === all[0].offsetTop).length;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    if (!(event.key in moves)) return;
    const to = all[all.indexOf(event.target) + moves[event.key]];
    event.preventDefault();
    to?.click();
    to?.focus();
  });
  // an image of the expert shown must not replace that expert
  $("usage-images").addEventListener("click", () => (state.node = nodeShown()), true);
}

function wirePage() {
  $("model").addEventListener("change", () => show(new URLSearchParams({ model: PACKS[$("model").value].name })));
  let size = 0;
  new ResizeObserver(() => {
    if (!result || $("stage").clientWidth === size) return;
    size = $("stage").clientWidth;
    layOutGrid();
    paint();
  }).observe($("stage"));
}

// ---------------------------------------------------------------- the address

function writeAddress() {
  const query = new URLSearchParams({ model: pack.name }), isText = pack.kind === "text";
  if (isText) query.set("text", state.text);
  else query.set("image", state.input);
  if (state.sample) query.set("seed", state.seed);
  if (state.budget !== null) query.set("budget", state.budget);
  if (state.stop !== null) query.set("stop", state.stop);
  if (state.confidence !== null && !isText) query.set("confidence", Math.round(100 * state.confidence));
  if (state.step !== null) query.set("step", state.step);
  if (state.node !== null) query.set("node", state.node);
  if (isText) query.set("byte", state.byte);
  if (isText && state.colour !== "count") query.set("colour", state.colour);
  if (isText && state.rows !== "text") query.set("rows", state.rows);
  history.replaceState(null, "", `#${query}`);
}

/** A whole number of the address, `otherwise` if there is none or it is above the limit. */
function numberIn(query, key, limit, otherwise) {
  const text = query.get(key);
  return /^\d{1,10}$/.test(text ?? "") && Number(text) <= limit ? Number(text) : otherwise;
}

/** The stop of the address; null if there is none, or none that the slider has. */
function stopIn(query) {
  const stop = Number(query.get("stop") || NaN);
  return stop >= MOST_STOP * 2 ** (-STOP_STEPS / 4) && stop <= MOST_STOP ? stop : null;
}

/** Show what an address describes; entries that are missing or wrong take their defaults. */
async function show(query) {
  const requested = query.get("model"), index = PACKS.findIndex(({ name }) => name === requested);
  showMessage(requested && index < 0 ? `The link names the model ${requested}, which is not in this page.` : "");
  if (!(await open(Math.max(index, 0)))) return;
  $("model").value = state.model;
  const { M } = layerShown(), threshold = numberIn(query, "confidence", 100, null);
  Object.assign(state, {
    sample: query.has("seed"), seed: numberIn(query, "seed", 2 ** 32 - 1, 0), budget: numberIn(query, "budget", M, null),
    stop: stopIn(query),
    confidence: threshold === null || pack.kind === "text" ? null : threshold / 100,
    step: numberIn(query, "step", M, null), node: numberIn(query, "node", M - 1, null),
    text: query.get("text") ?? state.text, byte: numberIn(query, "byte", 1e6, null),
    colour: query.get("colour") === "first" ? "first" : "count",
    rows: query.get("rows") === "all" ? "all" : "text",
  });
  if (pack.kind === "text") {
    document.querySelector(`[name=colour][value=${state.colour}]`).checked = true;
    document.querySelector(`[name=rows][value=${state.rows}]`).checked = true;
    openTexts();
    return update();
  }
  isDrawing = false;
  [state.input, state.pixels] = readInput(query.get("image"));
  showOnPad();
  update();
}

/** The image of an address: of the gallery (g and its index) or given by its bytes (x and base 64). Without either, the
 *  hardest test image that is answered correctly. */
function readInput(input) {
  const index = gallery.findLastIndex(({ label, answer }) => label === answer), start = Math.max(index, 0);
  const first = gallery[start]?.pixels ?? new Uint8Array(numPixels());
  if (/^g\d{1,4}$/.test(input ?? "") && gallery[Number(input.slice(1))]) return [input, gallery[Number(input.slice(1))].pixels];
  if (/^x[\w-]*$/.test(input ?? "")) {
    const bytes = fromBase64(input.slice(1));
    if (bytes?.length === numPixels()) return [input, bytes];
    showMessage(`The link holds an image that is not ${numPixels()} bytes long, the size that ${pack.name} takes.`);
  }
  return [gallery.length ? `g${start}` : `x${toBase64(first)}`, first];
}

// ---------------------------------------------------------------- start

$("model").append(...PACKS.map(({ name }, i) => make("option", { value: i }, name)));
for (const wire of [wireDrawing, wireFiles, wireText, wireSteps, wireOptions, wireGallery, wirePictures, wirePage]) wire();
addEventListener("hashchange", () => show(new URLSearchParams(location.hash.slice(1))));
show(new URLSearchParams(location.hash.slice(1)));
