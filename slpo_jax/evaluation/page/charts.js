// Curves, each drawn as SVG.

const DASHES = ["", "6 3", "8 3 2 3", "6 3", "", "2 3", "10 3"];
const FIRST = ["reward", "loss", "valid_accuracy", "accuracy", "solved", "mixed", "latent_steps", "answer_tokens"];
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [340, 210, 44, 16, 8, 32];

function ticksOf(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: most + 2 }, (_, i) => (first + i) * step).filter((tick) => tick <= high + step * 1e-9);
}

const styleOf = (place) => ({
  stroke: `var(--c${place % 8})`,
  "stroke-dasharray": DASHES[place % DASHES.length],
});

// Where values stand: {x, y} to pixels, with their ticks. log: by powers of two; most: the top that a share can have.
function scales(lines, log, most) {
  const along = (value) => (log ? Math.log2(value) : value);
  const xs = lines.flatMap((line) => line.x.map(along));
  const ys = lines.flatMap((line) => line.y.flatMap((y, i) => (line.se ? [y - line.se[i], y + line.se[i]] : [y])));
  const [x0, x1, least, largest] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const pad = (largest - least) * 0.05 || Math.abs(least) * 0.1 || 0.1;
  const y0 = least >= 0 ? Math.max(0, least - pad) : least - pad;
  const y1 = Math.min(most, largest + pad);
  return {
    x: (value) => LEFT + ((along(value) - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT),
    y: (value) =>
      HEIGHT - BOTTOM - ((Math.max(y0, Math.min(y1, value)) - y0) / (y1 - y0 || 1)) * (HEIGHT - TOP - BOTTOM),
    xTicks: log ? ticksOf(x0, x1, 8).filter(Number.isInteger).map((tick) => 2 ** tick) : ticksOf(x0, x1, 5),
    yTicks: ticksOf(y0, y1, 5),
  };
}

// lines: [{place, name, x, y, se}]
function chart({ title, said, lines, xLabel, log = false, most = Infinity }) {
  const at = scales(lines, log, most);
  const middle = { "text-anchor": "middle" };
  const drawing = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const tick of at.yTicks) {
    const y = at.y(tick);
    const value = Number(tick.toPrecision(6));
    const text = value && Math.abs(value) < 1e-3 ? value.toExponential() : value.toLocaleString("en");
    drawing.append(el("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    drawing.append(el("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const tick of at.xTicks) {
    drawing.append(el("text", { x: at.x(tick), y: HEIGHT - BOTTOM + 15, ...middle }, tick.toLocaleString("en")));
  }
  drawing.append(el("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, ...middle }, xLabel));
  for (const line of lines) drawing.append(...drawnLine(line, at));
  return el("figure", {}, el("figcaption", {}, about(title, said)), drawing);
}

function drawnLine({ place, name, x, y, se }, at) {
  const style = styleOf(place);
  const points = x.map((value, i) => [at.x(value), at.y(y[i])]);
  const nodes = [el("path", { ...style, d: `M${points.join("L")}` }, el("title", {}, name))];
  if (se) {
    const edge = (sign) => x.map((value, i) => [at.x(value), at.y(y[i] + sign * se[i])]);
    const around = [...edge(1), ...edge(-1).reverse()].join("L");
    nodes.unshift(el("path", { class: "band", style: `fill:${style.stroke}`, d: `M${around}Z` }));
  }
  if (points.length > 40) return nodes;
  const said = (i) => `${name}: ${Number(y[i].toPrecision(4))} at ${Number(x[i].toPrecision(4))}`;
  const dot = ([cx, cy], i) => el("circle", { cx, cy, r: 2.4, fill: style.stroke }, el("title", {}, said(i)));
  return [...nodes, ...points.map(dot)];
}

function legend(entries) {
  const sample = (place) => {
    const path = el("path", { ...styleOf(place), d: "M0,5L35,5" });
    return el("svg", { viewBox: "0 0 35 10", "aria-hidden": "true" }, path);
  };
  return el("div", { class: "legend" }, entries.map(([place, name]) => el("span", {}, sample(place), name)));
}

// A chart a set, with a line of each row that `lineOf` (row, set) finds anything for.
function chartsBySet(lineOf, facts) {
  const linesOf = (set) =>
    ROWS.map((row, place) => ({ place, name: labelOf(row), ...lineOf(row, set) })).filter((line) => line.x);
  return SETS.map((set) => ({ ...facts, title: `${facts.title}, ${set}`, lines: linesOf(set) }))
    .filter((each) => each.lines.length)
    .map(chart);
}

function passCharts() {
  const lineOf = (row, set) => {
    const curve = REPORT.curves[row]?.[set];
    const percent = (values) => values.map((value) => 100 * (value ?? 0));
    return curve && { x: curve.k, y: percent(curve.value), se: percent(curve.se) };
  };
  return chartsBySet(lineOf, { title: "Pass@k (%)", xLabel: "k (rollouts)", log: true, most: 100 });
}

function stopCharts() {
  const lineOf = (row, set) => {
    const counts = REPORT.stop_times[row]?.[set]?.greedy;
    const all = counts?.reduce((sum, each) => sum + each, 0);
    return counts && { x: counts.map((_, t) => t), y: counts.map((each) => (100 * each) / all) };
  };
  return chartsBySet(lineOf, { title: "Stop times (% of greedy rollouts)", xLabel: "latents", most: 100 });
}

function trainingCharts() {
  const shown = state.stages.split(",").filter((stage) => STAGES.includes(stage));
  const found = [...new Set(shown.flatMap((stage) => Object.keys(REPORT.training[stage])))];
  const names = [...new Set([...FIRST.filter((name) => found.includes(name)), ...found])];
  const lineOf = (stage, name) => {
    const [steps, values] = REPORT.training[stage][name];
    const [at, elapsed] = REPORT.training[stage].elapsed ?? [[], []];
    const place = (step) => (state.x === "step" ? step : elapsed[at.indexOf(step)]);
    const points = steps.map((step, i) => [place(step), values[i]]).filter(([x]) => x !== undefined);
    return { place: placeOf(stage), name: stage, x: points.map(([x]) => x), y: points.map(([, y]) => y) };
  };
  const charts = names.filter((name) => name !== "elapsed").map((name) => {
    const having = shown.filter((stage) => name in REPORT.training[stage]);
    const lines = having.map((stage) => lineOf(stage, name)).filter((line) => line.x.length);
    const isShare = lines.every((line) => line.y.every((y) => y <= 1));
    const xLabel = state.x === "step" ? "step" : "seconds of the stage's steps";
    return { title: name.replaceAll("_", " "), said: DATA.scalars[name], lines, xLabel, most: isShare ? 1 : Infinity };
  });
  return [
    legend(shown.map((stage) => [placeOf(stage), stage])),
    el("div", { class: "panels" }, charts.filter((each) => each.lines.length).map(chart)),
  ];
}
