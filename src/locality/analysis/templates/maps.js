"use strict";
// Shared by the explorer and the live page: stored numbers, attention, colours, maps, plots, listeners.

const DATA = JSON.parse(document.getElementById("data").textContent); // models and settings
const $ = (id) => document.getElementById(id);

// -- numbers --------------------------------------------------------------------------------------

// Half-precision values by bit pattern: not all browsers have Float16Array yet.
const HALF = Float32Array.from({ length: 1 << 16 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = (bits & 1023) / 1024;
  const size = exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction;
  return bits >> 15 ? -size : size;
});

// Half-precision numbers, stored as all low bytes followed by all high bytes.
function readHalves(bytes, start, count) {
  const numbers = new Float32Array(count);
  for (let i = 0; i < count; i++) numbers[i] = HALF[bytes[start + i] | (bytes[start + count + i] << 8)];
  return numbers;
}

function softmax(scores) {
  let top = -Infinity, sum = 0;
  for (const score of scores) top = Math.max(top, score);
  const weights = scores.map((score) => Math.exp(score - top));
  for (const weight of weights) sum += weight;
  return weights.map((weight) => weight / sum);
}

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// softmax(quadratic · δ² + linear · δ) over the keys of one axis: positional attention is the product of both axes'.
function axisAttention(quadratic, linear, query, length) {
  return softmax(Float64Array.from({ length }, (_, key) => (quadratic * (key - query) + linear) * (key - query)));
}

// A row of a head's attention, by content alone and mixed: with `position` by the gate (Eq. 7), or without a gate in one softmax (Eq. 4).
function mixedRow(scores, position, gate) {
  const content = softmax(scores);
  if (!position) return [content, content];
  if (gate === undefined) return [content, softmax(scores.map((score, key) => score + Math.log(position[key])))];
  return [content, content.map((value, key) => (1 - gate) * value + gate * position[key])];
}

// A row of attention from the patch `query`: [sum of attention · distance, sum of attention]. Key j is centred on query token offset + stride·j.
function looked(row, query, columns, stride = [1, 1], offset = [0, 0]) {
  let sum = 0, mass = 0;
  for (let j = 0; j < row.length; j++) {
    const down = Math.floor(j / columns) * stride[0] + offset[0] - query[0];
    const right = j % columns * stride[1] + offset[1] - query[1];
    sum += row[j] * Math.sqrt(down * down + right * right);
    mass += row[j];
  }
  return [sum, mass];
}

async function inflate(name) {
  const packed = await fetch("data:application/octet-stream;base64," + $(name).textContent);
  const stream = packed.body.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// -- elements ------------------------------------------------------------------------------------

const SVG = new Set(["svg", "circle", "line", "polyline", "text", "title"]);

function element(name, attributes = {}, ...children) {
  const node = SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const number = (value) => (value >= 0.1 ? value.toFixed(2) : value.toPrecision(2).replace("-", "−"));

// -- colours -------------------------------------------------------------------------------------

// Every fifth of viridis' 256 colours; linear interpolation between them is exact to 1/255.
const VIRIDIS = (
  "44015446085c471063481769481d6f482475472a7a46307e453781433d844142873f48893d4e8a" +
  "3a538b38598c355e8d33638d31688e2e6d8e2c718e2a768e297b8e27808e25848e23898e218e8d" +
  "20928c1f978b1e9c891fa18821a58524aa8328ae802eb37c35b7793dbc7446c06f50c46a5ac864" +
  "65cb5e70cf577cd25089d54895d840a2da37b0dd2fbddf26cae11fd8e219e5e419f1e51dfde725"
).match(/../g).map((pair) => parseInt(pair, 16));
const COLOURS = Array.from({ length: 256 }, (_, at) => {
  const low = 3 * Math.floor(at / 5), part = (at % 5) / 5;
  return [0, 1, 2].map((channel) => {
    const from = VIRIDIS[low + channel], to = VIRIDIS[low + channel + 3] ?? from;
    return Math.round(from + (to - from) * part);
  });
});

// "uniform" if attention to all patches is equal within 10%, "nearly uniform" within a factor of two, else "".
function evennessOf(patches) {
  const ratio = Math.max(...patches) / Math.min(...patches);
  return ratio <= 1.1 ? "uniform" : ratio <= 2 ? "nearly uniform" : "";
}

// Decades between the least and the most attention to a patch; 0 for uniform attention.
const rangeOf = (patches) =>
  (evennessOf(patches) === "uniform" ? 0 : Math.min(DATA.decades, Math.log10(Math.max(...patches) / Math.min(...patches))));

// Paint a map: `top` gets the brightest colour and top / 10^decades the darkest; 0 decades paints all pixels alike. Pixel i shows
// key keys[i], or key i without `keys`.
function paint(canvas, attention, prefix, top, decades = DATA.decades, keys = null) {
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  for (let pixel = 0, at = 0; at < image.data.length; pixel++, at += 4) {
    const value = attention[prefix + (keys ? keys[pixel] : pixel)];
    const part = decades ? 1 + Math.log10(Math.max(value / (top || 1), 10 ** -decades)) / decades : 0.5;
    const colour = COLOURS[Math.round(255 * part)];
    image.data[at] = colour[0];
    image.data[at + 1] = colour[1];
    image.data[at + 2] = colour[2];
    image.data[at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

// A small map: a canvas over the image `under`, with the query's box and a strip for the head's gate.
function makeMap(under, size, attributes = {}) {
  const canvas = element("canvas", size), query = element("i", { class: "query" });
  const view = element("div", { class: "view" }, under, canvas, query), strip = element("span", { class: "gate absent" });
  return { node: element("figure", { class: "cell", ...attributes }, view, strip), view, canvas, query, strip };
}

// Layers without gates keep the strip's space, so that rows of different models align.
function showGate(strip, gate) {
  strip.classList.toggle("absent", gate === undefined);
  if (gate === undefined) return;
  strip.style.background = `color-mix(in srgb, #c1121f ${100 * gate}%, #ffffff)`;
  strip.title = `gate ${gate.toFixed(2)}`;
}

// Mark the enlarged head in a model's overview.
function markChosen(article, layer, head) {
  article.querySelectorAll(".row").forEach((row, at) => {
    row.classList.toggle("selected", at === layer);
    row.querySelectorAll(".cell").forEach((cell, which) => cell.classList.toggle("chosen", at === layer && which === head));
  });
}

function placeBox(box, grid, cell) {
  box.style.top = `${100 * cell[0] / grid[0]}%`;
  box.style.left = `${100 * cell[1] / grid[1]}%`;
  box.style.height = `${100 / grid[0]}%`;
  box.style.width = `${100 / grid[1]}%`;
}

// -- answers ---------------------------------------------------------------------------------------

const percent = (part) => `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)}%`;

// One bar per class; upright for names as short as digits.
function makeBars(count, upright) {
  const row = () => element("li", {}, element("span"), element("i"), element("b"));
  return element("ol", { class: upright ? "bars upright" : "bars" }, ...Array.from({ length: count }, row));
}

// Fill bars from pairs [name, probability]; returns the most probable pair.
function showBars(bars, answers) {
  const best = answers.reduce((one, other) => (other[1] > one[1] ? other : one));
  answers.forEach(([name, part], at) => {
    const item = bars.children[at], [label, bar, value] = item.children;
    label.textContent = label.title = name;
    value.textContent = percent(part);
    bar.style.setProperty("--part", part);
    item.classList.toggle("best", name === best[0]);
    item.classList.toggle("low", part < 0.05);
  });
  return best;
}

// The prediction as nodes. Names are isolated: Arabic would reorder the numbers beside it.
const predicted = (name, part, label) => ["predicts ", element("strong", { dir: "auto" }, name), ` (${percent(part)})`,
  ...(label && label !== name ? [", labelled ", element("bdi", {}, label)] : [])];

// An image's file name and label.
const described = (name, label) => [name, label && `labelled ${label}`].filter(Boolean).join(" · ");

// -- plots ---------------------------------------------------------------------------------------

// A plot of one value per head by layer, with the mean. `axis` is the y label; `marked` is called with the hovered dot's model, layer and head, `chosen` with
// the clicked dot's layer and head; `even` is the position of a dashed line.
function plot(title, axis, caption, valuesOf, largest, marked, chosen, even = null) {
  const [width, height, left, bottom, right] = [460, 226, 50, 42, 8];
  const depth = Math.max(...DATA.models.map((model) => model.layers.length));
  const ticks = ticksTo(largest), top = ticks.at(-1);
  const x = (layer) => left + (layer + 0.5) * (width - left - right) / depth;
  const y = (value) => height - bottom - value / top * (height - bottom - 10);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const value of ticks) {
    svg.append(element("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, value));
  }
  for (let layer = 0; layer < depth; layer += Math.ceil(depth / 24)) {
    svg.append(element("text", { x: x(layer), y: height - bottom + 18, "text-anchor": "middle" }, layer + 1));
  }
  if (even !== null) svg.append(element("line", { class: "even", x1: left, x2: width - right, y1: y(even), y2: y(even) }));
  const middle = (height - bottom + 10) / 2;
  svg.append(element("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "layer"),
    element("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, axis));
  DATA.models.forEach((model, number) => {
    const means = [], dots = [];
    model.layers.forEach((layer, index) => {
      const values = valuesOf(layer);
      if (!values) return;
      const known = values.filter((value) => value !== null);
      means.push(`${x(index)},${y(meanOf(known))}`);
      values.forEach((value, head) => {
        if (value === null) return;
        const shift = (number - (DATA.models.length - 1) / 2) * 8;
        const dot = element("circle", {
          class: `dot ${model.family}`, cx: x(index) + shift, cy: y(value), r: 4,
          "data-model": number, "data-layer": index, "data-head": head, "data-value": value,
        }, element("title", {}, `${model.label}, layer ${index + 1}, head ${head + 1}: ${value.toFixed(3)}`));
        dot.addEventListener("pointerenter", () => marked(number, index, head));
        dot.addEventListener("pointerleave", () => marked());
        dot.addEventListener("click", () => chosen(index, head));
        dots.push(dot);
      });
    });
    svg.append(element("polyline", { class: `mean ${model.family}`, points: means.join(" ") }), ...dots);
  });
  return element("figure", {}, element("h2", {}, title), svg, element("figcaption", {}, caption));
}

// The legend, if there are several models.
function keys() {
  const shown = DATA.models.length > 1 ? DATA.models : [];
  return element("p", { class: "keys" }, ...shown.map(({ label, family }) => element("span", { class: `key ${family}` }, label)));
}

// The plot of the heads' mean attention distance, in the page's unit.
function distancePlot(title, images, valuesOf, marked, chosen) {
  const far = DATA.models.flatMap((model) => model.layers.flatMap(valuesOf));
  return plot(title, `mean distance (${DATA.unit})`, `Mean attention distance by layer, over ${images}. Each dot is a head; the line is their mean. ` +
    `Dashed: uniform attention (${number(DATA.uniform)}).`, valuesOf, Math.max(...far, DATA.uniform), marked, chosen, DATA.uniform);
}

// 3 to 6 round ticks 0, step, 2 step, …, the last at least `largest`.
function ticksTo(largest) {
  const unit = 10 ** Math.floor(Math.log10((largest || 1) / 5));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((each) => 5 * each >= largest * (1 - 1e-9));
  const count = Math.ceil(largest / step * (1 - 1e-9));
  return Array.from({ length: count + 1 }, (_, at) => Number((at * step).toPrecision(6)));
}

// -- listeners -----------------------------------------------------------------------------------

// Both pages have `state`, `GRID`, `queryCell`, `chooseCell`, `choosePart` and `show`.
const MODES = { m: "mixed", c: "content", p: "position" };
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function chooseMode(mode) {
  state.mode = mode;
  document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
  show();
}

// `others` is called with keys that only one of the pages has.
function listenTo(others) {
  const grid = $("grid"), colours = $("colours").getContext("2d");
  COLOURS.forEach((colour, at) => { colours.fillStyle = `rgb(${colour})`; colours.fillRect(at, 0, 1, 1); });
  grid.style.setProperty("--rows", GRID[0]);
  grid.style.setProperty("--columns", GRID[1]);
  grid.addEventListener("click", (event) => {
    const box = grid.getBoundingClientRect();
    chooseCell(Math.floor((event.clientY - box.top) / box.height * GRID[0]), Math.floor((event.clientX - box.left) / box.width * GRID[1]));
  });
  document.querySelectorAll('input[name="mode"]').forEach((input) => input.addEventListener("change", () => chooseMode(input.value)));
  document.addEventListener("keydown", (event) => {
    // Many keyboards have brackets on AltGr or Option, which set these flags, too.
    const bracket = event.key === "[" || event.key === "]";
    if (event.metaKey || (!bracket && (event.ctrlKey || event.altKey))) return;
    if (event.target.matches("select")) return; // letters select its options
    if (event.key in MOVES) {
      if (event.target.matches("input")) return; // arrows move its slider
      chooseCell(...queryCell().map((at, axis) => at + MOVES[event.key][axis]));
      event.preventDefault();
    } else if (bracket) {
      choosePart(state.layer + (event.key === "]" ? 1 : -1), state.head);
    } else if (event.key === "h") {
      choosePart(state.layer, state.head + 1);
    } else if (event.key in MODES) {
      if (!$("modes").hidden) chooseMode(MODES[event.key]);
    } else {
      others(event.key);
    }
  });
}
