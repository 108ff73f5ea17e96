// Strokes → 8×8 images, processed like those of the digits data set.
//
// NIST's programs normalised each digit to a binary 32×32 bitmap: sheared so that its top and bottom start in the same
// column, scaled to the full height, with strokes thick enough that about the same number of pixels is set in each.
// The data set counts set pixels in 4×4 blocks, 0 … 16; the models see 0 … 255.

const BITMAP = 32, BLOCK = 4;
const WIDEST = 24; // maximum width of a digit; almost none in the data set is wider
const SET = 312; // mean number of set pixels in the data set
const END = 0.06; // fraction of the height taken as a digit's top or bottom
const STEEPEST = 0.5; // maximum slant removed, in widths per height
const THICKEST = 4.5; // maximum half width of a stroke, so that a dot stays a dot

// Squared distance from a point to the segment a b.
function squaredDistance(x, y, a, b) {
  const right = b[0] - a[0], down = b[1] - a[1], length = right * right + down * down;
  const part = length ? Math.max(0, Math.min(1, ((x - a[0]) * right + (y - a[1]) * down) / length)) : 0;
  return (x - a[0] - part * right) ** 2 + (y - a[1] - part * down) ** 2;
}

// Strokes (lists of points [x, y]) with their slant removed.
function upright(strokes) {
  const points = strokes.flatMap((stroke) => stroke.flatMap((b, at) => {
    const a = stroke[Math.max(0, at - 1)]; // interpolate: segments may be long
    return Array.from({ length: 20 }, (_, step) => [0, 1].map((axis) => a[axis] + (b[axis] - a[axis]) * (step + 1) / 20));
  }));
  const top = Math.min(...points.map(([, y]) => y)), height = Math.max(...points.map(([, y]) => y)) - top;
  if (!height) return strokes;
  const left = (inside) => Math.min(...points.filter(([, y]) => inside((y - top) / height)).map(([x]) => x));
  const slant = (left((part) => part < END) - left((part) => part > 1 - END)) / height;
  const shear = Math.max(-STEEPEST, Math.min(STEEPEST, slant));
  return strokes.map((stroke) => stroke.map(([x, y]) => [x + shear * (y - top), y]));
}

// Strokes in any unit → number of set pixels per block: 64 numbers of 0 … 16.
function countBlocks(drawn) {
  const strokes = upright(drawn), all = strokes.flat(), axes = [0, 1];
  const low = axes.map((axis) => Math.min(...all.map((point) => point[axis])));
  const high = axes.map((axis) => Math.max(...all.map((point) => point[axis])));
  const away = new Float64Array(BITMAP * BITMAP);
  let radius = 2; // half the stroke width in pixels; stroke centres keep this distance from the edge
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

// Pixels of a drawing, (8, 8, channels) of 0 … 255, on black.
function drawnPixels(strokes, channels) {
  const counts = countBlocks(strokes);
  return Uint8Array.from({ length: counts.length * channels }, (_, at) =>
    Math.round(counts[Math.floor(at / channels)] * 255 / BLOCK ** 2));
}
