// The grid of experts: its layout, its colours, and the line that describes a node.

let places = null; // coordinates of the nodes, the entry gate and the output node
let nodeElements = [];

function layOutGrid() {
  const { L, N, M } = layerShown(), stage = $("stage"), wide = stage.clientWidth >= 480;
  const left = wide ? 58 : 16, gap = Math.max(26, ((stage.clientWidth || 600) - left - 4) / N);
  const radius = Math.min(22, gap * 0.4), drop = Math.min(92, Math.max(64, gap * 1.15));
  const width = left + gap * N + 4, centre = left + (gap * N) / 2;
  places = Array.from({ length: M }, (_, node) => ({
    x: left + gap * ((node % N) + 0.5), y: 46 + drop * (Math.floor(node / N) + 0.8),
  }));
  places.entry = { x: centre, y: 20 };
  places.output = { x: centre, y: 46 + drop * (L + 0.8) };
  Object.assign(places, { radius, width, height: places.output.y + 44 });
  const svg = $("grid");
  svg.setAttribute("viewBox", `0 0 ${width} ${places.height}`);
  svg.setAttribute("width", width);
  svg.setAttribute("height", places.height);
  const rows = Array.from({ length: L }, (_, l) =>
    make("text", { class: "row", x: 0, y: places[l * N].y }, wide ? `${pack.kind === "text" ? "block" : "layer"} ${l + 1}` : `${l + 1}`));
  const gate = make("g", {}, make("rect", { class: "gate", x: centre - 52, y: 8, width: 104, height: 24, rx: 6 }),
    make("text", { class: "mark", x: centre, y: 20.5 }, "entry gate"));
  nodeElements = [...places, places.output].map((place, node) => {
    const element = make("g", {
      class: "node", role: "button", tabindex: -1, "data-node": node,
      onclick: () => pick(node), onmouseenter: () => readOut(node), onfocus: () => readOut(node),
    });
    for (const kind of ["ring", "body", "fill"]) {
      element.append(make("circle", { class: kind, cx: place.x, cy: place.y, r: kind === "ring" ? radius + 5 : radius }));
    }
    element.append(make("text", { x: place.x, y: place.y }));
    return element;
  });
  const under = make("text", { class: "mark", x: centre + radius + 12, y: places.output.y, style: "text-anchor: start" }, "output node");
  svg.replaceChildren(make("g", { id: "rays" }), ...rows, gate, under, ...nodeElements);
  svg.onkeydown = moveFocus;
  svg.onmouseleave = () => readOut(null);
}

/** Arrow keys move the focus over the nodes, Enter picks one. */
function moveFocus(event) {
  const { N, M } = layerShown(), node = Number(event.target.dataset.node);
  const to = { ArrowLeft: node - 1, ArrowRight: node + 1, ArrowUp: node === M ? M - N : node - N, ArrowDown: Math.min(M, node + N) };
  if (event.key === "Enter" || event.key === " ") pick(node);
  else if (!(event.key in to)) return;
  else if (nodeElements[to[event.key]]) {
    nodeElements.forEach((element) => element.setAttribute("tabindex", -1));
    nodeElements[to[event.key]].setAttribute("tabindex", 0);
    nodeElements[to[event.key]].focus();
  }
  event.preventDefault();
}

function pick(node) {
  if (node === layerShown().M) return;
  state.node = node;
  paint();
}

function paintGrid(step) {
  const { N, M } = layerShown(), now = result.states[step], order = result.nodes.slice(0, step), rays = [];
  const isLast = step === numSteps(), { radius, entry, output } = places;
  const ray = (from, to, amount, bend = false) => {
    if (amount < 0.002) return;
    const middle = (from.y + to.y) / 2;
    const way = bend ? `C${from.x} ${middle} ${to.x} ${middle} ` : "L", d = `M${from.x} ${from.y}${way}${to.x} ${to.y}`;
    rays.push(make("path", { class: "ray", d, "stroke-width": Math.max(0.5, amount * radius * 0.9).toFixed(2) }));
  };
  result.entry.forEach((amount, i) => ray(entry, places[i], amount));
  now.sent.forEach((sends, node) => sends?.forEach((amount, outlet) => {
    if (outlet === N) ray(places[node], output, amount, true);
    else ray(places[node], places[(Math.floor(node / N) + 1) * N + outlet], amount);
  }));
  $("rays").replaceChildren(...rays);
  const focused = nodeElements.findIndex((element) => element.getAttribute("tabindex") === "0");
  nodeElements.forEach((element, node) => {
    const active = node < M && now.active[node], prob = now.probs[node], rate = node === M ? now.output : now.nodes[node];
    const idle = active && isLast && !(result.ran ?? result.nodes).includes(node);
    const classes = ["node", active && "active", !active && prob >= 0.0005 && "candidate", idle && "idle",
      now.choice === node && "next", nodeShown() === node && "chosen"];
    element.setAttribute("class", classes.filter(Boolean).join(" "));
    element.querySelector(".fill").setAttribute("r", (radius * Math.sqrt(Math.min(1, rate))).toFixed(2));
    element.querySelector("text").textContent = active ? order.indexOf(node) + 1 : "";
    element.setAttribute("aria-label", describeNode(node, step));
    if (focused < 0) element.setAttribute("tabindex", node === nodeShown() ? 0 : -1);
  });
  readOut(nodePointedAt);
}

let nodePointedAt = null; // by the mouse or the focus

/** The line below the grid: it describes a node, or says how to choose one. */
function readOut(node) {
  nodePointedAt = node;
  $("readout").textContent = node === null ? "Point at a node to read its firing rate and its probability." : describeNode(node, stepShown());
}

function describeNode(node, step) {
  const { M } = layerShown(), now = result.states[step];
  const name = capitalized(node === M ? "output node" : nodeName(node)), rate = (node === M ? now.output : now.nodes[node]).toFixed(3);
  if (node < M && now.active[node]) {
    const idle = step === numSteps() && !(result.ran ?? result.nodes).includes(node) ? " (did not run)" : "";
    return `${name}: activated in step ${result.nodes.indexOf(node) + 1}${idle}; firing rate ${rate}.`;
  }
  const next = now.choice === node ? (node === M ? "; it is next and ends the sequence" : "; it is next") : "";
  return `${name}: firing rate ${rate}, probability to be next ${percent(now.probs[node])}${next}.`;
}
