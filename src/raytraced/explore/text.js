// A language model's text, each byte in the colour of its experts.

let textFound = [], later = null;
const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const OKABE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

function openTexts() {
  $("text").value = state.text;
  const choices = model.blocks.map((_, b) => make("label", {}, make("input", {
    type: "radio", name: "block", value: b, checked: b === state.block && "checked",
    onchange: () => {
      Object.assign(state, { block: b, step: null, node: null });
      think();
    },
  }), ` ${b + 1}`));
  $("block-choice").replaceChildren(make("legend", {}, "Block"), ...choices);
}

function thinkText(options) {
  const bytes = Array.from(new TextEncoder().encode(state.text));
  tokens = bytes.slice(0, model.context);
  $("text-hint").textContent = bytes.length > tokens.length
    ? `The model looks at ${model.context} bytes; the last ${bytes.length - tokens.length} of these ${bytes.length} are left out.`
    : `${plural(tokens.length, "byte")} of at most ${model.context}. Point at a byte below to see its path.`;
  const given = tokens.length ? tokens : [10]; // as `raytraced generate` begins where there is no text
  textFound = model.think(given, { ...options, milliseconds: SLICE });
  clearTimeout(later);
  if (textFound.length < given.length) later = setTimeout(think, FRAME); // what is known so far is painted first
  if (state.byte === null || state.byte >= given.length) state.byte = given.length - 1;
  const { routes, logits } = textFound[byteShown()];
  found = { ...routes[state.block], logits };
}

/** The byte chosen, or the last that was thought about so far. */
function byteShown() {
  return Math.min(state.byte, textFound.length - 1);
}

/** Characters, each with the place of its last byte. */
function characters() {
  let end = 0;
  return Array.from(state.text, (letter) => ({ letter, byte: (end += new TextEncoder().encode(letter).length) - 1 }))
    .filter(({ byte }) => byte < tokens.length);
}

function viridis(share) {
  const at = share * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((value, c) => Math.round(value + (at - low) * (VIRIDIS[low + 1][c] - value)));
}

/** The colour of each byte and of the ink on it, and what the colours mean. */
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
      of: textFound.map(({ routes }) => (routes[state.block].nodes.length ? of(routes[state.block].nodes[0] % N) : none)),
      legend: Array.from({ length: N }, (_, i) => ({ name: i + 1, ...of(i) })), told: `first expert in block ${state.block + 1}:`,
    };
  }
  const counts = textFound.map(({ routes }) => sum(routes.map(({ nodes }) => nodes.length)));
  const low = Math.min(...counts), high = Math.max(...counts), of = (num) => readable(viridis(high > low ? (num - low) / (high - low) : 0.5));
  const marks = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(low + share * (high - low))))];
  return { of: counts.map(of), legend: marks.map((num) => ({ name: num, ...of(num) })), told: "experts of a byte, all blocks:" };
}

function paintBytes() {
  const { of, legend, told } = colours(), had = document.activeElement?.parentElement === $("bytes");
  const spans = characters().map(({ letter, byte }) => {
    const nodes = textFound[byte]?.routes[state.block].nodes ?? [], isChosen = byte === byteShown();
    const { back, ink } = of[byte] ?? { back: "transparent", ink: "inherit" };
    const span = make("span", {
      role: "button", tabindex: isChosen ? 0 : -1, "aria-pressed": isChosen, class: nodes.includes(state.node) ? "uses" : "", // one that was picked
      "data-byte": byte, "aria-label": `${byteName(letter.codePointAt(0) < 128 ? letter.charCodeAt(0) : 0).replace("byte 0", letter)}: experts ${nodes.map((node) => node + 1).join(", ") || "none"}`,
    }, letter === "\n" ? "⏎\n" : letter);
    Object.assign(span.style, { background: back, color: ink });
    return span;
  });
  $("bytes").replaceChildren(...spans);
  if (had) $("bytes").querySelector("[aria-pressed=true]")?.focus();
  $("ramp").replaceChildren(make("span", {}, told), ...legend.map(({ name, back, ink }) => {
    const mark = make("b", {}, name);
    Object.assign(mark.style, { background: back, color: ink });
    return mark;
  }));
}

function wireText() {
  const show = (byte) => {
    if (byte === state.byte) return;
    Object.assign(state, { byte, step: null });
    think();
  };
  $("text").addEventListener("input", () => {
    Object.assign(state, { text: $("text").value, byte: null, step: null });
    think();
  });
  $("bytes").addEventListener("mouseover", ({ target }) => target.dataset.byte && show(Number(target.dataset.byte)));
  $("bytes").addEventListener("click", ({ target }) => target.dataset.byte && show(Number(target.dataset.byte)));
  $("bytes").addEventListener("keydown", (event) => {
    const next = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    const to = next && event.target[next];
    if (!to) return;
    event.preventDefault();
    show(Number(to.dataset.byte));
  });
  for (const radio of document.getElementsByName("colour")) {
    radio.addEventListener("change", () => {
      state.colour = radio.value;
      paint();
    });
  }
}
