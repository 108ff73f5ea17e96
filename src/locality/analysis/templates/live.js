// The live page: runs all models on a drawn or chosen image and shows their heads' attention from one patch.

// -- state ------------------------------------------------------------------------------------

const state = {
  pixels: null, // of the current image, (H, W, channels), 0 … 255
  example: 0, // its index; null for a drawing or photograph
  named: "", // a photograph's file name
  strokes: [], // of the drawing: lists of points, in fractions of the pad
  cell: [0, 0], // the query patch
  mode: "mixed",
  layer: 0, head: 0, // enlarged
  change: { gate: 0, strength: 1 }, // see `forward`
};
const [HEIGHT, WIDTH] = DATA.size;
const BARE = Math.max(HEIGHT, WIDTH) <= 16; // so few pixels under a map would be mistaken for attention
const models = []; // with weights
const examples = []; // pixels
const answers = []; // each model's output for the current image
const GRID = DATA.models[0].grid; // of the query patch; models with another grid use the patch at its centre

const queryCell = () => state.cell;
const cellOf = (model) => state.cell.map((at, axis) => Math.floor((at + 0.5) / GRID[axis] * model.grid[axis]));

// -- building the page --------------------------------------------------------------------------

const small = [], large = []; // the maps on the page

function mapOf(model, about) {
  const [height, width] = models[model].grid;
  return { ...makeMap(element("canvas", { class: "under", width: WIDTH, height: HEIGHT }), { width, height }), model, ...about };
}

function buildModel(model, number) {
  const few = model.classes.length <= 12;
  const bars = makeBars(few ? model.classes.length : 5, few && model.classes.every((name) => name.length <= 2));
  const parts = ["content", "position", "mixed"].filter((part) => part !== "position" || model.positional);
  const apart = element("div", { class: "large" });
  for (const part of model.positional ? parts : ["mixed"]) {
    const map = mapOf(number, { part });
    map.label = element("figcaption", { class: "label" });
    map.node.append(map.label);
    large.push(map);
    apart.append(map.node);
  }
  const overview = element("div", { class: "overview" });
  overview.style.setProperty("--heads", model.heads);
  for (let index = 0; index < model.depth; index++) {
    const choose = element("button", { type: "button", title: `layer ${index + 1}`, "aria-label": `show layer ${index + 1} large` }, String(index + 1));
    choose.addEventListener("click", () => choosePart(index, state.head));
    const row = element("div", { class: "row", "data-layer": index }, choose);
    for (let head = 0; head < model.heads; head++) {
      const map = mapOf(number, { layer: index, head });
      map.node.addEventListener("click", () => choosePart(index, head));
      small.push(map);
      row.append(map.node);
    }
    row.append(element("span", { class: "far", title: `nonlocality on this image (${DATA.unit})` }));
    overview.append(row);
  }
  return element("article", { class: `model ${model.family}`, "data-model": number },
    element("h2", {}, `${model.label} `, element("small")), element("p", { class: "prediction" }), bars,
    element("h3"), apart, element("h3", {}, "All layers and heads ", element("small", {}, "with each layer’s nonlocality")), overview);
}

function build() {
  document.body.style.setProperty("--ratio", `${WIDTH} / ${HEIGHT}`);
  document.body.classList.toggle("smooth", Math.max(HEIGHT, WIDTH) >= 64);
  document.body.classList.toggle("bare", BARE);
  Object.assign($("image"), { width: WIDTH, height: HEIGHT });
  $("models").append(...models.map(buildModel));
  // On narrow screens the models are below the drawing; this line beside it shows their predictions.
  $("brief").append(...models.map((model) => element("span", { class: `key ${model.family}` }, `${model.label} `,
    element("strong", { dir: "auto" }), element("span"), element("small"))));
  examples.forEach((pixels, at) => {
    const canvas = element("canvas", { width: WIDTH, height: HEIGHT });
    paintPixels(canvas, pixels);
    const name = [`example ${at + 1}`, exampleName(at)].filter(Boolean).join(": ");
    const button = element("button", { type: "button", title: name, "aria-label": name }, canvas);
    button.addEventListener("click", () => chooseExample(at));
    $("thumbnails").append(button);
  });
  const positional = models.some((model) => model.positional), gated = models.some((model) => model.gated);
  $("modes").hidden = !positional;
  $("moving").hidden = !positional;
  $("gate-choice").hidden = $("content-only").hidden = !gated;
}

// An example's file name (if any) and class.
const exampleName = (at) => (DATA.names.length ? described(DATA.names[at], DATA.labels[at]) : DATA.labels[at]);

// -- showing ------------------------------------------------------------------------------------

function paintPixels(canvas, pixels) {
  const context = canvas.getContext("2d"), image = context.createImageData(WIDTH, HEIGHT), n = DATA.channels;
  for (let at = 0; at < WIDTH * HEIGHT; at++) {
    for (let channel = 0; channel < 3; channel++) image.data[4 * at + channel] = pixels[n * at + Math.min(channel, n - 1)];
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

// A map's row for the query patch; null if the layer lacks this part.
function rowOf(model, layer, head, part) {
  const { prefix, heads } = answers[model].layers[layer], map = heads[head][part];
  if (!map) return null;
  const [row, column] = cellOf(models[model]), [height, width] = models[model].grid, n = height * width + prefix;
  const query = prefix + row * width + column;
  return map.subarray(query * n, (query + 1) * n);
}

function showMap(map, layer, head, part) {
  const { grid } = models[map.model], found = answers[map.model].layers[layer], row = rowOf(map.model, layer, head, part);
  map.node.classList.toggle("none", !row);
  const patches = row?.subarray(found.prefix);
  if (row) paint(map.canvas, row, found.prefix, Math.max(...patches), rangeOf(patches));
  placeBox(map.query, grid, cellOf(models[map.model]));
  showGate(map.strip, found.gates?.[head]);
}

function showAnswer(article, model, number) {
  const answer = answers[number];
  const bars = article.querySelector(".bars"), all = model.classes.map((name, at) => [name, answer.probabilities[at]]);
  if (bars.children.length < all.length) all.sort((one, other) => other[1] - one[1]).splice(bars.children.length);
  const [best, part] = showBars(bars, all), label = DATA.labels[state.example];
  article.querySelector(".prediction").replaceChildren(...predicted(best, part, label));
  answer.best = best;
  const [name, share] = $("brief").children[number].children;
  name.textContent = best;
  share.textContent = ` ${percent(part)} `;
}

function showLarge(article, model, number) {
  const layer = Math.min(state.layer, model.depth - 1), head = Math.min(state.head, model.heads - 1);
  const { gates } = answers[number].layers[layer], gate = gates?.[head];
  article.querySelector("h3").textContent = `Layer ${layer + 1}, head ${head + 1}`;
  for (const map of large.filter((each) => each.model === number)) {
    showMap(map, layer, head, map.part);
    const share = { content: 1 - gate, position: gate }[map.part];
    map.label.textContent = map.part === "mixed"
      ? (gates ? "= mixed" : model.positional && rowOf(number, layer, head, "position") ? "one softmax of both" : "content alone")
      : (gates ? `${share.toFixed(2)} × ${map.part}` : map.part);
  }
  markChosen(article, layer, head);
  article.querySelectorAll(".far").forEach((node, at) => {
    node.textContent = meanOf(model.distances(answers[number].layers[at])).toFixed(2);
  });
}

function showPlot() {
  DATA.models.forEach((model, number) => {
    model.layers = answers[number].layers.map((layer) => ({ far: models[number].distances(layer) }));
  });
  $("plots").replaceChildren(keys(), distancePlot("Nonlocality of this image", "this image", ({ far }) => far, () => {}, choosePart));
}

// A text summary of the page, for screen readers too.
function describe() {
  const sentences = models.map((model, number) =>
    `${model.label} predicts ${answers[number].best} (${percent(Math.max(...answers[number].probabilities))}).`);
  const [row, column] = state.cell, layers = [];
  models.forEach((model, number) => {
    const layer = Math.min(state.layer, model.depth - 1), head = Math.min(state.head, model.heads - 1);
    const found = answers[number].layers[layer], attention = rowOf(number, layer, head, "mixed").subarray(found.prefix);
    const top = attention.indexOf(Math.max(...attention)), width = model.grid[1];
    const [sum, mass] = looked(attention, cellOf(model), width);
    layers.push(`head ${head + 1} of ${model.label}’s layer ${layer + 1} attends ${(sum / mass).toFixed(2)} patches away on average, ` +
      `most (${percent(attention[top])}) to row ${Math.floor(top / width) + 1}, column ${top % width + 1}`);
  });
  return `${sentences.join(" ")} From row ${row + 1}, column ${column + 1}, ${layers.join("; ")}.`;
}

let describing = 0;

function show() {
  const [row, column] = state.cell;
  placeBox($("query"), GRID, state.cell);
  $("named").textContent = state.named || (state.example !== null && exampleName(state.example)) || "";
  $("where").textContent = `row ${row + 1}, column ${column + 1} of ${GRID.join(" × ")} patches`;
  document.querySelectorAll(".model").forEach((article, number) => {
    showAnswer(article, models[number], number);
    showLarge(article, models[number], number);
  });
  for (const map of small) showMap(map, map.layer, map.head, state.mode);
  // Delayed: screen readers stay silent while the user draws.
  clearTimeout(describing);
  describing = setTimeout(() => { $("said").textContent = describe(); showPlot(); }, 300);
}

// -- computing ----------------------------------------------------------------------------------

let asked = 0; // time of the first change not shown yet; 0 if none

function update() {
  if (asked) return;
  asked = performance.now();
  requestAnimationFrame(() => {
    compute();
    live.times.push(performance.now() - asked);
    asked = 0;
  });
}

function compute() {
  models.forEach((model, number) => { answers[number] = forward(model, state.pixels, state.change); });
  paintPixels($("image"), state.pixels);
  if (!BARE) document.querySelectorAll(".under").forEach((canvas) => paintPixels(canvas, state.pixels));
  show();
}

// Counts the examples predicted correctly, one per timer tick so that the page stays responsive. Models without positional
// attention have no sliders and are counted once.
let counting = 0;

function count() {
  clearTimeout(counting);
  const waiting = models.map((_, number) => number).filter((number) => models[number].positional || !models[number].counted);
  const labelled = examples.map((_, at) => at).filter((at) => DATA.labels[at]), count = labelled.length;
  if (!count || !waiting.length) return;
  const right = models.map(() => 0), places = document.querySelectorAll(".model");
  const next = () => {
    const at = labelled.pop();
    for (const number of waiting) {
      const { classes } = models[number], { logits } = forward(models[number], examples[at], state.change);
      right[number] += classes[logits.indexOf(Math.max(...logits))] === DATA.labels[at];
    }
    if (labelled.length) { counting = setTimeout(next); return; }
    for (const number of waiting) {
      models[number].counted = true;
      places[number].dataset.right = right[number];
      places[number].querySelector("h2 small").textContent = `${right[number]} of ${count} examples correct`;
      $("brief").children[number].lastChild.textContent = `${right[number]} of ${count} correct`;
    }
  };
  counting = setTimeout(next, 60);
}

// -- actions ------------------------------------------------------------------------------------

// Set the current image: an example (by index), a drawing, or a photograph (by file name).
function look(pixels, example = null, named = "") {
  Object.assign(state, { pixels, example, named });
  if (example !== null || named) state.strokes = [];
  showDrawing();
  update();
}

const chooseExample = (at) => look(examples[at], at);

async function choosePhotograph(file) {
  if (!file) return;
  try {
    look(await photographPixels(file), null, file.name);
  } catch {
    $("named").textContent = `this browser cannot read ${file.name} as an image.`;
  }
}

function choosePart(layer, head) {
  const most = (of) => Math.max(...models.map(of));
  state.layer = Math.max(0, Math.min(most((model) => model.depth) - 1, layer));
  state.head = head % most((model) => model.heads);
  show();
}

function chooseCell(row, column) {
  state.cell = [row, column].map((at, axis) => Math.max(0, Math.min(GRID[axis] - 1, at)));
  show();
}

// Slider −100 … 100 → factor of α: 0 … 1 for the left half, 1 … 10 for the right.
const factor = (at) => (at < 0 ? 1 + at / 100 : 10 ** (at / 100));

function move() {
  const gate = Number($("gate").value), strength = Number($("strength").value);
  state.change = { gate: gate / 100, strength: factor(strength) };
  const ways = gate === 100 ? "1, position alone" : gate === -100 ? "0, content alone" : `${Math.abs(gate)}% of the way to ${gate > 0 ? 1 : 0}`;
  $("gate-value").textContent = gate ? ways : "as trained";
  $("strength-value").textContent = strength ? `× ${factor(strength).toFixed(2)}` : "as trained";
  for (const slider of ["gate", "strength"]) $(slider).setAttribute("aria-valuetext", $(`${slider}-value`).textContent);
  $("trained").disabled = !gate && !strength;
  $("content-only").disabled = gate === -100;
  // With all gates at 0, position has no effect.
  $("strength").disabled = gate === -100 && models.every((model) => model.gated || !model.positional);
  update();
  count();
}

function showDrawing() {
  document.querySelectorAll("#thumbnails button").forEach((button, at) => button.setAttribute("aria-pressed", at === state.example));
  $("image").setAttribute("aria-label", state.example === null ? state.named || "your drawing" : $("thumbnails").children[state.example].title);
  if (!DATA.digits) return;
  $("hint").hidden = state.strokes.length > 0;
  const pad = $("pad"), context = pad.getContext("2d");
  context.clearRect(0, 0, pad.width, pad.height);
  Object.assign(context, { lineWidth: 0.07 * pad.width, lineCap: "round", lineJoin: "round", strokeStyle: getComputedStyle(pad).color });
  for (const stroke of state.strokes) {
    context.beginPath();
    for (const [x, y] of [stroke[0], ...stroke]) context.lineTo(x * pad.width, y * pad.height);
    context.stroke();
  }
}

const draw = () => look(drawnPixels(state.strokes, DATA.channels));

function listenToPad() {
  const pad = $("pad");
  let stroke = null;
  const add = (event) => {
    const box = pad.getBoundingClientRect();
    for (const each of event.getCoalescedEvents?.() ?? []) stroke.push([(each.clientX - box.left) / box.width, (each.clientY - box.top) / box.height]);
    const point = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const last = stroke.at(-1);
    if (!last || Math.hypot(point[0] - last[0], point[1] - last[1]) > 0.01) stroke.push(point);
  };
  pad.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pad.setPointerCapture(event.pointerId);
    stroke = [];
    state.strokes.push(stroke);
    add(event);
    draw();
  });
  pad.addEventListener("pointermove", (event) => { if (stroke) { add(event); draw(); } });
  for (const end of ["pointerup", "pointercancel"]) pad.addEventListener(end, () => { stroke = null; });
  $("clear").addEventListener("click", () => { state.strokes = []; look(new Uint8Array(HEIGHT * WIDTH * DATA.channels)); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showDrawing);
}

function pressed(key) {
  if (key === "n") {
    chooseExample(((state.example ?? -1) + 1) % examples.length);
  } else if (DATA.digits && /^\d$/.test(key)) {
    // Repeated presses cycle through the digit's examples.
    const those = examples.map((_, at) => at).filter((at) => DATA.labels[at] === key);
    if (those.length) chooseExample(those.find((at) => at > (state.example ?? -1)) ?? those[0]);
  }
}

function listen() {
  for (const slider of ["gate", "strength"]) $(slider).addEventListener("input", move);
  $("content-only").addEventListener("click", () => { $("gate").value = -100; move(); });
  $("trained").addEventListener("click", () => { $("gate").value = $("strength").value = 0; move(); });
  listenTo(pressed);
  $("own").addEventListener("change", () => { choosePhotograph($("own").files[0]); $("own").value = ""; });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); choosePhotograph(event.dataTransfer.files[0]); });
  if (DATA.digits) listenToPad();
}

async function start() {
  for (const [number, about] of DATA.models.entries()) {
    const model = unpackModel(about, await inflate(`weights-${number}`));
    model.positional = model.kind !== "sa";
    model.gated = model.kind === "gpsa";
    model.distances = (layer) => layer.heads.map((head) => {
      const far = nonlocality(head.mixed, layer.prefix, model.grid);
      return far && far / model.unit;
    });
    models.push(model);
  }
  const pixels = await inflate("images"), size = HEIGHT * WIDTH * DATA.channels;
  if (pixels.length !== DATA.images * size) throw new Error("its example images are incomplete");
  for (let at = 0; at < DATA.images; at++) examples.push(pixels.subarray(at * size, (at + 1) * size));
  state.pixels = examples[0];
  state.cell = GRID.map((size) => Math.floor(size / 2));
  build();
  listen();
  showDrawing();
  move();
  requestAnimationFrame(() => { document.documentElement.dataset.ready = performance.now().toFixed(1); });
}

// For the console: live.forward(live.models[0], live.state.pixels, {gate: -1}) returns logits and all maps.
window.live = { state, models, examples, forward, countBlocks, times: [] };
start();
