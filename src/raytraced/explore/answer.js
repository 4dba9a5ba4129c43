// What came of it: the answer along the way, what it took, and who does what.

// ---------------------------------------------------------------- the answer

function logitsAt(step) {
  return step === numSteps() ? found.logits : found.answers[step];
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

function ranking(probs) {
  return Array.from(probs.keys()).sort((a, b) => probs[b] - probs[a]);
}

function paintAnswer(step) {
  const isText = pack.kind === "text", probs = softmax(isText ? found.logits : logitsAt(step)), top = largest(probs), right = truth();
  const name = isText ? byteName : (label) => pack.classes[label], small = make("small");
  const after = isText ? `comes after ${byteName(tokens[byteShown()] ?? 10)}, with ` : "";
  small.append(`${after}${percent(probs[top])}`);
  if (right !== null && right !== top) small.append(" · ", make("span", { class: "wrong" }, `✗ wrong, it is ${name(right)}`));
  else if (right !== null) small.append(" · ✓ right");
  $("label").replaceChildren(name(top), small);
  $("says").replaceChildren(name(top), make("small", {}, percent(probs[top])));
  $("says").className = name(top).length < 4 ? "short" : "";
  const soFar = isText ? "The answer is that of all experts in all blocks." : `With ${plural(step, "expert")} so far; ${plural(numSteps(), "expert")} in the end.`;
  $("why").textContent = step === numSteps() ? tellWhy() : soFar;
  const all = isText || probs.length > MOST_BARS;
  const shown = all ? ranking(softmax(found.logits)).slice(0, isText ? 8 : MOST_BARS) : Array.from(probs.keys());
  $("bars").replaceChildren(...shown.map((y) => bar(name(y), probs[y], `${y === top ? "top" : ""}${y === right ? " truth" : ""}`)));
  if (!isText) paintChart(step, right);
}

function paintChart(step, right) {
  const svg = $("chart"), width = svg.clientWidth || 280, height = 120, last = numSteps();
  const x = (k) => 34 + (last ? k / last : 0.5) * (width - 46), y = (value) => 8 + (1 - value) * (height - 32);
  const probs = found.answers.map(softmax), final = largest(found.logits), parts = [];
  for (const value of [0, 0.5, 1]) {
    parts.push(make("path", { class: "axis", d: `M34 ${y(value)}H${width - 8}` }));
    parts.push(make("text", { x: 30, y: y(value) + 4, "text-anchor": "end" }, `${100 * value}%`));
  }
  for (let k = 0; k <= last; k++) {
    const every = Math.ceil(last / 10);
    if (k % Math.max(1, every) === 0) parts.push(make("text", { x: x(k), y: height - 6, "text-anchor": "middle" }, k));
  }
  for (let label = 0; label < probs[0].length; label++) {
    const kind = label === final ? "top" : label === right ? "truth" : "";
    const path = make("path", { class: kind, d: `M${probs.map((each, k) => `${x(k).toFixed(1)} ${y(each[label]).toFixed(1)}`).join("L")}` });
    if (kind) parts.push(path);
    else parts.unshift(path);
  }
  if (state.sure !== null) parts.push(make("path", { class: "limit", d: `M34 ${y(state.sure)}H${width - 8}` }));
  parts.push(make("path", { class: "now", d: `M${x(step)} 4V${height - 22}` }));
  probs.forEach((each, k) => parts.push(make("circle", { cx: x(k), cy: y(each[final]), r: k === step ? 5 : 2.5 })));
  if (found.why === "sure") parts.push(make("circle", { class: "given", cx: x(last), cy: y(softmax(found.logits)[final]), r: 6 }));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `Probability of ${pack.classes[final]} after ${probs.map((each, k) => `${k}: ${percent(each[final])}`).join(", ")} experts`);
  svg.replaceChildren(...parts);
  const told = found.looks?.map(({ probability }, depth) => `${depth}: ${percent(probability)}`).join(" · ");
  $("looks").textContent = told
    ? `Looked at after layer ${told}.${found.why === "sure" ? " Ring: the answer given. Line: the whole path." : ""}`
    : `Blue: ${pack.classes[final]}${right !== null && right !== final ? `; dashed: ${pack.classes[right]}, the truth` : ""}; grey: the others.`;
}

function paintAccount(step) {
  const { L, M } = layerShown(), blocks = pack.kind === "text" ? model.blocks.length : 1;
  let own, all, dense, experts;
  if (pack.kind === "text") {
    const { routes } = textFound[byteShown()];
    ({ own, all, dense } = model.accounts(byteShown(), routes));
    experts = sum(routes.map(({ nodes }) => nodes.length));
  } else {
    ({ all, dense } = model.accounts());
    const early = model.inputWork + model.layer.routingWork(found.nodes.slice(0, step)) + step * model.layer.expertWork + model.headWork;
    [own, experts] = step === numSteps() ? [found.multiplyAdds, found.ran.length] : [early, step];
  }
  const row = (name, num, work) => {
    const cell = make("td", {}, work.toLocaleString("en"));
    cell.style.backgroundSize = `${(100 * work) / Math.max(own, all)}% 3px`; // a bar below the number
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, num), cell);
  };
  const what = pack.kind === "text" ? "byte" : "answer";
  $("account").tBodies[0].replaceChildren(
    row(`this ${what}`, experts, own), row(`all ${blocks * M} experts`, blocks * M, all), row(`${blocks * L} dense blocks`, blocks * L, dense),
  );
  $("account-hint").textContent = `Routing is counted for this ${what}; the others have none. Dense blocks are as wide as an expert, one a layer.`;
}

// ---------------------------------------------------------------- which experts do what

let whoShown = ""; // of test images: it changes with the node alone

function paintWho() {
  const node = nodeShown(), name = nodeName(node), who = `${state.model} ${node}`;
  if (pack.kind === "image" && who === whoShown) return;
  whoShown = who;
  $("who-name").textContent = name[0].toUpperCase() + name.slice(1);
  if (pack.kind === "text") return whoText();
  const use = gallery.map(({ thought }, i) => {
    const { active, nodes } = thought.states.at(-1);
    return { i, rate: active[node] ? nodes[node] : -1 };
  });
  const most = use.filter(({ rate }) => rate >= 0).sort((a, b) => b.rate - a.rate).slice(0, 8);
  $("who-hint").textContent = !gallery.length ? "This page has no test images."
    : most.length ? "The test images above that send the most through it:" : "None of the test images above runs it.";
  $("who-images").replaceChildren(...most.map(({ i }) => thumb(i)));
  if (!gallery.length) return $("who-classes").replaceChildren();
  const shares = pack.gallery.shares.map((row) => row[node] / 1000), best = Math.max(...shares);
  const shown = ranking(shares).slice(0, MOST_BARS).sort((a, b) => a - b);
  $("who-classes").replaceChildren(
    make("p", { class: "hint" }, `How many of each class's images run it, of ${pack.gallery.num_judged.toLocaleString("en")} test images, greedily:`),
    ...shown.map((y) => bar(pack.classes[y], shares[y], shares[y] === best && best > 0 ? "top" : "")),
  );
}

function whoText() {
  const users = tokens.map((_, t) => t).filter((t) => textFound[t]?.routes[state.block].nodes.includes(nodeShown()));
  $("who-hint").textContent = `In block ${state.block + 1}, ${users.length} of ${plural(tokens.length, "byte")} of this text run it${state.node === null ? "" : "; they are underlined"}.`;
  const counts = {};
  for (const t of users) counts[tokens[t]] = (counts[tokens[t]] ?? 0) + 1;
  const often = Object.keys(counts).map(Number).sort((a, b) => counts[b] - counts[a]).slice(0, 10);
  $("who-images").replaceChildren();
  $("who-classes").replaceChildren(
    make("p", { class: "hint" }, often.length ? "The bytes that it runs for most often:" : ""),
    ...often.map((byte) => bar(byteName(byte), counts[byte] / users.length)),
  );
}
