// The page stores queries and keys of all heads, models and images in half precision.
// Clicking a patch computes one row of attention per head.

// -- state ------------------------------------------------------------------------------------

const state = {
  image: 0,
  place: [0.5, 0.5], // of the query, as fractions of (height, width)
  classToken: false,
  mode: "mixed",
  // The brightest colour is the maximum of each map, of its layer, or of all maps. "range" also makes the map's minimum the
  // darkest, because some layers are close to uniform.
  scale: "range",
  layer: 0, head: 0, // enlarged
  rollout: false, // shown beside the heads
  hovered: null, // {model, layer, head, key}
};
// The grid of query patches: the first model's last layer.
const GRID = DATA.models[0].layers.at(-1).grid;
// Label of "classToken": models without a class token may have registers.
const PREFIX = [...new Set(DATA.models.flatMap((model) => model.prefix ?? []))].join(" or ");
const heads = []; // heads[model][layer][head] for the selected image
const rows = new Map(); // attention of the current query, by "model.layer.head"

// -- attention --------------------------------------------------------------------------------

// Content scores of one query with all keys.
function contentScores(head, width, query) {
  const scores = new Float64Array(head.key.length / width);
  for (let j = 0; j < scores.length; j++) {
    for (let i = 0; i < width; i++) scores[j] += head.query[query * width + i] * head.key[j * width + i];
  }
  return scores;
}

// softmax(v · (‖δ‖², δ_row, δ_column)) over the keys.
function positionalAttention([square, down, right], layer, [row, column]) {
  const [height, width] = layer.key_grid;
  const rows = axisAttention(square, down, row, height), columns = axisAttention(square, right, column, width);
  return Float64Array.from({ length: rows.length * columns.length },
    (_, k) => rows[Math.floor(k / columns.length)] * columns[k % columns.length]);
}

// The query's cell on a layer's grid, and on that of the image.
const cellOf = ({ grid }) => grid.map((size, axis) => Math.min(size - 1, Math.floor(state.place[axis] * size)));
const queryCell = () => cellOf({ grid: GRID });

function queryIndex(layer) {
  if (state.classToken) return layer.prefix ? 0 : -1;
  const [row, column] = cellOf(layer);
  return layer.prefix + row * layer.grid[1] + column;
}

// A head's attention to all keys (class token and registers first), or null if the layer lacks this mode or token.
function attentionOf(model, index, number, mode = state.mode, query = null, cell = null) {
  const layer = DATA.models[model].layers[index];
  query ??= queryIndex(layer);
  cell ??= cellOf(layer);
  if (query < 0 || (mode === "position" && !layer.position)) return null;
  const scores = mode === "position" ? null : contentScores(heads[model][index][number], layer.head_dim, query);
  const position = layer.position && positionalAttention(layer.position[number], layer, cell);
  if (mode === "position") return position;
  const [content, mixed] = mixedRow(scores, position, layer.gates?.[number]);
  return mode === "content" ? content : mixed;
}

// Attention rollout (Abnar & Zuidema, 2020) needs the same tokens in every layer, as queries and as keys.
const canRollOut = ({ layers }) => layers.every((layer) => layer.prefix === layers[0].prefix &&
  [layer.grid, layer.key_grid].every((grid) => String(grid) === String(layers[0].grid)));
const ROLLOUT = "rollout"; // replaces a head's number
const steps = new Map(); // by model, for the selected image: each layer's (A + I) / 2, A the mean over heads

function stepsOf(model) {
  if (!steps.has(model)) {
    steps.set(model, DATA.models[model].layers.map((layer, index) => {
      const [height, width] = layer.grid, n = layer.prefix + height * width, step = new Float32Array(n * n);
      for (let query = 0; query < n; query++) {
        const patch = query - layer.prefix, cell = [Math.floor(patch / width), patch % width];
        for (let head = 0; head < layer.heads; head++) {
          attentionOf(model, index, head, "mixed", query, cell)
            .forEach((value, key) => { step[query * n + key] += value / (2 * layer.heads); });
        }
        step[query * n + query] += 0.5;
      }
      return step;
    }));
  }
  return steps.get(model);
}

// Share of the query's output in the last layer that comes from each input token.
function rolloutOf(model) {
  const query = queryIndex(DATA.models[model].layers[0]);
  if (query < 0) return null;
  return stepsOf(model).reduceRight((row, step) => {
    const n = row.length, before = new Float64Array(n);
    for (let at = 0; at < n; at++) for (let key = 0; key < n; key++) before[key] += row[at] * step[at * n + key];
    return before;
  }, Float64Array.from({ length: Math.sqrt(stepsOf(model)[0].length) }, (_, at) => Number(at === query)));
}

// Mean distance of a row of attention in patches, over patches only (Eq. 8).
function distanceOf(layer, attention) {
  if (!attention || state.classToken) return null;
  const { prefix, key_grid: [, columns], key_stride, key_offset } = layer;
  const [sum, mass] = looked(attention.subarray(prefix), cellOf(layer), columns, key_stride, key_offset);
  return mass > 0 ? sum / mass : null;
}

// A row's distance in the page's unit: multiples of uniform attention from the same patch.
function inUnit(layer, attention, distance) {
  const uniform = DATA.unit === "patches" ? 1 : distanceOf(layer, attention.map(() => 1)) || 1;
  return `${(distance / uniform).toFixed(2)} ${DATA.unit}`;
}

// Nonlocality of each head in the page's unit.
const distancesOf = ({ nonlocality, unit }) => nonlocality.map((value) => value === null ? null : value / unit);

// A layer's gate, if all heads agree to two decimals.
const commonGate = ({ gates }) =>
  gates && new Set(gates.map((gate) => gate.toFixed(2))).size === 1 ? gates[0].toFixed(2) : null;

// -- loading ----------------------------------------------------------------------------------

async function loadImage(image) {
  const loaded = await Promise.all(DATA.models.map(async (model, index) => {
    const bytes = await inflate(`blob-${index}-${image}`);
    let at = 0;
    const read = (layer, grid) => {
      const count = (layer.prefix + grid[0] * grid[1]) * layer.head_dim;
      at += 2 * count;
      return readHalves(bytes, at - 2 * count, count);
    };
    return model.layers.map((layer) => Array.from({ length: layer.heads }, () => (
      { query: read(layer, layer.grid), key: read(layer, layer.key_grid) })));
  }));
  heads.splice(0, heads.length, ...loaded);
  steps.clear();
}

// -- building the page --------------------------------------------------------------------------

const cells = []; // all maps on the page

// The key nearest to a position (fractions of height and width): key j is centred on query token offset + stride·j.
function keyAt(layer, ...place) {
  const [row, column] = place.map((part, axis) => {
    const stride = layer.key_stride[axis], offset = layer.key_offset[axis];
    const key = Math.floor((part * layer.grid[axis] - offset + (stride - 1) / 2) / stride);
    return Math.max(0, Math.min(layer.key_grid[axis] - 1, key));
  });
  return row * layer.key_grid[1] + column;
}

function makeCell(model, index, head, large) {
  const layer = DATA.models[model].layers[index];
  // On a strided grid, each half token shows its nearest key.
  const [height, width] = layer.grid.map((size, axis) => layer.key_stride[axis] === 1 ? layer.key_grid[axis] : 2 * size);
  const keys = Int32Array.from({ length: width * height }, (_, pixel) =>
    keyAt(layer, (Math.floor(pixel / width) + 0.5) / height, (pixel % width + 0.5) / width));
  const map = makeMap(element("img", { class: "under", alt: "" }), { width, height },
    { "data-model": model, "data-layer": index, "data-head": head });
  const { node, view } = map, label = large ? element("span", { class: "label" }) : null;
  showGate(map.strip, layer.gates?.[head]);
  if (label) node.append(label);
  const cell = { ...map, model, index, head, keys, label };
  view.addEventListener("pointermove", (event) => hover(cell, event));
  view.addEventListener("click", (event) => {
    hover(cell, event);
    const article = node.closest(".model");
    choosePart(head === ROLLOUT ? state.layer : index, head);
    article.querySelector(".large .chosen").scrollIntoView({ block: "nearest" });
  });
  // Lifting a finger fires pointerleave too; keep the readout then.
  view.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hover(null); });
  cells.push(cell);
  return node;
}

function buildModels() {
  DATA.models.forEach((model, number) => {
    const overview = element("div", { class: "overview" });
    model.layers.forEach((layer, index) => {
      const button = element("button", { title: `show layer ${index + 1} large` }, String(index + 1));
      button.addEventListener("click", () => choosePart(index));
      const row = element("div", { class: "row", "data-layer": index }, button);
      for (let head = 0; head < layer.heads; head++) row.append(makeCell(number, index, head, false));
      overview.append(row);
    });
    const most = Math.max(...model.layers.map((layer) => layer.heads));
    overview.style.setProperty("--heads", most);
    const answers = model.answers[0], [high, wide] = model.size;
    $("models").append(element("article", { class: `model ${model.family}`, "data-model": number, style: `--ratio: ${wide} / ${high}` },
      element("h2", {}, model.label), element("p", { class: "prediction" }),
      element("div", { class: "parts" },
        element("div", {}, element("p", { class: "layer" }), element("div", { class: "large" })),
        element("div", {}, makeBars(answers.length, answers.every(([name]) => name.length <= 2)), overview))));
  });
}

function buildLarge() {
  for (let at = cells.length - 1; at >= 0; at--) if (cells[at].label) cells.splice(at, 1);
  document.querySelectorAll(".model").forEach((article, number) => {
    const large = article.querySelector(".large"), layers = DATA.models[number].layers;
    const index = Math.min(state.layer, layers.length - 1);
    const gate = commonGate(layers[index]);
    article.querySelector(".layer").textContent = `layer ${index + 1}` + (gate ? ` · gate ${gate} in every head` : "");
    large.replaceChildren();
    for (let head = 0; head < layers[index].heads; head++) large.append(makeCell(number, index, head, true));
    if (state.rollout && canRollOut(DATA.models[number])) large.append(makeCell(number, layers.length - 1, ROLLOUT, true));
    const chosen = [...large.children].find((node) => node.dataset.head === String(state.head));
    (chosen ?? large.lastChild).classList.add("chosen");
    markChosen(article, index, state.head);
  });
  showImageUnderMaps();
}

function buildPlots() {
  const images = DATA.images.length === 1 ? "this image" : `these ${DATA.images.length} images`;
  $("plots").append(keys(), distancePlot("Nonlocality", images, distancesOf, highlight, choosePart));
  if (DATA.models.some((model) => model.layers.some((layer) => layer.gates))) {
    $("plots").append(plot("Gates", "gate σ(λ)", "Gate by layer: 1 is position alone, 0 content alone. Layers without dots have no gate.",
      (layer) => layer.gates, 1, highlight, choosePart));
  }
  $("plots").append(element("details", {}, element("summary", {}, "mean distance and gate of every head, as a table"), summary()));
}

// Each layer's mean distance over heads and images, each head's, and its gates.
function summary() {
  const line = (name, cells) => element("tr", {}, ...cells.map((cell) => element(name, {}, cell)));
  const rows = DATA.models.flatMap((model) => model.layers.map((layer, index) => {
    const far = distancesOf(layer).filter((value) => value !== null), listed = (values) => values.map((value) => value.toFixed(2)).join(" ");
    return line("td", [model.label, String(index + 1), far.length ? meanOf(far).toFixed(2) : "–", listed(far), layer.gates ? listed([...layer.gates]) : "–"]);
  }));
  return element("table", {}, line("th", ["model", "layer", `mean (${DATA.unit}; uniform attention: ${DATA.uniform.toFixed(2)})`, "each head", "each head's gate"]), ...rows);
}

// -- rendering ------------------------------------------------------------------------------------

// Maximum attention to a patch per map, per layer and over all maps.
const tops = new Map();

function rowOf(cell) {
  const key = `${cell.model}.${cell.index}.${cell.head}`;
  if (!rows.has(key)) {
    const rolled = cell.head === ROLLOUT;
    const attention = rolled ? rolloutOf(cell.model) : attentionOf(cell.model, cell.index, cell.head);
    rows.set(key, attention);
    const prefix = DATA.models[cell.model].layers[cell.index].prefix;
    const most = attention ? attention.subarray(prefix).reduce((a, b) => Math.max(a, b), 0) : 0;
    for (const scale of rolled ? [key] : [key, `${cell.model}.${cell.index}`, "all"]) { // rollout has its own scale
      tops.set(scale, Math.max(tops.get(scale) ?? 0, most));
    }
  }
  return rows.get(key);
}

function topOf(cell) {
  const layer = `${cell.model}.${cell.index}`;
  const scale = cell.head === ROLLOUT ? "map" : state.scale;
  return tops.get({ layer, all: "all" }[scale] ?? `${layer}.${cell.head}`);
}

function showCell(cell) {
  const layer = DATA.models[cell.model].layers[cell.index];
  const attention = rowOf(cell), distance = distanceOf(layer, attention), patches = attention?.subarray(layer.prefix);
  cell.node.classList.toggle("none", !attention);
  if (attention) paint(cell.canvas, attention, layer.prefix, topOf(cell), state.scale === "range" ? rangeOf(patches) : DATA.decades, cell.keys);
  cell.node.dataset.distance = distance === null ? "" : distance;
  cell.query.hidden = state.classToken;
  placeBox(cell.query, layer.grid, cellOf(layer));
  if (cell.label) {
    const gate = layer.gates && cell.head !== ROLLOUT && !commonGate(layer) ? ` · gate ${layer.gates[cell.head].toFixed(2)}` : "";
    const even = attention ? evennessOf(patches) : "";
    const far = distance === null ? "" : ` · distance ${inUnit(layer, attention, distance)}`;
    cell.label.textContent = `${cell.head === ROLLOUT ? "rollout, all layers" : `head ${cell.head + 1}`}${even && ` · ${even}`}${far}${gate}`;
  }
}

function show() {
  rows.clear();
  tops.clear();
  cells.forEach(rowOf); // first, as a common scale needs all rows
  cells.forEach(showCell);
  const where = { layer: "maximum of the layer", all: "maximum of all maps" };
  $("high").textContent = where[state.scale] ?? "maximum of the map";
  $("low").textContent = state.scale === "range" ? "its minimum" : `1/${10 ** DATA.decades} of it`;
  const [row, column] = queryCell();
  $("query").hidden = state.classToken;
  placeBox($("query"), GRID, [row, column]);
  $("where").textContent = state.classToken
    ? `query: the ${PREFIX}; absent from hatched layers`
    : `query: row ${row + 1}, column ${column + 1} of ${GRID[0]} × ${GRID[1]} patches`;
  $("layer-number").textContent = state.layer + 1;
  readout();
}

function readout() {
  const at = state.hovered;
  document.querySelectorAll(".hovered").forEach((node) => node.classList.remove("hovered"));
  if (!at) {
    const empty = !document.querySelector(".cell.none") ? "" : state.classToken
      ? `Hatched: layers before the ${PREFIX} is added. `
      : "Hatched: layers without positional attention. ";
    $("readout").textContent = empty + "Point at or tap a map to read its values; click or tap to enlarge it.";
    delete $("readout").dataset.attention;
    return;
  }
  document.querySelectorAll(`[data-model="${at.model}"][data-layer="${at.layer}"][data-head="${at.head}"]`)
    .forEach((node) => node.classList.add("hovered"));
  const layer = DATA.models[at.model].layers[at.layer];
  const attention = rows.get(`${at.model}.${at.layer}.${at.head}`);
  const rolled = at.head === ROLLOUT;
  const parts = [`${DATA.models[at.model].label}, ${rolled ? "rollout over all layers and heads" : `layer ${at.layer + 1}, head ${at.head + 1}`}`];
  if (attention && at.key !== undefined) {
    const value = attention[layer.prefix + at.key];
    const row = Math.floor(at.key / layer.key_grid[1]), column = at.key % layer.key_grid[1];
    parts.push(`${number(100 * value)}% to row ${row + 1}, column ${column + 1}`);
    $("readout").dataset.attention = value;
  }
  const distance = distanceOf(layer, attention);
  const even = attention ? evennessOf(attention.subarray(layer.prefix)) : "";
  if (even) parts.push(even === "uniform" ? "uniform: the same to every patch" : "nearly uniform: the colours show differences of less than a factor of two");
  if (distance !== null) parts.push(`mean distance ${inUnit(layer, attention, distance)}`);
  if (attention && layer.prefix) parts.push(`${number(100 * attention[0])}% to the ${DATA.models[at.model].prefix}`);
  if (attention && layer.prefix > 1) {
    const others = attention.subarray(1, layer.prefix).reduce((a, b) => a + b);
    parts.push(`${number(100 * others)}% to the ${layer.prefix - 1} other prefix tokens`);
  }
  if (layer.gates && !rolled) parts.push(`gate ${layer.gates[at.head].toFixed(3)}`);
  $("readout").textContent = parts.join(" · ");
}

function highlight(model, layer, head, key) {
  state.hovered = model === undefined ? null : { model, layer, head, key };
  readout();
}

function hover(cell, event) {
  if (!cell) return highlight();
  const layer = DATA.models[cell.model].layers[cell.index], box = cell.canvas.getBoundingClientRect();
  const key = keyAt(layer, (event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width);
  highlight(cell.model, cell.index, cell.head, key);
}

function showImageUnderMaps() {
  const { source, own } = DATA.images[state.image];
  document.querySelectorAll(".under").forEach((image) => { image.src = own[image.closest(".cell").dataset.model] ?? source; });
}

// -- actions ----------------------------------------------------------------------------------------

async function setImage(image) {
  await loadImage(image);
  state.image = image;
  const shown = DATA.images[image];
  $("image").src = shown.source;
  $("image").alt = $("named").textContent = described(shown.name, shown.label);
  await $("image").decode();
  const large = $("image").naturalWidth > 64;
  document.body.classList.toggle("smooth", large);
  document.body.style.setProperty("--ratio", `${$("image").naturalWidth} / ${$("image").naturalHeight}`);
  document.querySelectorAll("#thumbnails button").forEach((button, at) =>
    button.setAttribute("aria-pressed", at === image));
  document.querySelectorAll(".model").forEach((article, at) => {
    const answers = DATA.models[at].answers[image];
    if (!answers.length) return; // features
    const [name, part] = showBars(article.querySelector(".bars"), answers);
    article.querySelector(".prediction").replaceChildren(...predicted(name, part, shown.label));
  });
  showImageUnderMaps();
  show();
}

function choosePart(layer, head = state.head) {
  const depth = Math.max(...DATA.models.map((model) => model.layers.length));
  const most = Math.max(...DATA.models.flatMap(({ layers }) => layers.map((each) => each.heads)));
  state.layer = Math.max(0, Math.min(depth - 1, layer));
  state.head = head === ROLLOUT ? head : head % most || 0; // the head after rollout is the first
  $("layer").value = state.layer + 1;
  buildLarge();
  show();
}

function chooseCell(row, column) {
  state.place = [row, column].map((value, axis) =>
    (Math.max(0, Math.min(GRID[axis] - 1, value)) + 0.5) / GRID[axis]);
  setClassToken(false);
}

function setClassToken(on) {
  state.classToken = on;
  $("class-token").checked = on;
  show();
}

function listen() {
  $("layer").addEventListener("input", () => choosePart(Number($("layer").value) - 1));
  $("scale").addEventListener("change", () => { state.scale = $("scale").value; show(); });
  $("opacity").addEventListener("input", () =>
    document.documentElement.style.setProperty("--opacity", $("opacity").value / 100));
  $("rollout").addEventListener("change", () => { state.rollout = $("rollout").checked; buildLarge(); show(); });
  $("class-token").addEventListener("change", () => setClassToken($("class-token").checked));
  listenTo((key) => {
    if (key === "t" && !$("class-token-choice").hidden) setClassToken(!state.classToken);
    else if (key >= "1" && key <= "9" && key <= DATA.images.length) setImage(Number(key) - 1);
  });
}

async function start() {
  DATA.images.forEach((image, index) => {
    const button = element("button", { title: image.name, "aria-label": image.name },
      element("img", { src: image.source, alt: "" }));
    button.addEventListener("click", () => setImage(index));
    $("thumbnails").append(button);
  });
  $("thumbnails").hidden = DATA.images.length === 1;
  const layers = DATA.models.flatMap((model) => model.layers);
  $("layer").max = Math.max(...DATA.models.map((model) => model.layers.length));
  $("modes").hidden = !layers.some((layer) => layer.position);
  $("class-token-choice").hidden = !layers.some((layer) => layer.prefix);
  document.querySelectorAll(".rollout").forEach((node) => { node.hidden = !DATA.models.some(canRollOut); });
  document.querySelectorAll(".prefix").forEach((node) => { node.textContent = PREFIX; });
  $("scale").value = state.scale;
  buildModels();
  buildPlots();
  buildLarge();
  listen();
  await setImage(0);
  document.documentElement.dataset.ready = performance.now().toFixed(1);
}

// For the console: explorer.attention(model, layer, head, mode) and explorer.rollout(model) give a row as numbers.
window.explorer = { state, attention: attentionOf, rollout: rolloutOf, data: DATA };
start();
