// From strokes to the 8×8 image that a model sees, as the digits' 8×8 images were made.
//
// NIST's programs brought each digit to 32×32 pixels, set or not: sheared so that its top and its bottom begin in the
// same column, as high as the image, and with strokes so thick that about the same number of pixels is set in each.
// The data set counts the set pixels in blocks of 4×4, 0 … 16, which the models see as 0 … 255.

const BITMAP = 32, BLOCK = 4;
const WIDEST = 24; // of a digit; in the data set almost none is wider
const SET = 312; // pixels, their mean in the data set
const END = 0.06; // of the height: where a digit's top and bottom are looked for
const STEEPEST = 0.5; // slant that is undone, in widths per height
const THICKEST = 4.5; // half the width of a stroke, so that a point stays one

// Squared distance of a point to the segment a b.
function squaredDistance(x, y, a, b) {
  const right = b[0] - a[0], down = b[1] - a[1], length = right * right + down * down;
  const part = length ? Math.max(0, Math.min(1, ((x - a[0]) * right + (y - a[1]) * down) / length)) : 0;
  return (x - a[0] - part * right) ** 2 + (y - a[1] - part * down) ** 2;
}

// Strokes, lists of points [x, y], as they are without their slant.
function upright(strokes) {
  const points = strokes.flatMap((stroke) => stroke.flatMap((b, at) => {
    const a = stroke[Math.max(0, at - 1)]; // also what lies between: lines may be long
    return Array.from({ length: 20 }, (_, step) => [0, 1].map((axis) => a[axis] + (b[axis] - a[axis]) * (step + 1) / 20));
  }));
  const top = Math.min(...points.map(([, y]) => y)), height = Math.max(...points.map(([, y]) => y)) - top;
  if (!height) return strokes;
  const left = (inside) => Math.min(...points.filter(([, y]) => inside((y - top) / height)).map(([x]) => x));
  const slant = (left((part) => part < END) - left((part) => part > 1 - END)) / height;
  const shear = Math.max(-STEEPEST, Math.min(STEEPEST, slant));
  return strokes.map((stroke) => stroke.map(([x, y]) => [x + shear * (y - top), y]));
}

// Strokes in any unit → how many pixels are set in each block: 64 numbers of 0 … 16.
function countBlocks(drawn) {
  const strokes = upright(drawn), all = strokes.flat(), axes = [0, 1];
  const low = axes.map((axis) => Math.min(...all.map((point) => point[axis])));
  const high = axes.map((axis) => Math.max(...all.map((point) => point[axis])));
  const away = new Float64Array(BITMAP * BITMAP);
  let radius = 2; // half the width of a stroke in pixels, by which the strokes' lines stay inside of the box
  for (let round = 0; round < 4; round++) {
    const room = [WIDEST - 2 * radius, BITMAP - 2 * radius];
    const scale = Math.min(...axes.map((axis) => room[axis] / Math.max(high[axis] - low[axis], 1e-6)));
    const placed = strokes.map((stroke) => stroke.map((point) =>
      axes.map((axis) => (point[axis] - (low[axis] + high[axis]) / 2) * scale + BITMAP / 2)));
    away.fill(Infinity);
    for (const stroke of placed) {
      for (let at = 0; at < Math.max(1, stroke.length - 1); at++) {
        const a = stroke[at], b = stroke[Math.min(at + 1, stroke.length - 1)];
        for (let y = 0, pixel = 0; y < BITMAP; y++) {
          for (let x = 0; x < BITMAP; x++, pixel++) {
            away[pixel] = Math.min(away[pixel], squaredDistance(x + 0.5, y + 0.5, a, b));
          }
        }
      }
    }
    radius = Math.min(THICKEST, Math.sqrt(away.slice().sort()[SET]));
  }
  const counts = new Uint8Array((BITMAP / BLOCK) ** 2);
  away.forEach((distance, pixel) => {
    const row = Math.floor(pixel / BITMAP / BLOCK), column = Math.floor((pixel % BITMAP) / BLOCK);
    if (distance <= radius * radius) counts[row * (BITMAP / BLOCK) + column]++;
  });
  return counts;
}

// The pixels of a drawing, (8, 8, channels) of 0 … 255, black where nothing is drawn.
function drawnPixels(strokes, channels) {
  const counts = countBlocks(strokes);
  return Uint8Array.from({ length: counts.length * channels }, (_, at) =>
    Math.round(counts[Math.floor(at / channels)] * 255 / BLOCK ** 2));
}
