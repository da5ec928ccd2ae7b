"use strict";
// Data, state, elements and words that the other scripts share. Every text is put in as text, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORT = DATA.report;
const AVERAGE = "average";
const ROWS = Object.keys(REPORT.eval);
const SETS = [...new Set(ROWS.flatMap((row) => Object.keys(REPORT.eval[row])))];
const HAS_AVERAGE = Object.keys(REPORT.average).length > 0;
const RUNS = REPORT.runs ?? [];

// A stage looks like the first row of its checkpoint; one without a row, like a further row.
function placeOf(stage) {
  const place = ROWS.findIndex((row) => REPORT.rows[row].stage === stage);
  return place < 0 ? ROWS.length : place;
}

const STAGES = Object.keys(REPORT.training ?? {}).sort((a, b) => placeOf(a) - placeOf(b));
const REWARDED = STAGES.filter((stage) => "reward" in REPORT.training[stage]);

// What the page shows, which its address says: #set=..&right=ROW&wrong=ROW&page=2
const DEFAULTS = {
  set: HAS_AVERAGE ? AVERAGE : SETS[0],
  columns: "main",
  sort: "",
  stages: (REWARDED.length ? REWARDED : STAGES).join(","),
  x: "step",
  of: "",
  right: "",
  wrong: "",
  by: "greedy",
  text: "",
  kept: "",
  page: "1",
};
let state = {};

function readAddress() {
  state = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
}

function go(changes) {
  Object.assign(state, changes);
  const said = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  history.replaceState(null, "", `#${new URLSearchParams(said)}`);
  render();
}

// Elements

const SVG = new Set(["svg", "g", "path", "line", "rect", "text", "title", "style"]);

function el(tag, attributes = {}, ...children) {
  const space = SVG.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// A text with its meaning, which the mouse and the keyboard find.
const about = (text, said, tabindex = 0) => (said ? el("span", { "data-about": said, tabindex }, text) : text);

const words = (text) => el("p", { class: "soft" }, text);

function choice(name, label, options) {
  const select = el("select", { name, onchange: (event) => go({ [name]: event.target.value, page: "1" }) });
  select.append(...options.map(([value, text]) => el("option", { value }, text)));
  return el("label", {}, `${label} `, select);
}

function save(name, suffix, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href, download: `${`${DATA.title} ${name}`.replace(/[^\w@.-]+/g, "_")}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

// A table's texts; what stands in small print beside a figure has a column of its own.
function saveTable(name, node) {
  const rows = [...node.querySelectorAll("tr")].map((row) => [...row.cells]);
  const isDouble = rows[0].map((_, i) => rows.some((cells) => cells[i].querySelector("small")));
  const parts = (cell, i) => {
    const aside = cell.querySelector("small")?.textContent ?? "";
    const text = cell.textContent.slice(0, cell.textContent.length - aside.length);
    return isDouble[i] ? [text, aside] : [text];
  };
  const quoted = (text) => `"${text.trim().replaceAll('"', '""')}"`;
  const lines = rows.map((cells) => cells.flatMap(parts).map(quoted).join(","));
  save(name, "csv", "text/csv", `${lines.join("\n")}\n`);
}

function table(header, rows, name = "") {
  const isCell = (value) => value instanceof Element && ["td", "th"].includes(value.localName);
  const line = (tag, values) => el("tr", {}, values.map((value) => (isCell(value) ? value : el(tag, {}, value))));
  const body = el("tbody", {}, rows.map((row) => line("td", row)));
  const node = el("table", {}, el("thead", {}, line("th", header)), body);
  const button = name && el("button", { class: "save", onclick: () => saveTable(name, node) }, "CSV");
  return el("div", { class: "wide" }, node, button);
}

// Words and numbers

const setWords = (set) => (set === AVERAGE ? "mean of the sets" : set);
const labelOf = (row) => REPORT.rows[row]?.label ?? (row === "best_fixed" ? "best fixed length" : row);
const rowName = (row, tabindex = 0) => about(labelOf(row), DATA.row_about[row], tabindex);
const count = (n) => n.toLocaleString("en");
const signed = (text) => (text.startsWith("-") ? text : `+${text}`);

function number(metric, value) {
  const isCount = /latent_steps|distinct_answers|answer_tokens|sequential_steps|milliseconds/.test(metric);
  return isCount ? value.toFixed(2) : (100 * value).toFixed(1);
}
