// The panels of the result: the answer after each expert, its cost, and the usage of one expert.

// ---------------------------------------------------------------- the answer

function logitsAt(step) {
  return step === numSteps() ? result.logits : result.answers[step];
}

function bar(name, value, classes = "") {
  const fill = make("i");
  fill.style.width = `${100 * value}%`;
  return make("div", { class: `bar ${classes}` }, make("span", { title: name }, name), make("u", {}, fill), make("em", {}, percent(value)));
}

function byteName(byte) {
  if (byte === 32) return "space";
  if (byte === 10) return "new line";
  return byte > 32 && byte < 127 ? String.fromCharCode(byte) : `byte ${byte}`;
}

/** Indices of the classes, the most probable first. */
function ranking(probs) {
  return Array.from(probs.keys()).sort((a, b) => probs[b] - probs[a]);
}

function paintAnswer(step) {
  const isText = pack.kind === "text", probs = softmax(isText ? result.logits : logitsAt(step)), top = largest(probs), label = trueLabel();
  const name = isText ? byteName : (index) => pack.classes[index], small = make("small");
  const after = isText ? `predicted after “${byteName(tokens[byteShown()] ?? 10)}” · ` : "";
  small.append(`${after}${percent(probs[top])}`);
  if (label !== null && label !== top) small.append(" · ", make("span", { class: "wrong" }, `✗ wrong, the label is ${name(label)}`));
  else if (label !== null) small.append(" · ✓ correct");
  $("label").replaceChildren(name(top), small);
  $("near-answer").replaceChildren(name(top), make("small", {}, percent(probs[top])));
  $("near-answer").className = name(top).length < 4 ? "short" : "";
  const soFar = isText ? "The answer uses all experts of all blocks." : `With ${plural(step, "expert")}; the whole sequence has ${numSteps()}.`;
  $("end").textContent = step === numSteps() ? describeEnd() : soFar;
  const many = isText || probs.length > MAX_BARS;
  const shown = many ? ranking(softmax(result.logits)).slice(0, isText ? 8 : MAX_BARS) : Array.from(probs.keys());
  $("bars").replaceChildren(...shown.map((y) => bar(name(y), probs[y], `${y === top ? "top" : ""}${y === label ? " truth" : ""}`)));
  if (!isText) paintChart(step, label);
}

/** Probabilities of all classes after each expert. */
function paintChart(step, label) {
  const svg = $("chart"), width = svg.clientWidth || 280, height = 120, last = numSteps();
  const x = (k) => 34 + (last ? k / last : 0.5) * (width - 46), y = (value) => 8 + (1 - value) * (height - 32);
  const probs = result.answers.map(softmax), final = largest(result.logits), parts = [];
  for (const value of [0, 0.5, 1]) {
    parts.push(make("path", { class: "axis", d: `M34 ${y(value)}H${width - 8}` }));
    parts.push(make("text", { x: 30, y: y(value) + 4, "text-anchor": "end" }, `${100 * value}%`));
  }
  for (let k = 0; k <= last; k += Math.max(1, Math.ceil(last / 10))) {
    parts.push(make("text", { x: x(k), y: height - 6, "text-anchor": "middle" }, k));
  }
  for (let index = 0; index < probs[0].length; index++) {
    const kind = index === final ? "top" : index === label ? "truth" : "";
    const path = make("path", { class: kind, d: `M${probs.map((each, k) => `${x(k).toFixed(1)} ${y(each[index]).toFixed(1)}`).join("L")}` });
    if (kind) parts.push(path);
    else parts.unshift(path);
  }
  if (state.confidence !== null) parts.push(make("path", { class: "threshold", d: `M34 ${y(state.confidence)}H${width - 8}` }));
  parts.push(make("path", { class: "now", d: `M${x(step)} 4V${height - 22}` }));
  probs.forEach((each, k) => parts.push(make("circle", { cx: x(k), cy: y(each[final]), r: k === step ? 5 : 2.5 })));
  if (result.ended === "confidence") {
    parts.push(make("circle", { class: "exit", cx: x(last), cy: y(softmax(result.logits)[final]), r: 6 }));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `Probability of ${pack.classes[final]} after ${probs.map((each, k) => `${k}: ${percent(each[final])}`).join(", ")} experts`);
  svg.replaceChildren(...parts);
  $("chart-hint").textContent = result.exits ? describeExits() : describeLines(final, label);
}

/** The confidence at each exit; the ring of the chart is the exit taken. */
function describeExits() {
  const list = result.exits.map(({ confidence }, depth) => `${depth}: ${percent(confidence)}`).join(" · ");
  const ring = result.ended === "confidence" ? " Ring: the answer of the early exit. Line: the whole sequence." : "";
  return `Confidence by layers run: ${list}.${ring}`;
}

function describeLines(final, label) {
  const dashed = label !== null && label !== final ? `; dashed: ${pack.classes[label]}, the label` : "";
  return `Blue: ${pack.classes[final]}${dashed}; grey: the other classes. Horizontal: number of experts.`;
}

// ---------------------------------------------------------------- the cost

/** Multiply-adds and experts of the answer shown, and of the two models to compare with. */
function costAt(step) {
  if (pack.kind === "text") {
    const { route } = textResults[byteShown()], { token, all, dense } = model.costs(byteShown(), route);
    return { macs: token, numExperts: route.nodes.length, all, dense };
  }
  const { layer, inputMacs, headMacs } = model, { all, dense } = model.costs();
  if (step === numSteps()) return { macs: result.macs, numExperts: result.ran.length, all, dense };
  const macs = inputMacs + layer.routingMacs(result.nodes.slice(0, step)) + step * layer.expertMacs + headMacs;
  return { macs, numExperts: step, all, dense };
}

function paintCost(step) {
  const { L, M } = layerShown(), isText = pack.kind === "text";
  const { macs, numExperts, all, dense } = costAt(step), widest = Math.max(macs, all);
  const row = (name, num, cost) => {
    const cell = make("td", {}, cost.toLocaleString("en"));
    cell.style.backgroundSize = `${(100 * cost) / widest}% 3px`; // a bar below the number
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, num), cell);
  };
  const unit = isText ? "byte" : "answer";
  $("cost").tBodies[0].replaceChildren(
    row(`this ${unit}`, numExperts, macs), row(`all ${M} experts`, M, all),
    row(`${L} dense blocks`, L, dense),
  );
  const routing = isText && model.routingInput !== "first-block" ? "A byte's path is looked up: routing costs nothing."
    : `The cost of this ${unit} includes routing; the other two rows have none.`;
  $("cost-hint").textContent = `${routing} A dense block is as wide as an expert, with one block per layer.`;
}

// ---------------------------------------------------------------- the usage of one expert

let usageShown = ""; // of images, the panel depends on the model and the node alone

function paintUsage() {
  const node = nodeShown(), key = `${state.model} ${node}`;
  if (pack.kind === "image" && key === usageShown) return;
  usageShown = key;
  $("usage-name").textContent = capitalized(nodeName(node));
  if (pack.kind === "text") paintTextUsage();
  else paintImageUsage(node);
}

function paintImageUsage(node) {
  const rates = gallery.map(({ final }, i) => ({ i, rate: final.active[node] ? final.nodes[node] : -1 }));
  const most = rates.filter(({ rate }) => rate >= 0).sort((a, b) => b.rate - a.rate).slice(0, 8);
  $("usage-hint").textContent = !gallery.length ? "This page has no test images."
    : most.length ? "The test images with the highest firing rate of this expert:" : "None of the test images runs this expert.";
  $("usage-images").replaceChildren(...most.map(({ i }) => thumb(i)));
  if (!gallery.length) return $("usage-classes").replaceChildren();
  const shares = pack.gallery.shares.map((row) => row[node] / 1000), best = Math.max(...shares);
  const shown = ranking(shares).slice(0, MAX_BARS).sort((a, b) => a - b);
  $("usage-classes").replaceChildren(
    make("p", { class: "hint" }, `Share of each class's images that run this expert (${pack.gallery.num_evaluated.toLocaleString("en")} test images, greedy):`),
    ...shown.map((y) => bar(pack.classes[y], shares[y], shares[y] === best && best > 0 ? "top" : "")),
  );
}

function paintTextUsage() {
  const users = tokens.map((_, t) => t).filter((t) => textResults[t]?.route.nodes.includes(nodeShown()));
  const underlined = state.node === null ? "" : " They are underlined.";
  $("usage-hint").textContent = `${users.length} of the ${plural(tokens.length, "byte")} of this text run this expert.${underlined}`;
  const counts = {};
  for (const t of users) counts[tokens[t]] = (counts[tokens[t]] ?? 0) + 1;
  const frequent = Object.keys(counts).map(Number).sort((a, b) => counts[b] - counts[a]).slice(0, 10);
  $("usage-images").replaceChildren();
  $("usage-classes").replaceChildren(
    make("p", { class: "hint" }, frequent.length ? "Share of each byte among them:" : ""),
    ...frequent.map((byte) => bar(byteName(byte), counts[byte] / users.length)),
  );
}
