// Run engine.js on cases: node run_engine.js ENGINE CASES, where CASES holds {pack, inputs, options: […]} as JSON.
// Prints a list per entry of options, with the result of every input.
"use strict";
const { readFileSync } = require("node:fs");
const { openModel, inflate } = require(process.argv[2]);

async function main() {
  const { pack, inputs, options } = JSON.parse(readFileSync(process.argv[3], "utf8"));
  const model = await openModel(pack);
  let samples = inputs;
  if (pack.kind === "image") {
    const bytes = await inflate(inputs), size = pack.image_shape.reduce((a, b) => a * b, 1);
    samples = Array.from({ length: bytes.length / size }, (_, i) => bytes.subarray(i * size, (i + 1) * size));
  }
  const results = options.map((each) => samples.map((sample) => (pack.kind === "image" ? image : text)(model, sample, each)));
  process.stdout.write(JSON.stringify(results));
}

function image(model, pixels, options) {
  const result = model.run(pixels, options);
  return {
    nodes: result.nodes,
    ran: result.ran.length,
    ended: result.ended,
    num_exits: result.exits && result.exits.length,
    logits: Array.from(result.logits),
    answers: options.answers ? result.answers.map((each) => Array.from(each)) : null,
    rates: options.rates ? [...result.states.at(-1).nodes, result.states.at(-1).output] : null,
    macs: result.macs,
    costs: model.costs(),
  };
}

function text(model, tokens, options) {
  if (options.table) return model.paths(options);
  return model.run(tokens, options).map(({ route, logits }, position) => ({
    nodes: route.nodes,
    logits: Array.from(logits),
    costs: model.costs(position, route),
  }));
}

main();
