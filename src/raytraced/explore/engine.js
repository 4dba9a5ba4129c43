// A trained model in plain JavaScript: what routing.py, sequence.py, experts.py and models/ compute, for one sample.
// Axes: L layers, N experts per layer, M = L·N nodes, O = N + 1 outlets of a gate, D width, T tokens, V vocabulary.
// Numbers are doubles, weights are the float32 of the file. tests/explore compares nodes and logits with PyTorch.
"use strict";

const RATE_FLOOR = 1e-6; // the same constant as in sequence.py

// ---------------------------------------------------------------- weights

const LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
const DIGITS = Uint8Array.from({ length: 128 }, (_, code) => LETTERS.indexOf(String.fromCharCode(code)));

/** Decode a text of packing.py: base 85, five letters for four bytes, then deflate. Returns a Promise of bytes. */
async function inflate(text) {
  const bytes = new Uint8Array(4 * Math.ceil(text.length / 5)), view = new DataView(bytes.buffer), padded = `${text}~~~~`;
  for (let i = 0, number = 0; i < text.length; i += 5, number = 0) {
    for (let k = i; k < i + 5; k++) number = 85 * number + DIGITS[padded.charCodeAt(k)];
    view.setUint32((4 * i) / 5, number);
  }
  const whole = new Blob([bytes.subarray(0, Math.floor((4 * text.length) / 5))]);
  return new Uint8Array(await new Response(whole.stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

/** Tensors by name, {shape, data}, of a packed model. Its bytes are stored in planes: all first bytes, then all second bytes, … */
async function unpack(pack) {
  const planes = await inflate(pack.weights);
  const num = planes.length / 4, words = new Uint32Array(num), tensors = {};
  for (let i = 0; i < num; i++) {
    words[i] = planes[i] | (planes[num + i] << 8) | (planes[2 * num + i] << 16) | (planes[3 * num + i] << 24);
  }
  const numbers = new Float32Array(words.buffer);
  let start = 0;
  for (const [name, shape] of pack.shapes) {
    const size = shape.reduce((a, b) => a * b, 1);
    tensors[name] = { shape, data: numbers.subarray(start, start + size) };
    start += size;
  }
  return tensors;
}

// ---------------------------------------------------------------- small mathematics

/** W·x + b (rows). The matrix (rows × x.length) begins at `start` in W, the bias at `biasStart` in b; b may be null. */
function linear(W, b, x, rows, start = 0, biasStart = 0) {
  const out = new Float64Array(rows), width = x.length;
  for (let row = 0, at = start; row < rows; row++) {
    let total = b ? b[biasStart + row] : 0;
    for (let k = 0; k < width; k++) total += W[at++] * x[k];
    out[row] = total;
  }
  return out;
}

function softmax(logits) {
  const out = new Float64Array(logits.length), most = logits[largest(logits)];
  let total = 0;
  for (let i = 0; i < out.length; i++) total += out[i] = Math.exp(logits[i] - most);
  for (let i = 0; i < out.length; i++) out[i] /= total;
  return out;
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The index of the largest number; the first one among equals. */
function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** one + scale · other, element by element. */
function add(one, other, scale = 1) {
  const out = new Float64Array(one.length);
  for (let i = 0; i < out.length; i++) out[i] = one[i] + scale * other[i];
  return out;
}

function layerNorm(x, weight, bias) {
  const mean = sum(x) / x.length, variance = sum(x.map((value) => (value - mean) ** 2)) / x.length;
  const scale = 1 / Math.sqrt(variance + 1e-5);
  return x.map((value, i) => (value - mean) * scale * weight[i] + bias[i]);
}

// ---------------------------------------------------------------- random numbers

/** A uniform number in (0, 1) for some whole numbers (a seed, a step, …): MurmurHash3 of them.
 *  It depends on nothing else, so a byte keeps its path while text is appended. PyTorch draws other numbers. */
function uniform(...numbers) {
  const rotate = (word, bits) => (word << bits) | (word >>> (32 - bits));
  let hash = 0;
  for (const number of numbers) {
    hash ^= Math.imul(rotate(Math.imul(number, 0xcc9e2d51), 15), 0x1b873593);
    hash = Math.imul(rotate(hash, 13), 5) + 0xe6546b64;
  }
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return (((hash ^ (hash >>> 16)) >>> 0) + 0.5) * 2 ** -32;
}

// ---------------------------------------------------------------- a raytraced layer

class RaytracedLayer {
  constructor(tensors, prefix, options) {
    const tensor = (name) => tensors[`${prefix}.${name}`];
    this.options = options;
    this.L = options.num_layers;
    this.N = options.num_experts;
    this.M = this.L * this.N;
    this.gate = { weight: tensor("router.gate.weight").data, bias: tensor("router.gate.bias").data };
    this.gateFirst = tensor("router.routing.gate_first")?.data;
    this.gateInner = tensor("router.routing.gate_inner")?.data;
    // input-conditioned gates: a map of the layer's input with a low rank, stored under these two names
    this.inputDown = tensor("router.sight_in");
    this.inputUp = tensor("router.sight_out")?.data;
    this.stacks = [];
    for (let i = 0; tensor(`experts.weights.${i}`); i++) {
      const [, , rows, columns] = tensor(`experts.weights.${i}`).shape;
      this.stacks.push({ weight: tensor(`experts.weights.${i}`).data, bias: tensor(`experts.biases.${i}`).data, rows, columns });
    }
    this.expertMacs = sum(this.stacks.map(({ rows, columns }) => rows * columns));
  }

  /** What the layer's input adds to the gates' logits (L − 1, N, O); null for gates without it. */
  inputLogits(hidden) {
    if (!this.inputDown) return null;
    const low = linear(this.inputDown.data, null, hidden, this.inputDown.shape[0]);
    return linear(this.inputUp, null, low, (this.L - 1) * this.N * (this.N + 1));
  }

  /** Send the entry rates (N) through the active nodes: the firing rates of all nodes (M) and of the output node, and
   *  what each active node sent to the O outlets of its gate. */
  rates(entry, active, inputLogits) {
    const { L, N, M } = this, O = N + 1, nodes = new Float64Array(M), sent = Array.from({ length: M }, () => null);
    let inputs = Array.from(entry, (rate) => Float64Array.of(rate)), output = 0;
    for (let layer = 0; layer < L; layer++) {
      const below = Array.from({ length: N }, () => new Float64Array(N));
      for (let i = 0; i < N; i++) {
        const node = layer * N + i, rate = sum(inputs[i]);
        nodes[node] = rate;
        if (!active[node]) continue;
        const sends = this.gateOutputs(node, inputs[i], rate, inputLogits);
        for (let j = 0; j < N; j++) below[j][i] = sends[j];
        output += sends[N];
        sent[node] = sends;
      }
      inputs = below;
    }
    return { nodes, output, sent };
  }

  /** How an active node divides its firing rate among the nodes of the next layer and the output node (O). */
  gateOutputs(node, inputs, rate, inputLogits) {
    const { L, N } = this, O = N + 1, layer = Math.floor(node / N), i = node % N;
    if (layer === L - 1) {
      const sends = new Float64Array(O);
      sends[N] = rate;
      return sends;
    }
    const [W, start] = layer === 0 ? [this.gateFirst, i * O] : [this.gateInner, ((layer - 1) * N + i) * O * N];
    let logits = linear(W, null, inputs, O, start);
    if (inputLogits) logits = add(logits, inputLogits.subarray(node * O, (node + 1) * O));
    return softmax(logits).map((share) => rate * share);
  }

  /** Firing rates of the candidates (M + 1) -> the probability of each to be chosen next, by a rule to stop. */
  probabilities(rates, output, active, stop) {
    const { M } = this, probs = new Float64Array(M + 1);
    for (let node = 0; node < M; node++) probs[node] = active[node] ? 0 : rates[node];
    const dominant = output > Math.max(...probs.subarray(0, M));
    if (stop === "dominant" && dominant) probs.fill(0);
    if (stop !== "dominant" || dominant) probs[M] = stop > 0 ? stop * output : output; // a number weights the output node
    const total = sum(probs);
    return probs.map((value) => value / total);
  }

  /** The candidate chosen: the most probable where `number` is null, else the one that a uniform number falls on. */
  choose(probs, number) {
    if (number === null) return largest(probs);
    let place = 0, reached = probs[0];
    while (reached < number && place < this.M) reached += probs[++place];
    return place;
  }

  /** The activation sequence: the nodes in order, the state before each choice (rates, probabilities, choice), and what
   *  ended it: "output", "budget" or "all". Greedy without `random(step)`, a uniform number; `stop` replaces the layer's own. */
  sequence(hidden, { random = null, maxExperts = null, stop = null } = {}) {
    const { M } = this, active = new Uint8Array(M), nodes = [], states = [];
    const limit = maxExperts === null ? M : Math.min(maxExperts, M);
    const entry = softmax(linear(this.gate.weight, this.gate.bias, hidden, this.N)), inputLogits = this.inputLogits(hidden);
    for (let ended = null; ;) {
      const rates = this.rates(entry, active, inputLogits);
      const probs = this.probabilities(rates.nodes, rates.output, active, stop ?? this.options.stop);
      const full = nodes.length >= limit;
      const choice = full ? null : this.choose(probs, random && random(nodes.length));
      states.push({ ...rates, probs, choice, active: active.slice() });
      if (full) ended = nodes.length === M ? "all" : "budget";
      else if (choice === M) ended = "output";
      if (ended) return { entry, nodes, states, ended };
      active[choice] = 1;
      nodes.push(choice);
    }
  }

  /** The weight of each active expert's output (M). */
  weights({ nodes: rates, active }) {
    const { N, M, options } = this, weights = new Float64Array(M);
    for (let start = 0; start < M; start += N) {
      const passed = rates.slice(start, start + N).map((rate, i) => active[start + i] * rate);
      const total = options.weighting === "relative" ? Math.max(...passed) : sum(passed);
      const count = options.weighting === "rates" ? sum(active.subarray(start, start + N)) : 1;
      for (let node = start; node < start + N; node++) {
        const share = total > 0 ? rates[node] / Math.max(total, RATE_FLOOR) : 1;
        weights[node] = active[node] * options.weight_scale * (options.weighting === "unit" ? 1 : share * count);
      }
    }
    return weights;
  }

  runExpert(node, x) {
    this.stacks.forEach(({ weight, bias, rows, columns }, index) => {
      for (let k = 0; index && k < x.length; k++) if (x[k] < 0) x[k] = 0;
      x = linear(weight, bias, x, rows, node * rows * columns, node * rows);
    });
    return x;
  }

  /** Run the active experts of a state: the layer's output after 0, 1, … L layers of the grid (L + 1 vectors of D). */
  run(hidden, state) {
    const { L, options } = this, weights = this.weights(state), residual = options.stream === "residual";
    let total = new Float64Array(hidden.length);
    const outputs = [residual ? hidden : total];
    for (let layer = 0; layer < L; layer++) {
      const update = this.update(layer, hidden, state.active, weights);
      hidden = residual ? add(hidden, update) : update;
      total = add(total, update);
      outputs.push(options.stream === "skip-sum" ? total : hidden);
    }
    return outputs;
  }

  /** The weighted sum of the active experts of one layer (D). */
  update(layer, hidden, active, weights) {
    let total = new Float64Array(hidden.length);
    for (let node = layer * this.N; node < (layer + 1) * this.N; node++) {
      if (active[node]) total = add(total, this.runExpert(node, hidden), weights[node]);
    }
    return total;
  }

  /** Multiply-adds of routing: a step recomputes only the gates that its node changed. */
  routingMacs(nodes) {
    const { L, N } = this, size = (layer) => (layer === L - 1 ? 0 : (N + 1) * (layer === 0 ? 1 : N));
    const count = new Array(L).fill(0);
    let macs = this.gate.weight.length;
    for (const node of nodes) {
      const start = Math.floor(node / N);
      count[start]++;
      macs += size(start);
      for (let layer = start + 1; layer < L; layer++) macs += count[layer] * size(layer);
    }
    if (this.inputDown) {
      const numGates = nodes.filter((node) => node < this.M - N).length;
      macs += this.inputDown.data.length + numGates * this.inputDown.shape[0] * (N + 1);
    }
    return macs;
  }
}

// ---------------------------------------------------------------- an image model

class Classifier {
  constructor(pack, tensors) {
    this.tensors = tensors;
    this.shape = pack.image_shape;
    this.numClasses = tensors["head.bias"].data.length;
    this.layer = new RaytracedLayer(tensors, "layer", pack.options);
    const [channels, height, width] = this.shape;
    this.convolves = channels > 1;
    this.inputMacs = tensors["input_block.linear.weight"].data.length;
    for (let s = 0; tensors[`input_block.weights.${s}`]; s++) {
      this.inputMacs += tensors[`input_block.weights.${s}`].data.length * (height >> s) * (width >> s);
    }
    this.headMacs = tensors["head.weight"].data.length;
  }

  /** The input block: pixels (C, H, W) in bytes -> the hidden vector (D). */
  hidden(pixels) {
    const part = (name) => this.tensors[`input_block.${name}`];
    const scale = part("scale").data, shift = part("shift").data;
    let [channels, height, width] = this.shape, x = new Float64Array(pixels.length);
    for (let i = 0; i < x.length; i++) {
      const channel = Math.floor(i / (height * width));
      x[i] = pixels[i] * scale[channel] + shift[channel];
    }
    for (let s = 0; this.convolves && part(`weights.${s}`); s++) {
      const { data, shape } = part(`weights.${s}`);
      x = pool(convolve(x, data, part(`biases.${s}`).data, shape, height, width), shape[0], height, width);
      [channels, height, width] = [shape[0], height >> 1, width >> 1];
    }
    return linear(part("linear.weight").data, part("linear.bias").data, x, part("linear.bias").data.length);
  }

  head(vector) {
    return linear(this.tensors["head.weight"].data, this.tensors["head.bias"].data, vector, this.numClasses);
  }

  /** Answer one image: its activation sequence (see RaytracedLayer.sequence), the logits after each expert (`answers`) and
   *  at the end (`logits`), the nodes that ran (`ran`), the exits with a confidence threshold, and the cost (`macs`). */
  run(pixels, { sample = false, seed = 0, maxExperts = null, stop = null, confidence = null } = {}) {
    const hidden = this.hidden(pixels), { layer } = this;
    const result = layer.sequence(hidden, { random: sample ? (step) => uniform(seed, step) : null, maxExperts, stop });
    const answers = result.states.map((state) => this.head(layer.run(hidden, state).at(-1)));
    let logits = answers.at(-1), ran = result.nodes, exits = null, { ended } = result;
    if (confidence !== null) {
      const final = result.states.at(-1);
      exits = this.exits(layer.run(hidden, final), final, confidence);
      const taken = exits.length - 1;
      logits = exits[taken].logits;
      ran = result.nodes.filter((node) => node < taken * layer.N);
      if (exits[taken].confidence >= confidence && ran.length < result.nodes.length) ended = "confidence";
    }
    const routing = exits && exits.length === 1 ? 0 : layer.routingMacs(result.nodes);
    const heads = this.headMacs * (exits ? exits.length : 1);
    const macs = this.inputMacs + routing + ran.length * layer.expertMacs + heads;
    return { ...result, hidden, answers, logits, ran, exits, ended, macs };
  }

  /** The exits after 0, 1, … layers, {logits, confidence}: up to the first that reaches the threshold, or after which no
   *  layer could change the answer. */
  exits(outputs, { active }, threshold) {
    const { N, options } = this.layer, exits = [];
    for (let depth = 0; depth < outputs.length; depth++) {
      const logits = this.head(outputs[depth]), confidence = Math.max(...softmax(logits));
      exits.push({ logits, confidence });
      const empty = depth > 0 && options.stream !== "last" && !active.subarray(depth * N).some(Boolean);
      if (empty || confidence >= threshold) break;
    }
    return exits;
  }

  /** Multiply-adds to compare with: of all experts, and of a dense model with one block as wide as an expert per layer. */
  costs() {
    const { M, L, expertMacs } = this.layer, around = this.inputMacs + this.headMacs;
    return { all: around + M * expertMacs, dense: around + L * expertMacs };
  }
}

/** 3 × 3 convolution with zero padding, then ReLU: (K, H, W) -> (C, H, W). */
function convolve(x, weight, bias, [C, K], height, width) {
  const out = new Float64Array(C * height * width);
  for (let c = 0; c < C; c++) {
    for (let row = 0; row < height; row++) {
      for (let column = 0; column < width; column++) {
        let total = bias[c];
        for (let k = 0; k < K; k++) {
          for (let i = 0; i < 3; i++) {
            const y = row + i - 1;
            if (y < 0 || y >= height) continue;
            for (let j = 0; j < 3; j++) {
              const at = column + j - 1;
              if (at < 0 || at >= width) continue;
              total += weight[((c * K + k) * 3 + i) * 3 + j] * x[(k * height + y) * width + at];
            }
          }
        }
        out[(c * height + row) * width + column] = Math.max(total, 0);
      }
    }
  }
  return out;
}

/** 2 × 2 max-pooling: (C, H, W) -> (C, H / 2, W / 2). */
function pool(x, channels, height, width) {
  const rows = height >> 1, columns = width >> 1, out = new Float64Array(channels * rows * columns);
  for (let i = 0; i < out.length; i++) {
    const c = Math.floor(i / (rows * columns)), row = Math.floor(i / columns) % rows, column = i % columns;
    const at = (c * height + 2 * row) * width + 2 * column;
    out[i] = Math.max(x[at], x[at + 1], x[at + width], x[at + width + 1]);
  }
  return out;
}

// ---------------------------------------------------------------- a language model

class GPT {
  constructor(pack, tensors) {
    this.tensors = tensors;
    this.context = pack.context;
    this.numHeads = pack.num_heads;
    this.embedding = tensors["embedding.weight"];
    [this.vocabSize, this.D] = this.embedding.shape;
    this.routingInput = pack.routing_input;
    this.routingEmbedding = tensors["routing_embedding.weight"];
    this.layer = new RaytracedLayer(tensors, "layer", pack.options);
    this.blocks = Array.from({ length: this.layer.L }, (_, b) => (name) => tensors[`blocks.${b}.${name}`].data);
    this.memory = { options: "", tokens: [], cache: [] };
  }

  /** Run a text: for each token its route, one activation sequence through all blocks, and the logits of the token after it.
   *  Tokens known from the last call are not computed again. After `milliseconds` it returns what it has so far. */
  run(tokens, { sample = false, seed = 0, maxExperts = null, stop = null, milliseconds = Infinity } = {}) {
    const end = performance.now() + milliseconds, limits = { maxExperts, stop };
    const options = JSON.stringify([sample, seed, limits]), { memory } = this;
    if (memory.options !== options) Object.assign(memory, { options, tokens: [], cache: [] });
    let same = 0;
    while (same < tokens.length && same < memory.tokens.length && tokens[same] === memory.tokens[same]) same++;
    memory.cache.length = same;
    for (let position = same; position < tokens.length && (position === 0 || performance.now() < end); position++) {
      memory.cache.push(this.token(tokens[position], position, memory.cache, sample ? seed : null, limits));
    }
    memory.tokens = tokens.slice(0, memory.cache.length);
    return memory.cache.slice();
  }

  /** The greedy path of every token (V lists of nodes) where it depends on the token alone, else null: `model.paths()`. */
  paths({ maxExperts = null, stop = null } = {}) {
    const plan = (_, token) => this.layer.sequence(this.routingVector(token), { maxExperts, stop }).nodes;
    return this.routingInput === "first-block" ? null : Array.from({ length: this.vocabSize }, plan);
  }

  /** Run one token after those of the cache; a seed of null is greedy. */
  token(token, position, before, seed, limits) {
    const { D, layer } = this, keys = [], values = [], random = seed === null ? null : (step) => uniform(seed, position, step);
    const plan = (input) => layer.sequence(input, { random, ...limits });
    let x = this.embed(this.embedding, token, Math.sqrt(D)), weights = null;
    let route = this.routingInput === "first-block" ? null : plan(this.routingVector(token));
    this.blocks.forEach((data, b) => {
      const normed = layerNorm(x, data("norm_attention.weight"), data("norm_attention.bias"));
      const all = linear(data("attention.inputs.weight"), null, normed, 3 * D);
      const query = this.rotate(all.subarray(0, D), position);
      keys.push(this.rotate(all.subarray(D, 2 * D), position));
      values.push(all.subarray(2 * D));
      const context = [...before, { keys, values }];
      const mixed = this.attend(query, context.map((each) => each.keys[b]), context.map((each) => each.values[b]));
      x = add(x, linear(data("attention.output.weight"), null, mixed, D));
      const input = layerNorm(x, data("norm_experts.weight"), data("norm_experts.bias"));
      route ??= plan(input);
      weights ??= layer.weights(route.states.at(-1));
      x = add(x, layer.update(b, input, route.states.at(-1).active, weights));
    });
    const normed = layerNorm(x, this.tensors["norm.weight"].data, this.tensors["norm.bias"].data);
    return { keys, values, route, logits: linear(this.embedding.data, null, normed, this.vocabSize) };
  }

  /** A row of an embedding, times a factor. */
  embed({ data, shape: [, width] }, token, scale = 1) {
    return Float64Array.from(data.subarray(token * width, (token + 1) * width), (value) => value * scale);
  }

  /** What the router reads of a token: its routing embedding, or the embedding as the first block gets it. */
  routingVector(token) {
    return this.routingEmbedding ? this.embed(this.routingEmbedding, token) : this.embed(this.embedding, token, Math.sqrt(this.D));
  }

  /** Rotary position embedding: rotate the pairs of each head by angles that grow with the position. */
  rotate(vector, position) {
    const E = this.D / this.numHeads, half = E / 2, out = new Float64Array(this.D);
    for (let start = 0; start < this.D; start += E) {
      for (let i = 0; i < half; i++) {
        const angle = position * 10000 ** -(i / half), one = vector[start + i], other = vector[start + half + i];
        out[start + i] = one * Math.cos(angle) - other * Math.sin(angle);
        out[start + half + i] = one * Math.sin(angle) + other * Math.cos(angle);
      }
    }
    return out;
  }

  attend(query, keys, values) {
    const E = this.D / this.numHeads, out = new Float64Array(this.D);
    for (let start = 0; start < this.D; start += E) {
      const scores = new Float64Array(keys.length);
      for (let s = 0; s < keys.length; s++) {
        for (let i = start; i < start + E; i++) scores[s] += (query[i] * keys[s][i]) / Math.sqrt(E);
      }
      const shares = softmax(scores);
      for (let s = 0; s < keys.length; s++) {
        for (let i = start; i < start + E; i++) out[i] += shares[s] * values[s][i];
      }
    }
    return out;
  }

  /** Multiply-adds of the token at a position: of its route (`token`), of all experts, and of dense blocks.
   *  A path that depends on the token alone is looked up and costs nothing. */
  costs(position, { nodes }) {
    const { D, layer } = this, around = D * this.vocabSize + this.blocks.length * (4 * D * D + 2 * D * (position + 1));
    const routing = this.routingInput === "first-block" ? layer.routingMacs(nodes) : 0;
    const [token, all, dense] = [nodes.length, layer.M, layer.L].map((num) => around + num * layer.expertMacs);
    return { token: token + routing, all, dense };
  }
}

/** Unpack a model of the page; returns a Promise of a Classifier or a GPT. */
async function openModel(pack) {
  const tensors = await unpack(pack);
  return pack.kind === "text" ? new GPT(pack, tensors) : new Classifier(pack, tensors);
}

if (typeof module !== "undefined") module.exports = { openModel, inflate, uniform };
