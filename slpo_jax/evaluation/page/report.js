"use strict";
// One page for one report. Everything shown comes from the JSON above; every text is put in as text, never as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORT = DATA.report, AVERAGE = "average", PER_PAGE = 20;
const ROWS = Object.keys(REPORT.eval);
const SETS = [...new Set(ROWS.flatMap((row) => Object.keys(REPORT.eval[row])))];
// A stage looks like the first row of its checkpoint; one without a row, like a further row.
const placeOf = (stage) => { const at = ROWS.findIndex((row) => REPORT.rows[row].stage === stage); return at < 0 ? ROWS.length : at; };
const STAGES = Object.keys(REPORT.training ?? {}).sort((a, b) => placeOf(a) - placeOf(b));
const STATES = [["wrong", "✗"], ["right", "✓"], ["cut", "✂"]]; // of an answer, by its number in the data
const DASHES = ["", "6 3", "8 3 2 3", "6 3", "", "2 3", "10 3"];

// What the page shows, which its address says: #set=..&right=ROW&wrong=ROW&page=2
const rewarded = STAGES.filter((stage) => "reward" in REPORT.training[stage]);
const DEFAULTS = {
  set: Object.keys(REPORT.average).length ? AVERAGE : SETS[0], columns: "main", sort: "",
  stages: (rewarded.length ? rewarded : STAGES).join(","), x: "step",
  of: "", right: "", wrong: "", by: "greedy", text: "", kept: "", page: "1",
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

// Elements -----------------------------------------------------------------------------------------------------------

const SVG = new Set(["svg", "path", "line", "text", "circle", "title", "g"]);

function el(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const about = (text, said) => (said ? el("span", { "data-about": said, tabindex: 0 }, text) : text);

function choice(name, label, options) {
  const select = el("select", { name, onchange: (event) => go({ [name]: event.target.value, page: "1" }) });
  select.append(...options.map(([value, text]) => el("option", { value }, text)));
  return el("label", {}, `${label} `, select);
}

function table(header, rows) {
  const line = (tag, cells) => el("tr", {}, cells.map((cell) => (cell?.tagName === "TD" || cell?.tagName === "TH" ? cell : el(tag, {}, cell))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, line("th", header)), el("tbody", {}, rows.map((row) => line("td", row)))));
}

// Words and numbers --------------------------------------------------------------------------------------------------

const setWords = (set) => (set === AVERAGE ? "mean of the sets" : set);
const labelOf = (row) => REPORT.rows[row]?.label ?? (row === "best_fixed" ? "best fixed length" : row);
const rowName = (row) => about(labelOf(row), DATA.row_about[row]);
const isCount = (metric) => /latent_steps|distinct_answers|answer_tokens/.test(metric);
const signed = (text) => (text.startsWith("-") ? text : `+${text}`);
const number = (metric, value) => (isCount(metric) ? value.toFixed(2) : (100 * value).toFixed(1));

function figure(figures, metric) {
  const value = figures?.[metric];
  if (value === null || value === undefined) return "–";
  if (metric.startsWith("pearson")) {
    const p = figures[metric.replace(/_r$/, "_p")], runs = figures.per_run?.[metric];
    if (runs) return `${value.toFixed(2)} (${Math.min(...runs).toFixed(2)} to ${Math.max(...runs).toFixed(2)})`;
    return `${value.toFixed(2)} (p ${p < 0.001 ? "< 0.001" : `= ${p.toFixed(3)}`})`;
  }
  const errors = [["_se", (text) => ` ± ${text}`], ["_seed_se", (text) => ` (${text})`]];
  const said = errors.map(([end, form]) => (typeof figures[metric + end] === "number" ? form(number(metric, figures[metric + end])) : ""));
  return [number(metric, value), el("small", {}, said.join(""))];
}

// Tables -------------------------------------------------------------------------------------------------------------

const figuresOf = (row) => (state.set === AVERAGE ? REPORT.average[row] : REPORT.eval[row][state.set]);

function sorted(rows) {
  const metric = state.sort.replace(/^-/, ""), sign = state.sort.startsWith("-") ? 1 : -1;
  if (!metric) return rows;
  const value = (row) => figuresOf(row)[metric] ?? -sign * Infinity; // what is not known comes last
  return [...rows].sort((a, b) => sign * (value(a) - value(b)) || 0);
}

function sortHeader(metric) {
  const now = state.sort === metric ? "descending" : state.sort === `-${metric}` ? "ascending" : "none";
  const next = { none: metric, descending: `-${metric}`, ascending: "" }[now];
  const mark = { none: "", descending: " ▼", ascending: " ▲" }[now];
  const { title, about: said } = DATA.metrics[metric];
  return el("th", { "aria-sort": now, scope: "col" },
    el("button", { "data-about": said, "data-metric": metric, onclick: () => go({ sort: next }) }, title + mark));
}

function resultsTable() {
  const rows = sorted(ROWS.filter(figuresOf));
  const metrics = DATA.columns[state.columns].filter((metric) => rows.some((row) => typeof figuresOf(row)[metric] === "number"));
  const counts = [...new Set(rows.map((row) => figuresOf(row).n))].map((n) => n.toLocaleString("en"));
  return [
    el("p", { class: "soft" }, `${setWords(state.set)}, ${counts.join(" to ")} problems; percent, ± the standard error over ${REPORT.runs?.length > 1 ? "runs" : "problems"}. A column's name sorts.`),
    table(["row", ...metrics.map(sortHeader)], rows.map((row) => [rowName(row), ...metrics.map((metric) => el("td", {}, figure(figuresOf(row), metric)))])),
  ];
}

function differencesTable() {
  const entries = REPORT.differences.filter((entry) => entry.set === state.set);
  const metrics = DATA.columns[state.columns].filter((metric) => entries.some((entry) => entry.metric === metric));
  if (!metrics.length) return el("p", { class: "soft" }, "No two rows are compared here.");
  const pairs = [...new Set(entries.map((entry) => JSON.stringify([entry.a, entry.b])))].map(JSON.parse);
  const cell = (a, b, metric) => {
    const entry = entries.find((found) => found.a === a && found.b === b && found.metric === metric);
    if (!entry) return el("td", {}, "–");
    const [mean, low, high] = ["difference", "low", "high"].map((key) => signed(number(metric, entry[key])));
    const runs = entry.per_run.length > 1 ? `By run: ${entry.per_run.map((value) => signed(number(metric, value))).join(", ")}.` : null;
    const mark = !entry.excludes_zero ? "" : entry.difference > 0 ? "▲ " : "▼ ";
    return el("td", {}, mark, about(el(entry.excludes_zero ? "b" : "span", {}, mean), runs), el("small", {}, ` [${low}, ${high}]`));
  };
  return table(["difference", ...metrics.map((metric) => el("th", { scope: "col" }, about(DATA.metrics[metric].title, DATA.metrics[metric].about)))],
    pairs.map(([a, b]) => [el("td", {}, rowName(a), " − ", rowName(b)), ...metrics.map((metric) => cell(a, b, metric))]));
}

function choicesTable(node, title = "") {
  if (!("chosen" in node)) return Object.entries(node).flatMap(([key, part]) => choicesTable(part, title ? `${title}, ${labelOf(key)}` : labelOf(key)));
  const rules = Object.keys(node).filter((key) => key !== "chosen" && key !== "problems").sort((a, b) => a - b);
  const cell = (rule) => (Number(rule) === Number(node.chosen) ? el("td", {}, el("b", {}, `${(100 * node[rule]).toFixed(1)} (chosen)`)) : (100 * node[rule]).toFixed(1));
  const what = rules.some((rule) => Number(rule) > 1) ? "latents" : "threshold";
  return [table([`${what} (${node.problems.toLocaleString("en")} problems)`, ...rules], [[`${title}: Acc`, ...rules.map(cell)]])];
}

// Charts -------------------------------------------------------------------------------------------------------------

function ticksOf(low, high, count = 5) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: 12 }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step).filter((tick) => tick <= high + step * 1e-9);
}

// lines: [{place, name, x, y, se}]; log: powers of two; most: the top that a share can have.
function chart({ title, said, lines, xLabel, log = false, most = Infinity }) {
  const W = 340, H = 210, left = 44, right = 16, top = 8, bottom = 32, along = (value) => (log ? Math.log2(value) : value);
  const xs = lines.flatMap((line) => line.x.map(along)), ys = lines.flatMap((line) => line.y.flatMap((y, i) => (line.se ? [y - line.se[i], y + line.se[i]] : [y])));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)], pad = (Math.max(...ys) - Math.min(...ys)) * 0.05 || Math.abs(ys[0]) * 0.1 || 0.1;
  const y0 = Math.min(...ys) >= 0 ? Math.max(0, Math.min(...ys) - pad) : Math.min(...ys) - pad, y1 = Math.min(most, Math.max(...ys) + pad);
  const px = (x) => left + ((along(x) - x0) / (x1 - x0 || 1)) * (W - left - right);
  const py = (y) => H - bottom - ((Math.max(y0, Math.min(y1, y)) - y0) / (y1 - y0 || 1)) * (H - top - bottom);
  const xTicks = log ? ticksOf(x0, x1, 8).filter(Number.isInteger).map((tick) => 2 ** tick) : ticksOf(x0, x1);
  const drawing = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const y of ticksOf(y0, y1)) drawing.append(el("line", { class: "grid", x1: left, x2: W - right, y1: py(y), y2: py(y) }), el("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, Number(y.toPrecision(6)).toLocaleString("en")));
  for (const x of xTicks) drawing.append(el("text", { x: px(x), y: H - bottom + 15, "text-anchor": "middle" }, x.toLocaleString("en")));
  drawing.append(el("text", { x: (left + W - right) / 2, y: H - 3, "text-anchor": "middle" }, xLabel));
  for (const line of lines) {
    const colour = `var(--c${line.place % 8})`, at = line.x.map((x, i) => [px(x), py(line.y[i])]);
    if (line.se) {
      const edge = (sign) => line.x.map((x, i) => `${px(x)},${py(line.y[i] + sign * line.se[i])}`);
      drawing.append(el("path", { class: "band", style: `fill:${colour}`, d: `M${[...edge(1), ...edge(-1).reverse()].join("L")}Z` }));
    }
    drawing.append(el("path", { stroke: colour, "stroke-dasharray": DASHES[line.place % DASHES.length], d: `M${at.join("L")}` }, el("title", {}, line.name)));
    if (at.length <= 40) drawing.append(...at.map(([x, y], i) => el("circle", { cx: x, cy: y, r: 2.4, fill: colour }, el("title", {}, `${line.name}: ${Number(line.y[i].toPrecision(4))} at ${Number(line.x[i].toPrecision(4))}`))));
  }
  return el("figure", {}, el("figcaption", {}, about(title, said)), drawing);
}

function legend(entries) {
  const sample = (place) => el("svg", { viewBox: "0 0 35 10", "aria-hidden": "true" }, el("path", { stroke: `var(--c${place % 8})`, "stroke-dasharray": DASHES[place % DASHES.length], d: "M0,5L35,5" }));
  return el("div", { class: "legend" }, entries.map(([place, name]) => el("span", {}, sample(place), name)));
}

function passCharts() {
  const curves = REPORT.curves ?? {};
  return SETS.filter((set) => ROWS.some((row) => curves[row]?.[set])).map((set) => chart({
    title: `Pass@k (%), ${set}`, xLabel: "k (rollouts)", log: true, most: 100,
    lines: ROWS.flatMap((row, place) => {
      const curve = curves[row]?.[set];
      return curve ? [{ place, name: labelOf(row), x: curve.k, y: curve.value.map((v) => 100 * v), se: curve.se.map((v) => 100 * (v ?? 0)) }] : [];
    }),
  }));
}

function stopCharts() {
  return SETS.filter((set) => ROWS.some((row) => REPORT.stop_times[row]?.[set])).map((set) => chart({
    title: `Stop times (% of greedy rollouts), ${set}`, xLabel: "latents", most: 100,
    lines: ROWS.flatMap((row, place) => {
      const counts = REPORT.stop_times[row]?.[set]?.greedy;
      const all = counts?.reduce((sum, count) => sum + count, 0);
      return counts ? [{ place, name: labelOf(row), x: counts.map((_, t) => t), y: counts.map((count) => (100 * count) / all) }] : [];
    }),
  }));
}

const FIRST = ["reward", "loss", "valid_accuracy", "accuracy", "solved", "mixed", "latent_steps", "answer_tokens", "cut"];

function trainingCharts() {
  const shown = state.stages.split(",").filter((stage) => stage in REPORT.training);
  const found = [...new Set(shown.flatMap((stage) => Object.keys(REPORT.training[stage])))].filter((name) => name !== "seconds");
  const seconds = (stage) => { const [steps, values] = REPORT.training[stage].seconds ?? [[], []]; return new Map(steps.map((step, i) => [step, values[i]])); };
  const names = [...found.filter((name) => FIRST.includes(name)).sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b)), ...found.filter((name) => !FIRST.includes(name))];
  const charts = names.map((name) => ({
    title: name.replaceAll("_", " "), xLabel: state.x === "step" ? "step" : "seconds since the stage began",
    lines: shown.filter((stage) => name in REPORT.training[stage]).map((stage) => {
      const [steps, values] = REPORT.training[stage][name], at = seconds(stage);
      const kept = steps.map((step, i) => [state.x === "step" ? step : at.get(step), values[i]]).filter(([x]) => x !== undefined);
      return { place: placeOf(stage), name: stage, x: kept.map(([x]) => x), y: kept.map(([, y]) => y) };
    }).filter((line) => line.x.length),
  })).filter((each) => each.lines.length).map((each) => chart({ ...each, most: each.lines.every((line) => line.y.every((y) => y <= 1)) ? 1 : Infinity }));
  return [legend(shown.map((stage) => [placeOf(stage), stage])), el("div", { class: "panels" }, charts)];
}

function stageChoice() {
  const change = () => go({ stages: [...document.querySelectorAll("[name=stage]:checked")].map((box) => box.value).join(",") });
  return STAGES.map((stage) => el("label", {}, el("input", { type: "checkbox", name: "stage", value: stage, onchange: change }), ` ${stage}`));
}

// Problems -----------------------------------------------------------------------------------------------------------

// A problem: [question, reference, [[answer, state], ..], {row: [greedy, latents, outcome, count, outcome, count, ..]}, {row: thought}]
const solves = ([, , outcomes, cells], row) => {
  const cell = cells[row];
  if (!cell) return null;
  const right = (outcome) => outcomes[outcome][1] === 1;
  return state.by === "greedy" ? right(cell[0]) : cell.some((value, i) => i >= 2 && i % 2 === 0 && right(value));
};

function matching() {
  const wanted = state.text.toLowerCase(), sets = Object.keys(DATA.problems).filter((set) => !state.of || set === state.of);
  const fits = (problem) =>
    (!state.right || solves(problem, state.right) === true) && (!state.wrong || solves(problem, state.wrong) === false) &&
    (!state.kept || Object.keys(problem[4]).length > 0) &&
    (!wanted || [problem[0], problem[1], ...problem[2].map(([answer]) => answer ?? "")].some((text) => text.toLowerCase().includes(wanted)));
  return sets.flatMap((set) => DATA.problems[set].problems.map((problem, index) => [set, index, problem])).filter(([, , problem]) => fits(problem));
}

function chip([answer, number], times = null) {
  const [name, mark] = STATES[number];
  const words = answer ?? (name === "cut" ? "cut at the limit" : "no answer");
  return el("span", { class: `chip ${name}`, "aria-label": `${name}: ${words}${times ? `, ${times} times` : ""}` }, `${mark} ${words}${times > 1 ? ` × ${times}` : ""}`);
}

function thoughtRows(row, thought) {
  const tokens = (nearest) => nearest.map(([text, p]) => el("span", { class: "token" }, el("code", {}, text), ` ${(100 * p).toFixed(0)} %`));
  const stop = (p) => (p === null ? "–" : [el("meter", { value: p, min: 0, max: 1 }), ` ${p.toFixed(2)}`]);
  const rows = thought.latents.map((latent, i) => [el("td", {}, i ? "" : rowName(row)), String(i + 1), el("td", {}, stop(latent.stop)), el("td", {}, tokens(latent.nearest))]);
  return [...rows, [el("td", {}, rows.length ? "" : rowName(row)), "", "writes", el("td", {}, el("code", {}, thought.text))]];
}

function card([set, index, problem]) {
  const [question, reference, outcomes, cells, thoughts] = problem;
  const rows = ROWS.filter((row) => cells[row]).map((row) => {
    const [greedy, latents, ...counts] = cells[row];
    const drawn = Array.from({ length: counts.length / 2 }, (_, i) => [outcomes[counts[2 * i]], counts[2 * i + 1]]).sort((a, b) => b[1] - a[1]);
    const all = drawn.reduce((sum, [, count]) => sum + count, 0), right = drawn.reduce((sum, [[, number], count]) => sum + (number === 1 ? count : 0), 0);
    return [rowName(row), el("td", {}, chip(outcomes[greedy])), String(latents), all ? `${right} of ${all}` : "–", el("td", { class: "answers" }, drawn.map(([outcome, count]) => chip(outcome, count)))];
  });
  const watched = ROWS.filter((row) => thoughts[row]);
  return el("article", { "data-problem": `${set} ${index}` },
    el("h3", {}, `${set}, problem ${index + 1}`), el("p", { class: "question" }, question), el("p", {}, "Reference: ", el("b", {}, reference)),
    table(["row", "greedy", "latents", "right", "rollouts with noise"], rows),
    watched.length ? el("details", { open: state.kept ? "" : null, class: "thought" }, el("summary", {}, "Its thoughts: stop probability of each latent, and the tokens nearest to it"),
      table(["row", "latent", "stop probability", "nearest tokens"], watched.flatMap((row) => thoughtRows(row, thoughts[row])))) : null);
}

function problemsList() {
  const found = matching(), pages = Math.max(1, Math.ceil(found.length / PER_PAGE)), page = Math.min(Math.max(1, Number(state.page) || 1), pages);
  const shown = found.slice((page - 1) * PER_PAGE, page * PER_PAGE);
  const sets = Object.entries(DATA.problems).filter(([set]) => !state.of || set === state.of);
  const parts = sets.filter(([, { problems, total }]) => problems.length < total).map(([set, { problems, total }]) => `the first ${problems.length.toLocaleString("en")} of ${total.toLocaleString("en")} of ${set}`);
  const turn = (to, text) => el("button", { disabled: to < 1 || to > pages ? "" : null, "data-turn": text, onclick: () => go({ page: String(to) }) }, text);
  const all = sets.reduce((sum, [, { problems }]) => sum + problems.length, 0);
  return [
    el("p", { id: "found" }, `${found.length.toLocaleString("en")} of ${all.toLocaleString("en")} problems${parts.length ? `; this page holds ${parts.join(", ")}` : ""}`),
    ...shown.map(card),
    el("p", { class: "controls" }, turn(page - 1, "previous"), el("span", {}, `page ${page} of ${pages}`), turn(page + 1, "next")),
  ];
}

// The page -----------------------------------------------------------------------------------------------------------

const BODIES = { results: resultsTable, differences: differencesTable, training: trainingCharts, problems: problemsList };

function render() {
  const focused = document.activeElement?.dataset ?? {}, kept = ["metric", "turn"].find((key) => focused[key]);
  for (const [id, body] of Object.entries(BODIES)) {
    const place = document.getElementById(id);
    if (place) place.replaceChildren(...[body()].flat());
  }
  if (kept) document.querySelector(`[data-${kept}="${CSS.escape(focused[kept])}"]`)?.focus();
  for (const control of document.querySelectorAll("select, input[name=text]")) if (control.value !== state[control.name]) control.value = state[control.name];
  for (const box of document.querySelectorAll("[name=kept]")) box.checked = Boolean(state.kept);
  for (const box of document.querySelectorAll("[name=stage]")) box.checked = state.stages.split(",").includes(box.value);
}

function build() {
  const rows = ROWS.map((row) => [row, labelOf(row)]), anyRow = [["", "–"], ...rows], body = (id) => el("div", { id });
  const section = (title, ...children) => [el("h2", {}, title), ...children];
  const settings = Object.entries(REPORT.settings).map(([stage, values]) => [stage || "all", el("td", { style: "white-space:normal;text-align:left" }, Object.entries(values).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(", "))]);
  const problemSets = Object.keys(DATA.problems), charts = passCharts(), stops = stopCharts(), legendOfRows = () => legend(ROWS.map((row, place) => [place, rowName(row)]));
  const choices = choicesTable(REPORT.thresholds);
  document.getElementById("main").replaceChildren(
    el("h1", {}, DATA.title), ...REPORT.verdict.map((text) => el("p", { class: "verdict" }, text)),
    el("p", { class: "soft" }, REPORT.runs?.length > 1 ? `Means over ${REPORT.runs.length} training runs: ${REPORT.runs.join(", ")}.` : "One training run. Another training seed may move its figures more than the errors say."),
    ...(REPORT.notes.length ? [el("ul", {}, REPORT.notes.map((note) => el("li", {}, note)))] : []),
    ...section("Results", el("div", { class: "controls" }, choice("set", "set", [...(Object.keys(REPORT.average).length ? [[AVERAGE, setWords(AVERAGE)]] : []), ...SETS.map((set) => [set, set])]),
      choice("columns", "metrics", [["main", "the main ones"], ["unbiased", "unbiased Pass@k"], ["all", "all"]])), body("results"),
      el("h3", {}, "Differences, paired by problem"), el("p", { class: "soft" }, DATA.differences_about), body("differences")),
    ...(charts.length || stops.length ? section("Pass@k and stop times", legendOfRows(), el("div", { class: "panels" }, charts, stops)) : []),
    ...(STAGES.length ? section("Training", el("div", { class: "controls" }, stageChoice(), choice("x", "by", [["step", "step"], ["seconds", "seconds"]])), body("training")) : []),
    ...(problemSets.length ? section("Problems", el("div", { class: "controls" },
      choice("of", "set", [["", "all"], ...problemSets.map((set) => [set, set])]), choice("right", "right", anyRow), choice("wrong", "wrong", anyRow),
      choice("by", "by", [["greedy", "the greedy rollout"], ["any", "any rollout with noise"]]),
      el("label", {}, "text ", el("input", { name: "text", type: "search", oninput: (event) => go({ text: event.target.value, page: "1" }) })),
      el("label", {}, el("input", { name: "kept", type: "checkbox", onchange: (event) => go({ kept: event.target.checked ? "1" : "", page: "1" }) }), " with thoughts")), body("problems"))
      : section("Problems", el("p", {}, "Each run's own report.html shows its problems."))),
    ...section("More", ...(choices.length ? [el("h3", {}, "Choices on the validation split (percent)"), ...choices] : []),
      el("details", {}, el("summary", {}, "What was trained, where not at the defaults"), table(["stage", "settings"], settings)),
      el("details", {}, el("summary", {}, "Definitions"), el("dl", {}, Object.values(DATA.metrics).flatMap(({ title, about: said }) => [el("dt", {}, el("b", {}, title)), el("dd", {}, said)]))),
      el("p", { class: "soft" }, "The numbers are in report.json; every rollout of every problem is in eval/ROW/SET.jsonl.")),
  );
}

function tips() {
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby"); };
  const show = (event) => {
    const node = event.target.closest?.("[data-about]");
    hide();
    if (!node) return;
    tip.textContent = node.dataset.about;
    tip.hidden = false;
    node.setAttribute("aria-describedby", "tip");
    const place = node.getBoundingClientRect(), below = place.bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.left = `${Math.max(6, Math.min(place.left, innerWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${below ? place.bottom + 5 : place.top - tip.offsetHeight - 5}px`;
  };
  for (const name of ["mouseover", "focusin"]) document.addEventListener(name, show);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

readAddress();
build();
tips();
render();
addEventListener("hashchange", () => { readAddress(); render(); });
