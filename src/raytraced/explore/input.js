// Image inputs: drawings and files.

// ---------------------------------------------------------------- drawing

let pen = null; // position of the keyboard's pen
let isDrawing = false; // whether the pad shows a drawing, to which strokes are added

const padContext = () => $("pad").getContext("2d", { willReadFrequently: true });

function startDrawing() {
  if (!isDrawing) clearPad();
}

function clearPad() {
  const { width, height } = $("pad"), context = padContext();
  context.fillStyle = "#000";
  context.fillRect(0, 0, width, height);
}

function stroke(from, to) {
  const context = padContext();
  const lineWidth = Math.max(DRAWING / 10, (1.4 * DRAWING) / Math.max(...pack.image_shape)); // above one pixel of the model's
  Object.assign(context, { strokeStyle: "#fff", lineCap: "round", lineJoin: "round", lineWidth });
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(to[0] + 0.01, to[1]);
  context.stroke();
  const pixels = shrink();
  choose(`x${toBase64(pixels)}`, pixels, true);
}

/** Scale the drawing down to the model's size, as the training images are: as large in the frame, centre of mass in the middle. */
function shrink() {
  const [, height, width] = pack.image_shape, pad = $("pad"), out = new Float64Array(height * width);
  const { data } = padContext().getImageData(0, 0, pad.width, pad.height);
  let [left, top, right, bottom, mass, x, y] = [pad.width, pad.height, -1, -1, 0, 0, 0];
  for (let row = 0; row < pad.height; row++) {
    for (let column = 0; column < pad.width; column++) {
      const value = data[4 * (row * pad.width + column)];
      if (!value) continue;
      [left, right] = [Math.min(left, column), Math.max(right, column)];
      [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
      mass += value;
      x += value * column;
      y += value * row;
    }
  }
  if (right < 0) return new Uint8Array(out.length);
  const side = Math.max(right - left + 1, bottom - top + 1), ink = (pack.gallery?.ink ?? 20 / 28) * Math.max(height, width);
  const scale = ink / side;
  const place = (centre, low, high, room) =>
    Math.max(0, Math.min(room - (high - low + 1) * scale, room / 2 - (centre / mass - low) * scale));
  const atX = place(x, left, right, width), atY = place(y, top, bottom, height);
  // the small pixels that a pixel of the drawing overlaps, and by how much
  const cover = (start, room) => {
    const parts = [];
    for (let to = Math.floor(start); to < Math.min(start + scale, room); to++) {
      parts.push([to, Math.min(start + scale, to + 1) - Math.max(start, to)]);
    }
    return parts;
  };
  const columns = Array.from({ length: right - left + 1 }, (_, i) => cover(atX + i * scale, width));
  for (let row = top; row <= bottom; row++) {
    const rows = cover(atY + (row - top) * scale, height);
    for (let column = left; column <= right; column++) {
      const value = data[4 * (row * pad.width + column)];
      if (!value) continue;
      for (const [toY, tall] of rows) for (const [toX, wide] of columns[column - left]) out[toY * width + toX] += value * tall * wide;
    }
  }
  return Uint8Array.from(out, (value) => Math.min(255, Math.round(value)));
}

function wireDrawing() {
  const pad = $("pad"), canDraw = () => document.body.classList.contains("can-draw");
  const at = (event) => {
    const box = pad.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * pad.width, ((event.clientY - box.top) / box.height) * pad.height];
  };
  let last = null;
  pad.addEventListener("pointerdown", (event) => {
    if (!canDraw()) return;
    pad.setPointerCapture(event.pointerId);
    startDrawing();
    last = at(event);
    stroke(last, last);
  });
  pad.addEventListener("pointermove", (event) => {
    if (!last) return;
    const next = at(event);
    stroke(last, next);
    last = next;
  });
  for (const end of ["pointerup", "pointercancel"]) pad.addEventListener(end, () => (last = null));

  const showPen = () => {
    $("pen").hidden = !pen;
    if (!pen) return;
    $("pen").className = pen.down ? "down" : "";
    $("pen").style.left = `${(100 * pen.x) / pad.width}%`;
    $("pen").style.top = `${(100 * pen.y) / pad.height}%`;
  };
  pad.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!canDraw() || !(move || event.key === " ")) return;
    event.preventDefault();
    pen ??= { x: pad.width / 2, y: pad.height / 4, down: false };
    const from = [pen.x, pen.y];
    if (move) {
      pen.x = Math.max(10, Math.min(pad.width - 10, pen.x + (move[0] * DRAWING) / 20));
      pen.y = Math.max(10, Math.min(pad.height - 10, pen.y + (move[1] * DRAWING) / 20));
    } else pen.down = !pen.down;
    if (pen.down) {
      startDrawing();
      stroke(from, [pen.x, pen.y]);
    }
    showPen();
  });
  pad.addEventListener("blur", () => {
    pen = null;
    showPen();
  });
  $("clear").addEventListener("click", () => {
    clearPad();
    const pixels = new Uint8Array(numPixels());
    choose(`x${toBase64(pixels)}`, pixels, true);
  });
}

function toBase64(bytes) {
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The bytes of a base 64 text, null if it is not one. */
function fromBase64(text) {
  try {
    return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------- upload, paste, drop

async function takeFile(file) {
  if (!file) return;
  if (pack.kind === "text") return showMessage(`${file.name}: ${pack.name} reads text; type it instead`);
  if (file.size > MAX_UPLOAD) return showMessage(`${file.name}: is ${Math.round(file.size / 1e6)} MB; choose an image of at most 20 MB`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return showMessage(`${file.name}: is not an image that this browser can read; choose a PNG or a JPEG`);
  }
  const [channels, height, width] = pack.image_shape, size = height * width;
  const cutWidth = Math.min(bitmap.width, (bitmap.height * width) / height);
  const cutHeight = Math.min(bitmap.height, (bitmap.width * height) / width);
  const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  const from = [(bitmap.width - cutWidth) / 2, (bitmap.height - cutHeight) / 2, cutWidth, cutHeight];
  context.drawImage(bitmap, ...from, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height), pixels = new Uint8Array(channels * size);
  let total = 0, inverted = false;
  for (let i = 0; i < size; i++) {
    const [red, green, blue] = data.subarray(4 * i);
    if (channels === 1) pixels[i] = Math.floor((299 * red + 587 * green + 114 * blue + 500) / 1000);
    else [red, green, blue].forEach((value, c) => (pixels[c * size + i] = value));
    total += pixels[i];
  }
  const { "input_block.scale": scale, "input_block.shift": shift } = model.tensors;
  const brightness = total / size / 255, mean = -shift.data[0] / scale.data[0] / 255;
  if (channels === 1 && mean > 0 && Math.abs(brightness - mean) > Math.abs(1 - brightness - mean) + 0.25) {
    inverted = true;
    pixels.forEach((value, i) => (pixels[i] = 255 - value));
  }
  choose(`x${toBase64(pixels)}`, pixels);
  if (inverted) showMessage(`${file.name}: is inverted compared with the training images; its negative is used`);
}

function wireFiles() {
  $("upload").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    await takeFile($("file").files[0]);
    $("file").value = "";
  });
  document.addEventListener("paste", (event) => takeFile(event.clipboardData.files[0]));
  for (const kind of ["dragover", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return; // the browser handles dropped text
      event.preventDefault();
      if (kind === "drop") takeFile(event.dataTransfer.files[0]);
    });
  }
}
