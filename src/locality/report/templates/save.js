// Buttons below each chart (save as SVG) and table (copy, save as CSV).
"use strict";
(() => {
  const named = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60).replace(/^-|-$/g, "") || "page";

  function save(name, parts, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function bar(after, buttons) {
    const place = document.createElement("p");
    place.className = "save";
    for (const [text, title, act] of buttons) {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: text, title });
      button.setAttribute("aria-label", title);
      button.addEventListener("click", () => act(button));
      place.append(button);
    }
    after.after(place);
  }

  // CSS variables are undefined outside the page: inline their values.
  function standing(svg) {
    const look = getComputedStyle(svg), copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", `${box.width}pt`);
    copy.setAttribute("height", `${box.height}pt`);
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of [["width", "100%"], ["height", "100%"], ["fill", "var(--paper)"]]) paper.setAttribute(name, value);
    copy.prepend(paper);
    return new XMLSerializer().serializeToString(copy)
      .replace(/var\((--[\w-]+)\)/g, (_, name) => look.getPropertyValue(name).trim().replace(/"/g, "'"));
  }

  // A cell's text on one line, with hyphens for minus signs so that programs can parse it.
  const said = (cell) => cell.innerText.replace(/\s+/g, " ").trim().replace(/−(?=\d)/g, "-");
  const rowsOf = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => ({ text: said(cell), width: cell.colSpan })))
    .map((row) => row.flatMap(({ text, width }) => [text, ...Array(width - 1).fill("")]));
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);

  async function copy(table, button) {
    try {
      await navigator.clipboard.writeText(rowsOf(table).map((row) => row.join("\t")).join("\n"));
      button.textContent = "copied";
    } catch { // the clipboard may need https
      getSelection().selectAllChildren(table);
    }
  }

  // The nearest heading above.
  const titleOf = (node) => [...document.querySelectorAll("h1, h2, h3, summary")]
    .filter((title) => title.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING).at(-1)?.textContent.replace("¶", "").trim() ?? "";

  const style = document.createElement("style");
  style.textContent = `.save { margin: .2rem 0 .6rem; max-width: none; }
    .save button { margin-right: .5rem; padding: 0 .5em; border: 1px solid #8886; border-radius: .3rem; background: none; color: inherit;
      font: inherit; font-size: .8em; opacity: .8; cursor: pointer; }
    .save button:hover, .save button:focus-visible { opacity: 1; }
    @media print { .save { display: none; } }`;
  document.head.append(style);

  for (const svg of document.querySelectorAll("figure > svg")) {
    const title = svg.getAttribute("aria-label");
    bar(svg.parentElement.lastElementChild, [["SVG", `save as SVG: ${title}`, () => save(`${named(title)}.svg`, [standing(svg)], "image/svg+xml")]]);
  }
  for (const table of document.querySelectorAll("table.results, table.numbers")) {
    const title = titleOf(table);
    bar(table.closest(".scroll, .wide") ?? table, [
      ["copy", `copy the table: ${title}`, (button) => copy(table, button)],
      ["CSV", `save as CSV: ${title}`, () => save(`${named(title)}.csv`, ["\ufeff", rowsOf(table).map((row) => row.map(quoted).join(",")).join("\r\n"), "\r\n"], "text/csv")],
    ]);
  }
})();
