// Pictures to save.

const escapeXML = (text) => String(text).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

/** Break a text into lines of at most `width` pixels. */
function wrap(text, width, font) {
  const context = make("canvas").getContext("2d"), lines = [""];
  context.font = font;
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** An SVG of the grid with the input and the answer above it, or of the coloured text; it needs no other file. */
function picture() {
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink");
  const rules = [...document.styleSheets[0].cssRules].filter((rule) => /^\.(ray|node(?!\.chosen)|row|gate|mark)\b/.test(rule.selectorText ?? ""));
  const css = rules.map((rule) => rule.cssText).join("\n").replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
  const isText = pack.kind === "text", body = [], width = isText ? 760 : places.width + 32;
  const write = (text, x, y, extra = "") => body.push(`<text x="${x}" y="${y}" fill="${ink}" ${extra}>${escapeXML(text)}</text>`);
  let height;
  if (isText) {
    const { of, legend, caption } = colours();
    let [x, y] = [16, 56];
    write(`${pack.name}: ${caption}`, 16, 28);
    legend.forEach(({ name, back, ink: on }, i) => {
      body.push(`<rect x="${400 + 38 * i}" y="12" width="36" height="22" rx="3" fill="${back}"/>`);
      write(name, 418 + 38 * i, 28, `text-anchor="middle" style="fill:${on}"`);
    });
    for (const { letter, byte } of characters()) {
      if (x + 12 > width - 16 || letter === "\n") [x, y] = [16, y + 30];
      if (letter === "\n") continue;
      const { back, ink: on } = of[byte] ?? { back: "none", ink }; // without a colour until it is computed
      body.push(`<rect x="${x}" y="${y}" width="11.6" height="26" fill="${back}"/>`);
      write(letter, x + 5.8, y + 19, `text-anchor="middle" font-family="monospace" font-size="18" style="fill:${on}"`);
      x += 11.6;
    }
    height = y + 46;
  } else {
    const lines = wrap($("step-text").textContent, width - 32, "12px system-ui, sans-serif"), top = 108 + 16 * lines.length;
    body.push(`<image href="${$("model-input").toDataURL()}" x="16" y="16" width="64" height="64" style="image-rendering: pixelated"/>`);
    write($("label").firstChild.textContent, 96, 32, 'font-size="20" font-weight="700"');
    write($("label").lastChild.textContent, 96, 54);
    write(pack.name, 96, 76, 'fill-opacity="0.7"');
    lines.forEach((line, i) => write(line, 16, 104 + 16 * i, 'font-size="12"'));
    body.push(`<g transform="translate(16 ${top})">${new XMLSerializer().serializeToString($("grid"))}</g>`);
    height = top + places.height + 8;
  }
  const back = style.getPropertyValue("--back");
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
    `font-family="system-ui, sans-serif" font-size="14"><style>${escapeXML(css)}</style><rect width="100%" height="100%" fill="${back}"/>${body.join("")}</svg>`;
}

function download(blob, ending) {
  const link = make("a", { href: URL.createObjectURL(blob), download: `${pack.name.replace(/[^\w-]+/g, "-")}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function wirePictures() {
  $("save-svg").addEventListener("click", () => download(new Blob([picture()], { type: "image/svg+xml" }), "svg"));
  $("save-png").addEventListener("click", async () => {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture())}`;
    await image.decode();
    const canvas = make("canvas", { width: 2 * image.width, height: 2 * image.height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(blob, "png"), "image/png");
  });
}
