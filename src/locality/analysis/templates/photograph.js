// The model's preprocessing of a user's photograph: `locality.data.preprocessing`, with Pillow's resampling.

const FILTERS = { // support (half width) and kernel
  nearest: [0, () => 1],
  box: [0.5, (x) => Number(x > -0.5 && x <= 0.5)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) >= 1 ? 0 : sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)))],
  bicubic: [2, (x) => cubic(Math.abs(x))],
  lanczos: [3, (x) => (Math.abs(x) >= 3 ? 0 : sinc(x) * sinc(x / 3))],
};
const sinc = (x) => (x ? Math.sin(Math.PI * x) / (Math.PI * x) : 1);
const cubic = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);

// Resample an image (from, length · channels) along its first axis and transpose it: (length, to · channels).
function resampled(pixels, from, to, length, channels) {
  const [support, weight] = FILTERS[DATA.interpolation], scale = from / to, wide = Math.max(scale, 1);
  const out = new Uint8ClampedArray(length * to * channels);
  for (let place = 0; place < to; place++) {
    const centre = (place + 0.5) * scale;
    const first = support ? Math.max(0, Math.trunc(centre - support * wide + 0.5)) : Math.floor(centre);
    const last = support ? Math.min(from, Math.trunc(centre + support * wide + 0.5)) : first + 1;
    const weights = Array.from({ length: last - first }, (_, at) => weight((first + at - centre + 0.5) / wide));
    const all = weights.reduce((a, b) => a + b);
    for (let line = 0; line < length; line++) {
      for (let channel = 0; channel < channels; channel++) {
        let sum = 0;
        for (let at = 0; at < weights.length; at++) sum += weights[at] * pixels[((first + at) * length + line) * channels + channel];
        out[(line * to + place) * channels + channel] = sum / all;
      }
    }
  }
  return out;
}

// Rounds halves to even, as Python does.
const rounded = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

// (height, width) of the resized image before cropping.
function resizedTo(high, wide) {
  const [rows, columns] = DATA.size.map((side) => Math.floor(side / DATA.crop_pct));
  if (DATA.crop_mode === "squash") return [rows, columns];
  if (rows === columns) return [high, wide].map((side) => Math.floor(rows * side / Math.min(high, wide)));
  const ratio = Math.min(high / rows, wide / columns);
  return [rounded(high / ratio), rounded(wide / ratio)];
}

// An image file's preprocessed pixels, (H, W, channels) of 0 … 255.
async function photographPixels(file) {
  const picture = await createImageBitmap(file), { width: wide, height: high } = picture;
  const canvas = element("canvas", { width: wide, height: high }), context = canvas.getContext("2d");
  context.fillStyle = "#ffffff"; // behind transparent pixels
  context.fillRect(0, 0, wide, high);
  context.drawImage(picture, 0, 0);
  const { data } = context.getImageData(0, 0, wide, high), channels = DATA.channels;
  const turned = new Uint8Array(wide * high * channels); // column-major, for the first pass
  for (let y = 0; y < high; y++) {
    for (let x = 0; x < wide; x++) {
      const [from, to] = [4 * (y * wide + x), (x * high + y) * channels];
      if (channels === 1) turned[to] = (19595 * data[from] + 38470 * data[from + 1] + 7471 * data[from + 2] + 32768) >> 16;
      else for (let channel = 0; channel < 3; channel++) turned[to + channel] = data[from + channel];
    }
  }
  const [rows, columns] = resizedTo(high, wide), [HIGH, WIDE] = DATA.size;
  const narrow = resampled(turned, wide, columns, high, channels); // (high, columns)
  const columnsFirst = resampled(narrow, high, rows, columns, channels); // (columns, rows)
  const top = rounded((rows - HIGH) / 2), left = rounded((columns - WIDE) / 2);
  return Uint8Array.from({ length: HIGH * WIDE * channels }, (_, at) => {
    const channel = at % channels, x = Math.floor(at / channels) % WIDE, y = Math.floor(at / channels / WIDE);
    return columnsFirst[((left + x) * rows + top + y) * channels + channel];
  });
}
