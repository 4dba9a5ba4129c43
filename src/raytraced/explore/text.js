// The text of a language model; the colour of a byte shows its experts.

let textResults = [], nextSlice = null; // results of the bytes so far; the timer that continues them
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const OKABE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

function openTexts() {
  $("text").value = state.text;
}

/** Run the text, as much as fits into a slice of time; the rest follows after a paint. */
function updateText(options) {
  const bytes = Array.from(new TextEncoder().encode(state.text));
  tokens = bytes.slice(0, model.context);
  $("text-hint").textContent = bytes.length > tokens.length
    ? `The model reads ${model.context} bytes; the last ${bytes.length - tokens.length} of these ${bytes.length} are left out.`
    : `${plural(tokens.length, "byte")} of at most ${model.context}. Point at a byte below to see its experts.`;
  const inputs = tokens.length ? tokens : [10]; // an empty text starts with a new line, as in `raytraced generate`
  textResults = model.run(inputs, { ...options, milliseconds: SLICE_MS });
  clearTimeout(nextSlice);
  if (textResults.length < inputs.length) nextSlice = setTimeout(update, FRAME_MS);
  if (state.byte === null || state.byte >= inputs.length) state.byte = inputs.length - 1;
  const { route, logits } = textResults[byteShown()];
  result = { ...route, logits };
}

/** The byte chosen, or the last one computed so far. */
function byteShown() {
  return Math.min(state.byte, textResults.length - 1);
}

/** Characters, each with the index of its last byte. */
function characters() {
  let end = 0;
  return Array.from(state.text, (letter) => ({ letter, byte: (end += new TextEncoder().encode(letter).length) - 1 }))
    .filter(({ byte }) => byte < tokens.length);
}

function viridis(share) {
  const at = share * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((value, c) => Math.round(value + (at - low) * (VIRIDIS[low + 1][c] - value)));
}

/** The colours of each byte (background and ink), their legend and its caption. */
function colours() {
  // black ink where it has the higher contrast: above a relative luminance of 0.18
  const light = (value) => ((value / 255 + 0.055) / 1.055) ** 2.4;
  const ink = ([r, g, b]) => (0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b) > 0.18 ? "#000" : "#fff");
  const readable = (rgb) => ({ back: `rgb(${rgb.join(", ")})`, ink: ink(rgb) });
  if (state.colour === "first") {
    const hex = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    const of = (expert) => readable(hex(OKABE[expert % OKABE.length]));
    const { N } = layerShown(), none = { back: "transparent", ink: "inherit" };
    return {
      of: textResults.map(({ route }) => (route.nodes.length ? of(route.nodes[0] % N) : none)),
      legend: Array.from({ length: N }, (_, i) => ({ name: i + 1, ...of(i) })), caption: "first expert:",
    };
  }
  const counts = textResults.map(({ route }) => route.nodes.length);
  const low = Math.min(...counts), high = Math.max(...counts), of = (num) => readable(viridis(high > low ? (num - low) / (high - low) : 0.5));
  const marks = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(low + share * (high - low))))];
  return { of: counts.map(of), legend: marks.map((num) => ({ name: num, ...of(num) })), caption: "number of experts, all blocks:" };
}

function paintBytes() {
  const { of, legend, caption } = colours(), hadFocus = document.activeElement?.parentElement === $("bytes");
  const spans = characters().map(({ letter, byte }) => {
    const nodes = textResults[byte]?.route.nodes ?? [], isChosen = byte === byteShown();
    const { back, ink } = of[byte] ?? { back: "transparent", ink: "inherit" };
    const span = make("span", {
      role: "button", tabindex: isChosen ? 0 : -1, "aria-pressed": isChosen, class: nodes.includes(state.node) ? "uses" : "",
      "data-byte": byte, "aria-label": `${byteName(letter.codePointAt(0) < 128 ? letter.charCodeAt(0) : 0).replace("byte 0", letter)}: experts ${nodes.map((node) => node + 1).join(", ") || "none"}`,
    }, letter === "\n" ? "⏎\n" : letter);
    Object.assign(span.style, { background: back, color: ink });
    return span;
  });
  $("bytes").replaceChildren(...spans);
  if (hadFocus) $("bytes").querySelector("[aria-pressed=true]")?.focus();
  $("ramp").replaceChildren(make("span", {}, caption), ...legend.map(({ name, back, ink }) => {
    const mark = make("b", {}, name);
    Object.assign(mark.style, { background: back, color: ink });
    return mark;
  }));
}

// ---------------------------------------------------------------- the table of paths

let pathTable = { key: "", paths: null }; // of the model, the budget and the stop shown
let byteInView = null; // the byte whose row was scrolled into view

/** The path of every byte, computed once for a budget and a stop; null where it depends on the text. */
function pathsShown() {
  const limits = { maxExperts: state.budget, stop: state.stop }, key = JSON.stringify([state.model, limits]);
  if (pathTable.key !== key) pathTable = { key, paths: model.paths(limits) };
  return pathTable.paths;
}

function paintTable() {
  const paths = pathsShown(), { N } = layerShown(), byteNow = tokens[byteShown()];
  $("table-rows").hidden = !paths;
  for (const radio of document.getElementsByName("rows")) radio.disabled = !paths;
  if (!paths) {
    $("table-hint").textContent = "This model's path depends on the text before a byte, so there is no table of paths.";
    return;
  }
  const shown = state.rows === "all" ? Array.from(paths.keys()) : [...new Set(tokens)], { size } = new Set(paths.map(String));
  const drawn = state.sample ? " The table is greedy; drawn paths differ from place to place." : "";
  $("table-hint").textContent = `A byte's path is known before the model runs, whatever the text is: the ${paths.length} bytes ` +
    `have ${size} different paths.${drawn}`;
  const step = (node) => {
    const name = `${Math.floor(node / N) + 1}:${(node % N) + 1}`;
    return [node === state.node ? make("b", {}, name) : name, " "];
  };
  $("table-rows").querySelector("tbody").replaceChildren(...shown.map((byte) => make("tr", {
    class: byte === byteNow ? "now" : "", "data-row": byte,
  }, make("th", { scope: "row" }, byteName(byte)), make("td", {}, paths[byte].length), make("td", {}, ...paths[byte].flatMap(step)))));
  if (byteNow !== byteInView) $("table-rows").scrollTop = ($("table-rows").querySelector(".now")?.offsetTop ?? 0) - 80;
  byteInView = byteNow;
}

function wireText() {
  const showByte = (byte) => {
    if (byte === state.byte) return;
    Object.assign(state, { byte, step: null });
    update();
  };
  $("text").addEventListener("input", () => {
    Object.assign(state, { text: $("text").value, byte: null, step: null });
    update();
  });
  $("bytes").addEventListener("mouseover", ({ target }) => target.dataset.byte && showByte(Number(target.dataset.byte)));
  $("bytes").addEventListener("click", ({ target }) => target.dataset.byte && showByte(Number(target.dataset.byte)));
  $("bytes").addEventListener("keydown", (event) => {
    const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    const to = next && event.target[next];
    if (!to) return;
    event.preventDefault();
    showByte(Number(to.dataset.byte));
  });
  for (const radio of document.getElementsByName("rows")) {
    radio.addEventListener("change", () => {
      state.rows = radio.value;
      paint();
    });
  }
  for (const radio of document.getElementsByName("colour")) {
    radio.addEventListener("change", () => {
      state.colour = radio.value;
      paint();
    });
  }
}
