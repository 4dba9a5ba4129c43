// What engine.js makes of cases: node run_engine.js ENGINE CASES, where CASES holds {pack, inputs, options: […]} as JSON.
// Prints, for each of the options, what every input led to.
"use strict";
const { readFileSync } = require("node:fs");
const { openModel, inflate, softmax } = require(process.argv[2]);

async function main() {
  const { pack, inputs, options } = JSON.parse(readFileSync(process.argv[3], "utf8"));
  const model = await openModel(pack);
  let samples = inputs;
  if (pack.kind === "image") {
    const bytes = await inflate(inputs), size = pack.image_shape.reduce((a, b) => a * b, 1);
    samples = Array.from({ length: bytes.length / size }, (_, i) => bytes.subarray(i * size, (i + 1) * size));
  }
  const told = options.map((each) => samples.map((sample) => (pack.kind === "image" ? image : text)(model, sample, each)));
  process.stdout.write(JSON.stringify(told));
}

function image(model, pixels, options) {
  const found = model.think(pixels, options);
  return {
    nodes: found.nodes,
    ran: found.ran.length,
    why: found.why,
    num_looks: found.looks && found.looks.length,
    logits: Array.from(found.logits),
    answers: options.answers ? found.answers.map((each) => Array.from(each)) : null,
    rates: options.rates ? [...found.states.at(-1).nodes, found.states.at(-1).output] : null,
    multiply_adds: found.multiplyAdds,
    accounts: model.accounts(),
  };
}

function text(model, tokens, options) {
  return model.think(tokens, options).map(({ routes, logits }, position) => ({
    nodes: routes.map((route) => route.nodes),
    logits: Array.from(logits),
    accounts: model.accounts(position, routes),
  }));
}

main();
