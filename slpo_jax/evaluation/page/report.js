// Tables, and the page as a whole.

const figuresOf = (row) => (state.set === AVERAGE ? REPORT.average[row] : REPORT.eval[row][state.set]);

function figure(figures, metric) {
  const value = figures[metric];
  if (value === null || value === undefined) return "–";
  if (metric.startsWith("pearson")) {
    const [p, runs] = [figures[metric.replace(/_r$/, "_p")], figures.per_run?.[metric]];
    const ends = runs && [Math.min(...runs), Math.max(...runs)].map((each) => each.toFixed(2)).join(" to ");
    return `${value.toFixed(2)} (${ends ?? (p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`)})`;
  }
  const within = figures.intervals?.[metric]?.map((bound) => number(metric, bound)).join(", ");
  if (within) return [number(metric, value), el("small", {}, ` [${within}]`)];
  const error = (name, before, after) =>
    typeof figures[name] === "number" ? before + number(metric, figures[name]) + after : "";
  const errors = error(`${metric}_se`, " ± ", "") + error(`${metric}_seed_se`, " (", ")");
  return [number(metric, value), el("small", {}, errors)];
}

function sorted(rows) {
  const metric = state.sort.replace(/^-/, "");
  const sign = state.sort.startsWith("-") ? 1 : -1;
  const value = (row) => figuresOf(row)[metric] ?? sign * Infinity; // what is not known comes last
  return metric ? [...rows].sort((a, b) => sign * (value(a) - value(b)) || 0) : rows;
}

function sortHeader(metric) {
  const now = { [metric]: "descending", [`-${metric}`]: "ascending" }[state.sort] ?? "none";
  const next = { none: metric, descending: `-${metric}`, ascending: "" }[now];
  const mark = { none: "", descending: " ▼", ascending: " ▲" }[now];
  const { title, about: said } = DATA.metrics[metric];
  const button = { "data-about": said, "data-metric": metric, onclick: () => go({ sort: next }) };
  return el("th", { "aria-sort": now, scope: "col" }, el("button", button, title + mark));
}

function resultsTable() {
  const rows = sorted(ROWS.filter(figuresOf));
  const isKnown = (metric) => rows.some((row) => typeof figuresOf(row)[metric] === "number");
  const metrics = DATA.columns[state.columns].filter(isKnown);
  const problems = [...new Set(rows.map((row) => count(figuresOf(row).n)))].join(" to ");
  const over = RUNS.length > 1 ? "runs" : "problems";
  const units = `percent, ± the standard error over ${over}, [Wilson's 95 % interval] where all or none are right`;
  return [
    words(`${setWords(state.set)}, ${problems} problems; ${units}. A column's name sorts.`),
    table(
      ["row", ...metrics.map(sortHeader)],
      rows.map((row) => [rowName(row), ...metrics.map((metric) => el("td", {}, figure(figuresOf(row), metric)))]),
      `results, ${setWords(state.set)}`,
    ),
  ];
}

function differenceCell(entry) {
  if (!entry) return "–";
  const points = (value) => signed(number(entry.metric, value));
  const mark = entry.excludes_zero ? (entry.difference > 0 ? "▲ " : "▼ ") : "";
  const mean = el(entry.excludes_zero ? "b" : "span", {}, points(entry.difference));
  const runs = entry.per_run.length > 1 ? `By run: ${entry.per_run.map(points).join(", ")}.` : null;
  return el("td", {}, mark, about(mean, runs), el("small", {}, ` [${points(entry.low)}, ${points(entry.high)}]`));
}

function differencesTable() {
  const found = new Map();
  for (const entry of REPORT.differences) {
    if (entry.set !== state.set) continue;
    const pair = JSON.stringify([entry.a, entry.b]);
    found.set(pair, { ...found.get(pair), [entry.metric]: entry });
  }
  const pairs = [...found.entries()];
  const metrics = DATA.columns[state.columns].filter((metric) => pairs.some(([, entries]) => metric in entries));
  if (!metrics.length) return words("No two rows are compared here.");
  const name = (pair) => {
    const [a, b] = JSON.parse(pair);
    return el("td", {}, rowName(a), " − ", rowName(b));
  };
  return table(
    ["difference", ...metrics.map((metric) => about(DATA.metrics[metric].title, DATA.metrics[metric].about))],
    pairs.map(([pair, entries]) => [name(pair), ...metrics.map((metric) => differenceCell(entries[metric]))]),
    `differences, ${setWords(state.set)}`,
  );
}

// Of a row {rule: Acc, .., chosen, problems}, or such by row or run.
function choicesTables(node, title = []) {
  if (!("chosen" in node)) {
    return Object.entries(node).flatMap(([key, part]) => choicesTables(part, [...title, labelOf(key)]));
  }
  const rules = Object.keys(node).filter((key) => key !== "chosen" && key !== "problems").sort((a, b) => a - b);
  const cell = (rule) => {
    const acc = (100 * node[rule]).toFixed(1);
    return Number(rule) === Number(node.chosen) ? el("b", {}, `${acc} (chosen)`) : acc;
  };
  const what = rules.some((rule) => Number(rule) > 1) ? "latents" : "threshold";
  const header = [`${what} (${count(node.problems)} problems)`, ...rules];
  return [table(header, [[`${title.join(", ")}: Acc`, ...rules.map(cell)]], `choices, ${title.join(", ")}`)];
}

// The page

const BODIES = {
  results: resultsTable,
  differences: differencesTable,
  training: trainingCharts,
  problems: problemsList,
};

function render() {
  const focused = document.activeElement?.dataset ?? {};
  const key = ["metric", "turn"].find((name) => focused[name]);
  for (const [id, body] of Object.entries(BODIES)) {
    document.getElementById(id)?.replaceChildren(...[body()].flat());
  }
  if (key) document.querySelector(`[data-${key}="${CSS.escape(focused[key])}"]`)?.focus();
  for (const control of document.querySelectorAll("select, [name=text]")) {
    if (control.value !== state[control.name]) control.value = state[control.name];
  }
  const stages = state.stages.split(",");
  for (const box of document.querySelectorAll("[name=kept]")) box.checked = state.kept !== "";
  for (const box of document.querySelectorAll("[name=stage]")) box.checked = stages.includes(box.value);
}

const section = (title, ...children) => [el("h2", {}, title), ...children];
const controls = (...children) => el("div", { class: "controls" }, ...children);
const body = (id) => el("div", { id });

// Each row beside its control.
function firstTable() {
  const { title, columns, rows, caption, warnings } = REPORT.headline;
  const place = columns.indexOf("control");
  const cells = ({ row, control, cells: [, ...texts] }) => [
    rowName(row),
    ...texts.map((text, i) => (i === place - 1 && control ? el("td", {}, rowName(control)) : text)),
  ];
  return [
    words(title),
    table(columns, rows.map(cells)),
    caption ? words(caption) : "",
    ...warnings.map((text) => el("p", { class: "warning" }, text)),
  ];
}

function head() {
  const one = "One training run. Another training seed may move its figures more than the errors say.";
  return [
    el("h1", {}, DATA.title),
    ...firstTable(),
    ...Object.values(REPORT.chance).map(({ text }) => words(text)),
    words(RUNS.length > 1 ? `Means over ${RUNS.length} training runs: ${RUNS.join(", ")}.` : one),
    REPORT.notes.length ? el("ul", {}, REPORT.notes.map((note) => el("li", {}, note))) : "",
  ];
}

function results() {
  const sets = [...(HAS_AVERAGE ? [AVERAGE] : []), ...SETS].map((set) => [set, setWords(set)]);
  const columns = [["main", "the main ones"], ["all", "all"]];
  const known = columns.filter(([name]) => name in DATA.columns);
  return section(
    "Results",
    controls(choice("set", "set", sets), choice("columns", "metrics", known)),
    body("results"),
    el("h3", {}, "Differences, paired by problem"),
    words(DATA.differences_about),
    body("differences"),
  );
}

function curves() {
  const rows = legend(ROWS.map((row, place) => [place, rowName(row)]));
  const panels = [passCharts(), stopCharts()].map((charts) => el("div", { class: "panels large" }, charts));
  return section("Pass@k and stop times", rows, ...panels);
}

function training() {
  const boxes = () => [...document.querySelectorAll("[name=stage]:checked")].map((box) => box.value);
  const onchange = () => go({ stages: boxes().join(",") });
  const box = (stage) => el("input", { type: "checkbox", name: "stage", value: stage, onchange });
  const stages = STAGES.map((stage) => el("label", {}, box(stage), ` ${stage}`));
  const by = choice("x", "by", [["step", "step"], ["seconds", "seconds"]]);
  return section("Training", controls(stages, by), body("training"));
}

function problems() {
  const sets = Object.keys(DATA.problems);
  if (!sets.length) return section("Problems", el("p", {}, "Each run's own report.html shows its problems."));
  const rows = [["", "–"], ...ROWS.map((row) => [row, labelOf(row)])];
  const search = { name: "text", type: "search", oninput: (event) => go({ text: event.target.value, page: "1" }) };
  const hasThoughts = ([, , , , thoughts]) => Object.keys(thoughts).length > 0;
  const seen = Object.values(DATA.problems).some((set) => set.problems.some(hasThoughts));
  const kept = (event) => go({ kept: event.target.checked ? "1" : "", page: "1" });
  return section(
    "Problems",
    controls(
      choice("of", "set", [["", "all"], ...sets.map((set) => [set, set])]),
      choice("right", "right", rows),
      choice("wrong", "wrong", rows),
      choice("by", "by", [["greedy", "the greedy rollout"], ["any", "any rollout with noise"]]),
      el("label", {}, "text ", el("input", search)),
      seen ? el("label", {}, el("input", { name: "kept", type: "checkbox", onchange: kept }), " with thoughts") : "",
    ),
    body("problems"),
  );
}

function more() {
  const said = (values) => Object.entries(values).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(", ");
  const prose = (text) => el("td", { class: "prose" }, text);
  const settings = Object.entries(REPORT.settings).map(([stage, values]) => [stage || "all", prose(said(values))]);
  const definition = ({ title, about: text }) => [el("dt", {}, title), el("dd", {}, text)];
  const definitions = Object.values(DATA.metrics).flatMap(definition);
  const choices = choicesTables(REPORT.thresholds);
  const folded = (title, content) => el("details", {}, el("summary", {}, title), content);
  return section(
    "More",
    choices.length ? el("h3", {}, "Choices on the validation split (percent)") : "",
    ...choices,
    folded("Settings that differ from the defaults", table(["stage", "settings"], settings)),
    folded("Definitions", el("dl", {}, definitions)),
    words("All numbers are in report.json, and every rollout of every problem is in eval/ROW/SET.jsonl."),
  );
}

// Shows what the text under the mouse, or in keyboard focus, means.
function tips() {
  const tip = document.getElementById("tip");
  let node = null;
  const show = (found) => {
    node?.removeAttribute("aria-describedby");
    node = found;
    tip.hidden = !node;
    if (!node) return;
    node.setAttribute("aria-describedby", "tip");
    tip.textContent = node.dataset.about;
    place();
  };
  const place = () => {
    if (!node) return;
    const at = node.getBoundingClientRect();
    const below = at.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(6, Math.min(at.left, innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${below ? at.bottom + 5 : at.top - tip.offsetHeight - 5}px`;
  };
  for (const name of ["mouseover", "focusin"]) {
    document.addEventListener(name, (event) => show(event.target.closest?.("[data-about]")));
  }
  document.addEventListener("scroll", place, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
}

readAddress();
const parts = [head(), results(), curves(), STAGES.length ? training() : [], problems(), more()];
document.getElementById("main").replaceChildren(...parts.flat());
tips();
render();
addEventListener("hashchange", () => {
  readAddress();
  render();
});
