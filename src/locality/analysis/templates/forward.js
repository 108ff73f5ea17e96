// The forward pass of a DeiT or ConViT, equal to `locality.models.convit`, with all attention maps.
//
// Shapes, row-major in flat arrays:  N tokens · C width · h heads · d = C/h · (H, W) grid of patches

// A model and its weights under their PyTorch names.
function unpackModel(about, bytes) {
  const count = about.weights.reduce((sum, [, length]) => sum + length, 0);
  if (bytes.length !== 2 * count) throw new Error(`the weights of ${about.label} are incomplete`);
  const all = readHalves(bytes, 0, count), weights = {};
  let at = 0;
  for (const [name, length] of about.weights) weights[name] = all.subarray(at, at += length);
  return { ...about, weights };
}

// x (n, from) · weightᵀ, weight (to, from), + bias (to) → (n, to). Each weight is read once for four tokens.
function linear(x, weight, bias, from) {
  const n = x.length / from, to = weight.length / from, out = new Float32Array(n * to);
  for (let t = 0; t < n; t += 4) {
    const a = t * from, b = Math.min(t + 1, n - 1) * from, c = Math.min(t + 2, n - 1) * from, e = Math.min(t + 3, n - 1) * from;
    for (let o = 0; o < to; o++) {
      let p = bias ? bias[o] : 0, q = p, r = p, s = p;
      for (let i = 0, w = o * from; i < from; i++, w++) {
        const each = weight[w];
        p += each * x[a + i]; q += each * x[b + i]; r += each * x[c + i]; s += each * x[e + i];
      }
      out[t * to + o] = p;
      if (t + 1 < n) out[(t + 1) * to + o] = q;
      if (t + 2 < n) out[(t + 2) * to + o] = r;
      if (t + 3 < n) out[(t + 3) * to + o] = s;
    }
  }
  return out;
}

function layerNorm(x, weight, bias, eps) {
  const width = weight.length, out = new Float32Array(x.length);
  for (let t = 0; t < x.length; t += width) {
    let mean = 0, variance = 0;
    for (let i = 0; i < width; i++) mean += x[t + i] / width;
    for (let i = 0; i < width; i++) variance += (x[t + i] - mean) ** 2 / width;
    const scale = 1 / Math.sqrt(variance + eps);
    for (let i = 0; i < width; i++) out[t + i] = (x[t + i] - mean) * scale * weight[i] + bias[i];
  }
  return out;
}

// x Φ(x); Φ by Abramowitz and Stegun 7.1.26, accurate to 1e-7.
function gelu(x) {
  const z = Math.abs(x) * Math.SQRT1_2, t = 1 / (1 + 0.3275911 * z);
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  const erf = 1 - tail * Math.exp(-z * z);
  return 0.5 * x * (1 + Math.sign(x) * erf);
}

// Pixels (H, W, channels) of 0 … 255 → patches (N, channels · p · p), normalised.
function patches(model, pixels) {
  const { patch, size: [height, width], mean, std } = model, channels = mean.length;
  const out = new Float32Array(height * width * channels);
  let at = 0;
  for (let row = 0; row < height; row += patch) {
    for (let column = 0; column < width; column += patch) {
      for (let c = 0; c < channels; c++) {
        for (let y = row; y < row + patch; y++) {
          for (let x = column; x < column + patch; x++) {
            out[at++] = (pixels[(y * width + x) * channels + c] / 255 - mean[c]) / std[c];
          }
        }
      }
    }
  }
  return out;
}

// A head's gate moved by −1 … 1: 0 keeps the trained gate, −1 sets it to 0 and 1 to 1.
const movedGate = (gate, by) => (by < 0 ? gate * (1 + by) : gate + (1 - gate) * by);

// softmax(v · (‖δ‖², δ_row, δ_column)) as a product over rows and columns: (N, N).
function positionalMap([square, down, right], [height, width]) {
  const rows = Array.from({ length: height }, (_, y) => axisAttention(square, down, y, height));
  const columns = Array.from({ length: width }, (_, x) => axisAttention(square, right, x, width));
  const out = new Float32Array((height * width) ** 2);
  let at = 0;
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      for (let i = 0; i < height; i++) for (let j = 0; j < width; j++) out[at++] = rows[y][i] * columns[x][j];
    }
  }
  return out;
}

// One layer's attention on the tokens `x`: the output (N, C) and each head's maps (N, N).
function attention(model, prefix, x, n, { gate = 0, strength = 1 }) {
  const { weights, width, heads, grid } = model, d = width / heads;
  const name = `${prefix}.attn`, positions = weights[`${name}.v_pos`], gating = weights[`${name}.gating`];
  const qkv = linear(x, weights[`${name}.qkv.weight`], weights[`${name}.qkv.bias`], width);
  const out = new Float32Array(n * width), layer = { heads: [], gates: gating ? [] : null, prefix: n - grid[0] * grid[1] };
  for (let h = 0; h < heads; h++) {
    const scores = new Float64Array(n), content = new Float32Array(n * n), mixed = new Float32Array(n * n);
    const position = positions ? positionalMap(Array.from(positions.subarray(3 * h, 3 * h + 3), (v) => v * strength), grid) : null;
    const share = gating && movedGate(1 / (1 + Math.exp(-gating[h])), gate);
    if (gating) layer.gates.push(share);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        let sum = 0;
        for (let k = 0, q = i * 3 * width + h * d, key = j * 3 * width + width + h * d; k < d; k++) sum += qkv[q + k] * qkv[key + k];
        scores[j] = sum / Math.sqrt(d);
      }
      const [alone, both] = mixedRow(scores, position?.subarray(i * n, (i + 1) * n), share);
      content.set(alone, i * n);
      mixed.set(both, i * n);
    }
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        const share = mixed[i * n + j], value = j * 3 * width + 2 * width + h * d;
        for (let k = 0; k < d; k++) out[i * width + h * d + k] += share * qkv[value + k];
      }
    }
    layer.heads.push({ content, position, mixed });
  }
  return [linear(out, weights[`${name}.proj.weight`], weights[`${name}.proj.bias`], width), layer];
}

// Logits and attention of one image. `change` edits positional layers: {gate: -1 … 1, strength: factor of α}.
function forward(model, pixels, change = {}) {
  const { weights, width, eps } = model;
  let x = linear(patches(model, pixels), weights["patch_embed.weight"], weights["patch_embed.bias"],
    weights["patch_embed.weight"].length / width);
  const prepend = () => {
    const longer = new Float32Array(x.length + width);
    longer.set(weights.cls_token);
    longer.set(x, width);
    x = longer;
  };
  if (model.embedsToken) prepend();
  if (weights.pos_embed) x = x.map((value, i) => value + weights.pos_embed[i]);
  const layers = [];
  for (let index = 0; index < model.depth; index++) {
    if (index === model.tokenJoins) prepend();
    const name = `blocks.${index}`, of = (part) => [weights[`${name}.${part}.weight`], weights[`${name}.${part}.bias`]];
    const [attended, layer] = attention(model, name, layerNorm(x, ...of("norm1"), eps), x.length / width, change);
    x = x.map((value, i) => value + attended[i]);
    const hidden = linear(layerNorm(x, ...of("norm2"), eps), ...of("mlp.fc1"), width).map(gelu);
    const added = linear(hidden, ...of("mlp.fc2"), hidden.length / (x.length / width));
    x = x.map((value, i) => value + added[i]);
    layers.push(layer);
  }
  x = layerNorm(x, weights["norm.weight"], weights["norm.bias"], eps);
  let read = x.slice(0, width);
  if (model.pool === "avg") {
    const first = layers.at(-1).prefix * width, count = (x.length - first) / width;
    read = read.map((_, i) => { let sum = 0; for (let t = first; t < x.length; t += width) sum += x[t + i]; return sum / count; });
  }
  const logits = linear(read, weights["head.weight"], weights["head.bias"], width);
  if (!logits.every(Number.isFinite)) throw new Error(`${model.label} returned non-finite logits`);
  const scaled = logits.map((value) => value / model.temperature);
  return { logits, probabilities: scaled.length > 1 ? softmax(scaled) : scaled.map((value) => 1 / (1 + Math.exp(-value))), layers };
}

// Mean attention distance in patches, averaged over patches; class tokens excluded (Eq. 8).
function nonlocality(map, prefix, [height, width]) {
  const patches = height * width, n = patches + prefix;
  let total = 0, known = 0;
  for (let i = 0; i < patches; i++) {
    const [sum, mass] = looked(map.subarray((i + prefix) * n + prefix, (i + prefix + 1) * n), [Math.floor(i / width), i % width], width);
    if (mass > 0) { total += sum / mass; known++; }
  }
  return known ? total / known : null;
}
