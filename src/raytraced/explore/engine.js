// A trained model in plain JavaScript: what routing.py, sequence.py, grid.py, draws.py and models/ do, for one sample.
// Axes: L layers, N experts a layer, M = L·N nodes, O = N + 1 outlets of a gate, D width, T tokens, V vocabulary.
// Numbers are doubles, weights are the float32 of the file; tests/explore compares nodes and logits with PyTorch.
"use strict";

const RATE_FLOOR = 1e-6; // as in sequence.py

// ---------------------------------------------------------------- weights

const LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
const DIGITS = Uint8Array.from({ length: 128 }, (_, code) => LETTERS.indexOf(String.fromCharCode(code)));

/** The bytes of a deflated text: five letters, the digits of a number to base 85, for four bytes. */
async function inflate(text) {
  const bytes = new Uint8Array(4 * Math.ceil(text.length / 5)), view = new DataView(bytes.buffer), padded = `${text}~~~~`;
  for (let i = 0, number = 0; i < text.length; i += 5, number = 0) {
    for (let k = i; k < i + 5; k++) number = 85 * number + DIGITS[padded.charCodeAt(k)];
    view.setUint32((4 * i) / 5, number);
  }
  const whole = new Blob([bytes.subarray(0, Math.floor((4 * text.length) / 5))]);
  return new Uint8Array(await new Response(whole.stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

/** Tensors by name, {shape, data}, from a model's pack: all first bytes of its numbers, then all second ones, … */
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

/** W·x + b for the matrix (rows × x.length) that begins at `start` in W. */
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

function sum(values) {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}

/** The place of the largest number, the first of equals. */
function largest(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** one + scale · other */
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

// ---------------------------------------------------------------- draws: the numbers of draws.py

/** The high and the low word of a 32-bit product. */
function multiply(a, b) {
  const product = BigInt(a >>> 0) * BigInt(b);
  return [Number(product >> 32n), Number(product & 0xffffffffn)];
}

/** Philox4x32-10: four 32-bit words for a 64-bit seed (a BigInt) and four 32-bit counters. */
function philox(seed, counter) {
  let [c0, c1, c2, c3] = counter;
  let key0 = Number(seed & 0xffffffffn), key1 = Number((seed >> 32n) & 0xffffffffn);
  for (let round = 0; round < 10; round++) {
    const [high0, low0] = multiply(c0, 0xd2511f53), [high1, low1] = multiply(c2, 0xcd9e8d57);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ key0) >>> 0, low1, (high0 ^ c3 ^ key1) >>> 0, low0];
    key0 = (key0 + 0x9e3779b9) >>> 0;
    key1 = (key1 + 0xbb67ae85) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** A word as a number inside 0 … 1. */
function fraction(word) {
  return ((word >>> 9) + 0.5) * 2 ** -23;
}

function uniform(seed, row, step) {
  return fraction(philox(seed, [row, 0, Math.floor(step / 4), 0])[step % 4]);
}

function exponentials(seed, row, step, num) {
  const words = [];
  for (let block = 1; words.length < num; block++) words.push(...philox(seed, [row, 0, step, block]));
  return words.slice(0, num).map((word) => Math.fround(-Math.log(fraction(word))));
}

/** The first 64-bit seeds that torch.Generator().manual_seed(number) gives: of its MT19937, two words each. */
function torchSeeds(number, count) {
  const state = new Uint32Array(624);
  state[0] = number;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  const word = (i) => {
    // of the first 227 words none needs another new one
    const both = (state[i] & 0x80000000) | (state[i + 1] & 0x7fffffff);
    let y = state[i + 397] ^ (both >>> 1) ^ (both & 1 ? 0x9908b0df : 0);
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return BigInt((y ^ (y >>> 18)) >>> 0);
  };
  return Array.from({ length: count }, (_, i) => ((word(2 * i) << 32n) | word(2 * i + 1)) % (2n ** 63n - 1n));
}

// ---------------------------------------------------------------- a raytraced layer

class RaytracedLayer {
  constructor(tensors, prefix, options) {
    const own = (name) => tensors[`${prefix}.${name}`];
    this.options = options;
    this.L = options.num_layers;
    this.N = options.num_experts;
    this.M = this.L * this.N;
    this.gate = { weight: own("router.gate.weight").data, bias: own("router.gate.bias").data };
    this.gateFirst = own("router.routing.gate_first")?.data;
    this.gateInner = own("router.routing.gate_inner")?.data;
    this.sightIn = own("router.sight_in");
    this.sightOut = own("router.sight_out")?.data;
    this.stacks = [];
    for (let i = 0; own(`experts.weights.${i}`); i++) {
      const [, , rows, columns] = own(`experts.weights.${i}`).shape;
      this.stacks.push({ weight: own(`experts.weights.${i}`).data, bias: own(`experts.biases.${i}`).data, rows, columns });
    }
    this.expertWork = sum(this.stacks.map(({ rows, columns }) => rows * columns));
  }

  /** What gates that see the layer's input add to their logits (L − 1, N, O). */
  sight(hidden) {
    if (!this.sightIn) return null;
    const seen = linear(this.sightIn.data, null, hidden, this.sightIn.shape[0]);
    return linear(this.sightOut, null, seen, (this.L - 1) * this.N * (this.N + 1));
  }

  /** Send the entry rates through the active nodes: the rate of every node, of the output node, and what each node sent. */
  rates(entry, active, sight) {
    const { L, N, M } = this, O = N + 1, nodes = new Float64Array(M), sent = Array.from({ length: M }, () => null);
    let inputs = Array.from(entry, (rate) => Float64Array.of(rate)), output = 0;
    for (let layer = 0; layer < L; layer++) {
      const below = Array.from({ length: N }, () => new Float64Array(N));
      for (let i = 0; i < N; i++) {
        const node = layer * N + i, rate = sum(inputs[i]);
        nodes[node] = rate;
        if (!active[node]) continue;
        const last = layer === L - 1, sends = new Float64Array(O);
        if (last) sends[N] = rate;
        else {
          const [W, start] = layer === 0 ? [this.gateFirst, i * O] : [this.gateInner, ((layer - 1) * N + i) * O * N];
          let logits = linear(W, null, inputs[i], O, start);
          if (sight) logits = add(logits, sight.subarray(node * O, (node + 1) * O));
          const shares = softmax(logits);
          for (let outlet = 0; outlet < O; outlet++) sends[outlet] = rate * shares[outlet];
        }
        for (let j = 0; j < N; j++) below[j][i] = sends[j];
        output += sends[N];
        sent[node] = sends;
      }
      inputs = below;
    }
    return { nodes, output, sent };
  }

  /** The candidate drawn: the largest; where a uniform number falls; or, of models so trained, a race's winner. */
  choose(chances, seed, row, step) {
    const { M, options: { stop } } = this; // a number: what the output node's rate counts
    if (stop > 0) chances = chances.map((value, place) => (place === M ? stop * value : value));
    const dominant = chances[M] > Math.max(...chances.subarray(0, M));
    if (stop === "dominant") chances = chances.map((value, place) => ((place === M) === dominant ? value : 0));
    if (seed === null) return largest(chances);
    if (this.options.estimator === "gumbel") {
      const noise = exponentials(seed, row, step, M + 1);
      return largest(chances.map((value, place) => value / noise[place]));
    }
    const target = uniform(seed, row, step) * sum(chances);
    let place = 0, reached = chances[0];
    while (reached < target && place < M) reached += chances[++place];
    return place;
  }

  /** The activation sequence: the nodes in order, and before each draw the rates, the chances and the choice. */
  sequence(hidden, { seed = null, row = 0, maxExperts = null } = {}) {
    const { M } = this, active = new Uint8Array(M), nodes = [], states = [];
    const most = maxExperts === null ? M : Math.min(maxExperts, M);
    const entry = softmax(linear(this.gate.weight, this.gate.bias, hidden, this.N)), sight = this.sight(hidden);
    let why = null;
    for (;;) {
      const rates = this.rates(entry, active, sight);
      const chances = new Float64Array(M + 1);
      for (let node = 0; node < M; node++) chances[node] = active[node] ? 0 : rates.nodes[node];
      chances[M] = rates.output;
      const ended = nodes.length >= most; // nothing may be drawn any more
      const choice = ended ? null : this.choose(chances, seed, row, nodes.length);
      states.push({ ...rates, chances, choice, active: active.slice() });
      if (ended) why = nodes.length === M ? "all" : "budget";
      else if (choice === M) why = "output";
      if (why) return { entry, nodes, states, why };
      active[choice] = 1;
      nodes.push(choice);
    }
  }

  /** How much each active expert's output counts (M). */
  weights({ nodes: rates, active }) {
    const { N, M, options } = this, weights = new Float64Array(M);
    for (let start = 0; start < M; start += N) {
      let total = 0, count = 0;
      for (let node = start; node < start + N; node++) {
        total += active[node] * rates[node];
        count += active[node];
      }
      for (let node = start; node < start + N; node++) {
        const share = total > 0 ? rates[node] / Math.max(total, RATE_FLOOR) : 1;
        const scale = options.weighting === "rates" ? Math.max(count, 1) : 1;
        weights[node] = active[node] * (options.weighting === "unit" ? 1 : share * scale);
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

  /** The vectors that an answer would be made of after 0, 1, … L layers, under the set of one state. */
  run(hidden, state) {
    const { L, N, options } = this, weights = this.weights(state), residual = options.stream === "residual";
    const zeros = new Float64Array(hidden.length), answers = [residual ? hidden : zeros];
    let total = zeros;
    for (let layer = 0; layer < L; layer++) {
      let update = zeros;
      for (let node = layer * N; node < (layer + 1) * N; node++) {
        if (!state.active[node]) continue;
        update = add(update, this.runExpert(node, hidden), weights[node]);
      }
      hidden = residual ? add(hidden, update) : update;
      total = add(total, update);
      answers.push(options.stream === "skip-sum" ? total : hidden);
    }
    return answers;
  }

  /** The multiply-adds of deciding on a sequence: each step redoes no more gates than its node changed. */
  routingWork(nodes) {
    const { L, N } = this, size = (layer) => (layer === L - 1 ? 0 : (N + 1) * (layer === 0 ? 1 : N));
    const count = new Array(L).fill(0);
    let work = this.gate.weight.length;
    for (const node of nodes) {
      const own = Math.floor(node / N);
      count[own]++;
      work += size(own);
      for (let layer = own + 1; layer < L; layer++) work += count[layer] * size(layer);
    }
    if (this.sightIn) {
      const told = nodes.filter((node) => node < this.M - N).length;
      work += this.sightIn.data.length + told * this.sightIn.shape[0] * (N + 1);
    }
    return work;
  }
}

// ---------------------------------------------------------------- an image model

class Classifier {
  constructor(pack, tensors) {
    this.tensors = tensors;
    this.shape = pack.image_shape;
    this.numClasses = tensors["head.bias"].data.length;
    this.layer = new RaytracedLayer(tensors, "layer", pack.options);
    this.convolves = this.shape[0] > 1;
    const [, height, width] = this.shape;
    this.inputWork = tensors["input_block.linear.weight"].data.length;
    for (let s = 0; tensors[`input_block.weights.${s}`]; s++) {
      this.inputWork += tensors[`input_block.weights.${s}`].data.length * (height >> s) * (width >> s);
    }
    this.headWork = tensors["head.weight"].data.length;
  }

  /** Pixels (C, H, W) in bytes -> the hidden vector. */
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

  /** Everything there is to see: the sequence, the answer after each expert, the one that counts, and what it took. */
  think(pixels, { sample = false, seed = 0, maxExperts = null, sure = null } = {}) {
    const hidden = this.hidden(pixels), { layer } = this;
    const found = layer.sequence(hidden, { seed: sample ? torchSeeds(seed, 1)[0] : null, maxExperts });
    const answers = found.states.map((state) => this.head(layer.run(hidden, state).at(-1)));
    const final = found.states.at(-1);
    let logits = answers.at(-1), ran = found.nodes, looks = null, why = found.why;
    if (sure !== null) {
      looks = this.looks(layer.run(hidden, final), final, sure);
      const end = looks.length - 1;
      logits = looks[end].logits;
      ran = found.nodes.filter((node) => node < end * layer.N);
      if (looks[end].sure && ran.length < found.nodes.length) why = "sure";
    }
    const routing = looks && looks.length === 1 ? 0 : layer.routingWork(found.nodes);
    const heads = this.headWork * (looks ? looks.length : 1);
    const multiplyAdds = this.inputWork + routing + ran.length * layer.expertWork + heads;
    return { ...found, hidden, answers, logits, ran, looks, why, multiplyAdds };
  }

  /** The answers after 0, 1, … layers, up to the first that is sure enough or that no layer below could change. */
  looks(vectors, { active }, sure) {
    const { N, options } = this.layer, looks = [];
    for (let depth = 0; depth < vectors.length; depth++) {
      const logits = this.head(vectors[depth]), probability = Math.max(...softmax(logits));
      looks.push({ logits, probability, sure: probability >= sure });
      const last = depth === vectors.length - 1;
      const empty = depth > 0 && options.stream !== "last" && !active.subarray(depth * N).some(Boolean);
      if (last || empty || probability >= sure) break;
    }
    return looks;
  }

  /** What every expert would take, and a dense net of one block as wide as an expert for each layer; neither routes. */
  accounts() {
    const { M, L, expertWork } = this.layer, around = this.inputWork + this.headWork;
    return { all: around + M * expertWork, dense: around + L * expertWork };
  }
}

/** Convolution of 3 × 3 with a border of zeros, then ReLU: (K, H, W) -> (C, H, W). */
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

/** The largest of every 2 × 2 pixels. */
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
    [this.vocabulary, this.D] = this.embedding.shape;
    this.blocks = [];
    for (let b = 0; tensors[`blocks.${b}.norm_layer.weight`]; b++) {
      const own = (name) => tensors[`blocks.${b}.${name}`].data;
      this.blocks.push({ own, layer: new RaytracedLayer(tensors, `blocks.${b}.layer`, pack.options) });
    }
    this.memory = { how: "", tokens: [], cache: [] };
  }

  /** What each token of a text runs in every block, and the logits of the token after it; old tokens are not redone.
   *  After `milliseconds` it leaves the rest for another call. */
  think(tokens, { sample = false, seed = 0, maxExperts = null, milliseconds = Infinity } = {}) {
    const end = performance.now() + milliseconds;
    const how = JSON.stringify([sample, seed, maxExperts]), { memory } = this;
    if (memory.how !== how) Object.assign(memory, { how, tokens: [], cache: [] });
    let same = 0;
    while (same < tokens.length && same < memory.tokens.length && tokens[same] === memory.tokens[same]) same++;
    memory.cache.length = same;
    const seeds = sample ? torchSeeds(seed, this.blocks.length) : null;
    for (let position = same; position < tokens.length && (position === 0 || performance.now() < end); position++) {
      memory.cache.push(this.token(tokens[position], position, memory.cache, seeds, maxExperts));
    }
    memory.tokens = tokens.slice(0, memory.cache.length);
    return memory.cache.slice();
  }

  /** One token after those of the cache. */
  token(token, position, before, seeds, maxExperts) {
    const { D } = this, keys = [], values = [], routes = [];
    let x = Float64Array.from(this.embedding.data.subarray(token * D, (token + 1) * D), (value) => value * Math.sqrt(D));
    this.blocks.forEach(({ own, layer }, b) => {
      const normed = layerNorm(x, own("norm_attention.weight"), own("norm_attention.bias"));
      const all = linear(own("attention.inputs.weight"), null, normed, 3 * D);
      const query = this.rotate(all.subarray(0, D), position);
      keys.push(this.rotate(all.subarray(D, 2 * D), position));
      values.push(all.subarray(2 * D));
      const seen = [...before, { keys, values }];
      const mixed = this.attend(query, seen.map((each) => each.keys[b]), seen.map((each) => each.values[b]));
      x = add(x, linear(own("attention.output.weight"), null, mixed, D));
      const given = layerNorm(x, own("norm_layer.weight"), own("norm_layer.bias"));
      const route = layer.sequence(given, { seed: seeds ? seeds[b] : null, row: position, maxExperts });
      const hidden = layer.run(given, route.states.at(-1)).at(-1);
      // only what the experts added goes on
      x = add(x, layer.options.stream === "residual" ? add(hidden, given, -1) : hidden);
      routes.push(route);
    });
    const normed = layerNorm(x, this.tensors["norm.weight"].data, this.tensors["norm.bias"].data);
    return { keys, values, routes, logits: linear(this.embedding.data, null, normed, this.vocabulary) };
  }

  /** Turn the pairs of each head by angles that grow with the position. */
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

  /** Multiply-adds of the token at a position: as it went, with every expert, and with dense blocks. */
  accounts(position, routes) {
    const { D } = this, around = D * this.vocabulary + this.blocks.length * (4 * D * D + 2 * D * (position + 1));
    let own = around, all = around, dense = around;
    this.blocks.forEach(({ layer }, b) => {
      own += layer.routingWork(routes[b].nodes) + routes[b].nodes.length * layer.expertWork;
      all += layer.M * layer.expertWork;
      dense += layer.L * layer.expertWork;
    });
    return { own, all, dense };
  }
}

/** A model of the page, ready to run. */
async function openModel(pack) {
  const tensors = await unpack(pack);
  return pack.kind === "text" ? new GPT(pack, tensors) : new Classifier(pack, tensors);
}

if (typeof module !== "undefined") module.exports = { openModel, inflate, softmax, philox, torchSeeds };
