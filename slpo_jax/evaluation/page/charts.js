// Curves, each drawn as SVG.

const DASHES = ["", "6 3", "8 3 2 3", "6 3", "", "2 3", "10 3"];
const FIRST = ["reward", "loss", "valid_accuracy", "accuracy", "solved", "mixed", "latent_steps", "answer_tokens"];
const [WIDTH, HEIGHT, RIGHT, TOP, BOTTOM] = [340, 210, 16, 8, 32];
const ASIDE = 2.5; // pixels between the errors of two lines
const MARKS = [ // of a radius of 1, closed: circle, square, triangle, diamond, cross
  "M-1,0A1,1,0,1,1,1,0A1,1,0,1,1,-1,0Z", "M-.9-.9H.9V.9H-.9Z", "M0-1.2L1.1.8H-1.1Z", "M0-1.3L1.3,0L0,1.3L-1.3,0Z",
  "M-1.2-.4H-.4V-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2Z", "M0,1.2L1.1-.8H-1.1Z", "M-1.3-.6H1.3V.6H-1.3Z",
];

const powerOf = (value) => Math.floor(Math.log10(Math.abs(value)) + 1e-9);

// Ticks {value: text} with as many digits as tell them apart; whole: none between whole numbers.
function ticksOf(low, high, most, whole = false) {
  const rough = (high - low) / most || 1;
  const power = 10 ** powerOf(rough);
  const found = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  const step = whole ? Math.max(1, found) : found;
  const first = Math.ceil(low / step - 1e-9);
  const places = Array.from({ length: most + 2 }, (_, i) => first + i).filter((place) => place <= high / step + 1e-9);
  const digits = Math.max(0, -powerOf(step));
  const fixed = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  const text = (tick) =>
    digits < 7 ? tick.toLocaleString("en", fixed) : tick.toExponential(Math.max(0, tick ? powerOf(tick) + digits : 0));
  return places.map((place) => [place * step, text(place * step + 0)]);
}

const styleOf = (place) => ({
  stroke: `var(--c${place % 8})`,
  "stroke-dasharray": DASHES[place % DASHES.length],
});

// Where values stand: {x, y} to pixels, with their ticks. log: by powers of two; most: the top that a share can have.
function scales(lines, { log, most = Infinity, bars, whole }) {
  const along = (value) => (log ? Math.log2(value) : value);
  const xs = lines.flatMap((line) => line.x.map(along));
  const ys = lines.flatMap((line) => line.y.flatMap((y, i) => (line.se ? [y - line.se[i], y + line.se[i]] : [y])));
  const [x0, x1] = [Math.min(...xs) - (bars ? 0.5 : 0), Math.max(...xs) + (bars ? 0.5 : 0)];
  const [least, largest] = [bars ? 0 : Math.min(...ys), Math.max(...ys)];
  const pad = (largest - least) * 0.05 || Math.abs(least) * 0.1 || 0.1;
  const y0 = least >= 0 ? Math.max(0, least - pad) : least - pad;
  const y1 = Math.min(most, largest + pad);
  const powers = () => ticksOf(x0, x1, 8, true).map(([tick]) => [2 ** tick, (2 ** tick).toLocaleString("en")]);
  const yTicks = ticksOf(y0, y1, 5);
  const left = 14 + 6.2 * Math.max(...yTicks.map(([, text]) => text.length));
  const aside = lines.some((line) => line.se) ? (ASIDE * lines.length) / 2 : 0;
  return {
    left,
    x: (value) => left + aside + ((along(value) - x0) / (x1 - x0 || 1)) * (WIDTH - left - RIGHT - 2 * aside),
    y: (value) =>
      HEIGHT - BOTTOM - ((Math.max(y0, Math.min(y1, value)) - y0) / (y1 - y0 || 1)) * (HEIGHT - TOP - BOTTOM),
    xTicks: log ? powers() : ticksOf(x0, x1, 5, whole),
    yTicks,
  };
}

// lines: [{place, name, x, y, se}]; bars: side by side at each x, and not lines.
function chart({ title, said, lines, xLabel, ...how }) {
  const at = scales(lines, how);
  const middle = { "text-anchor": "middle" };
  const drawing = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const [tick, text] of at.yTicks) {
    const y = at.y(tick);
    drawing.append(el("line", { class: "grid", x1: at.left, x2: WIDTH - RIGHT, y1: y, y2: y }));
    drawing.append(el("text", { x: at.left - 5, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const [tick, text] of at.xTicks) {
    drawing.append(el("text", { x: at.x(tick), y: HEIGHT - BOTTOM + 15, ...middle }, text));
  }
  drawing.append(el("text", { x: (at.left + WIDTH - RIGHT) / 2, y: HEIGHT - 3, ...middle }, xLabel));
  const draw = how.bars ? drawnBars : drawnLine;
  lines.forEach((line, i) => {
    drawing.append(el("g", { "data-place": line.place, "data-name": line.name }, draw(line, at, i, lines.length)));
  });
  const save = el("button", { class: "save", onclick: () => saveFigure(drawing, title, lines) }, "SVG");
  return el("figure", {}, el("figcaption", {}, about(title, said), save), drawing);
}

const shortly = (value) => Number(value.toPrecision(4));

// Errors stand at the powers of two, a little beside those of other lines.
function drawnLine({ place, name, x, y, se }, at, i, count) {
  const style = styleOf(place);
  const aside = se ? ASIDE * (i - (count - 1) / 2) : 0;
  const points = x.map((value, n) => [at.x(value) + aside, at.y(y[n])]);
  const nodes = [el("path", { ...style, d: `M${points.join("L")}` }, el("title", {}, name))];
  const isMarked = (n) => (se ? Number.isInteger(Math.log2(x[n])) : points.length <= 40);
  for (const [n, [cx, cy]] of points.entries()) {
    if (!isMarked(n)) continue;
    if (se) nodes.push(el("path", { stroke: style.stroke, d: `M${cx},${at.y(y[n] - se[n])}V${at.y(y[n] + se[n])}` }));
    const said = `${name}: ${shortly(y[n])}${se ? ` ± ${shortly(se[n])}` : ""} at ${shortly(x[n])}`;
    const mark = { d: MARKS[place % MARKS.length], transform: `translate(${cx},${cy})scale(${se ? 2.6 : 2.4})` };
    nodes.push(el("path", { class: "mark", style: `fill:${style.stroke}`, ...mark }, el("title", {}, said)));
  }
  return nodes;
}

function drawnBars({ place, name, x, y }, at, i, count) {
  const width = (0.84 * (at.x(1) - at.x(0))) / count;
  return x.map((value, n) => {
    const [left, top] = [at.x(value) + (i - count / 2) * width, at.y(y[n])];
    const box = { x: left, y: top, width: 0.9 * width, height: at.y(0) - top, fill: styleOf(place).stroke };
    return el("rect", box, el("title", {}, `${name}: ${shortly(y[n])} % at ${value}`));
  });
}

function sample(place) {
  const mark = { class: "mark", d: MARKS[place % MARKS.length], transform: "translate(17.5,5)scale(3.4)" };
  return [
    el("path", { ...styleOf(place), d: "M0,5L35,5" }),
    el("path", { ...mark, style: `fill:${styleOf(place).stroke}` }),
  ];
}

// A row's name, which brings its curves out while the mouse or the keyboard is on it.
function legend(entries) {
  const only = (place) => () => {
    for (const line of document.querySelectorAll("g[data-place]")) {
      line.classList.toggle("faint", place !== null && line.dataset.place !== String(place));
    }
  };
  const drawn = (place) => el("svg", { viewBox: "0 0 35 10", "aria-hidden": "true" }, sample(place));
  const [on, off] = [(place) => ({ onmouseenter: only(place), onfocusin: only(place) }), only(null)];
  const entry = ([place, name]) => el("span", { ...on(place), onmouseleave: off, onfocusout: off }, drawn(place), name);
  return el("div", { class: "legend" }, entries.map(entry));
}

// The figure as it is seen, with its title and a legend below.
function saveFigure(drawing, title, lines) {
  const copy = drawing.cloneNode(true);
  const height = HEIGHT + 25 + 15 * lines.length;
  const size = { viewBox: `0 -20 ${WIDTH} ${height}`, width: 2 * WIDTH, height: 2 * height };
  const looks = { ...size, style: "background:var(--paper)" };
  for (const [name, value] of Object.entries(looks)) copy.setAttribute(name, value);
  const rules = [...document.styleSheets[0].cssRules].map((rule) => rule.cssText);
  copy.prepend(el("style", {}, rules.filter((rule) => /^svg [^{]/.test(rule)).join("\n")));
  copy.append(el("text", { x: 4, y: -6 }, title));
  lines.forEach(({ place, name }, i) => {
    const entry = [...sample(place), el("text", { x: 42, y: 9 }, name)];
    copy.append(el("g", { transform: `translate(10,${HEIGHT + 5 + 15 * i})` }, entry));
  });
  const colours = getComputedStyle(document.documentElement);
  const plain = (_, name) => colours.getPropertyValue(name).trim(); // few programs know variables
  const text = new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)\)/g, plain);
  save(title, "svg", "image/svg+xml", text);
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
  const facts = { title: "Stop times (% of greedy rollouts)", xLabel: "latents", most: 100 };
  return chartsBySet(lineOf, { ...facts, bars: true, whole: true });
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
    const how = { most: isShare ? 1 : Infinity, whole: state.x === "step" };
    return { title: name.replaceAll("_", " "), said: DATA.scalars[name], lines, xLabel, ...how };
  });
  return [
    legend(shown.map((stage) => [placeOf(stage), stage])),
    el("div", { class: "panels" }, charts.filter((each) => each.lines.length).map(chart)),
  ];
}
