// The browser of problems. One is [question, reference, outcomes, cells, thoughts]; outcomes are [answer, number], and
// cells {row: [outcome of the greedy rollout, its latents, outcome, how many rollouts have it, outcome, how many, ..]}.

const PER_PAGE = 20;
const STATES = [["wrong", "✗"], ["right", "✓"], ["cut", "✂"]]; // of an outcome, by its number

const pairsOf = (values) => Array.from({ length: values.length / 2 }, (_, i) => values.slice(2 * i, 2 * i + 2));

// Whether a row solves a problem; null where it was not asked.
function solves([, , outcomes, cells], row) {
  if (!cells[row]) return null;
  const [greedy, , ...rest] = cells[row];
  const judged = state.by === "greedy" ? [greedy] : pairsOf(rest).map(([outcome]) => outcome);
  return judged.some((outcome) => STATES[outcomes[outcome][1]][0] === "right");
}

function matching() {
  const wanted = state.text.toLowerCase();
  const texts = ([question, reference, outcomes]) => [question, reference, ...outcomes.map(([answer]) => answer ?? "")];
  const says = (problem) => texts(problem).some((text) => text.toLowerCase().includes(wanted));
  const fits = (problem) =>
    (!state.right || solves(problem, state.right) === true) &&
    (!state.wrong || solves(problem, state.wrong) === false) &&
    (!state.kept || Object.keys(problem[4]).length > 0) &&
    (!wanted || says(problem));
  return chosenSets().flatMap(([set, { problems }]) =>
    problems.map((problem, index) => [set, index, problem]).filter(([, , problem]) => fits(problem)),
  );
}

const chosenSets = () => Object.entries(DATA.problems).filter(([set]) => !state.of || set === state.of);

function chip([answer, number], times = 1) {
  const [name, mark] = STATES[number];
  const said = answer ?? (name === "cut" ? "truncated" : "no answer");
  const often = times > 1 ? ` × ${times}` : "";
  return el("span", { class: `chip ${name}`, "aria-label": `${name}: ${said}${often}` }, `${mark} ${said}${often}`);
}

function answersRow(row, outcomes, [greedy, latents, ...rest]) {
  const drawn = pairsOf(rest).sort((a, b) => b[1] - a[1]);
  const sum = (pairs) => pairs.reduce((all, [, times]) => all + times, 0);
  const right = sum(drawn.filter(([outcome]) => outcomes[outcome][1] === 1));
  const chips = drawn.map(([outcome, times]) => chip(outcomes[outcome], times));
  return [
    rowName(row, -1),
    chip(outcomes[greedy]),
    String(latents),
    drawn.length ? `${right} of ${sum(drawn)}` : "–",
    el("td", { class: "answers" }, chips),
  ];
}

// Of latents that are said in words, a thought's are at its last one.
const isSaid = (latents) => latents.some(({ words }) => words !== undefined);

function thoughtRows(row, { text, latents }, said) {
  const token = ([said, p]) => el("span", { class: "token" }, el("code", {}, said), ` ${(100 * p).toFixed(0)} %`);
  const stop = (p) => (p === null ? "–" : [el("meter", { value: p, min: 0, max: 1 }), ` ${p.toFixed(2)}`]);
  const inWords = ({ words }) => (said ? [words ? el("code", {}, words) : ""] : []);
  const seen = latents.map((each, i) => [String(i + 1), stop(each.stop), each.likeliest.map(token), ...inWords(each)]);
  const rows = [...seen, ["", "writes", el("code", {}, text), ...inWords({})]];
  return rows.map((cells, i) => [i ? "" : rowName(row, -1), ...cells]);
}

function card([set, index, [question, reference, outcomes, cells, thoughts]]) {
  const asked = ROWS.filter((row) => cells[row]).map((row) => answersRow(row, outcomes, cells[row]));
  const said = Object.values(thoughts).some(({ latents }) => isSaid(latents));
  const seen = ROWS.filter((row) => thoughts[row]).flatMap((row) => thoughtRows(row, thoughts[row], said));
  const words = said ? ", and what it says" : "";
  const summary = `Its thoughts: the stop probability of each latent, and the likeliest tokens in its place${words}`;
  return el(
    "article",
    { "data-problem": `${set} ${index}` },
    el("h3", {}, `${set}, problem ${index + 1}`),
    el("p", { class: "question" }, question),
    el("p", {}, "Reference: ", el("b", {}, reference)),
    table(["row", "greedy", "latents", "right", "rollouts with noise"], asked),
    seen.length
      ? el("details", { open: state.kept ? "" : null }, el("summary", {}, summary),
          table(["row", "latent", "stop probability", "likeliest tokens", ...(said ? ["in words"] : [])], seen))
      : null,
  );
}

function problemsList() {
  const found = matching();
  const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
  const page = Math.min(Math.max(1, Number(state.page) || 1), pages);
  const all = chosenSets().reduce((sum, [, { problems }]) => sum + problems.length, 0);
  const parts = chosenSets()
    .filter(([, { problems, total }]) => problems.length < total)
    .map(([set, { problems, total }]) => `the first ${count(problems.length)} of ${count(total)} of ${set}`);
  const holds = parts.length ? `; this page holds ${parts.join(", ")}` : "";
  const turn = (to, text) => {
    const disabled = to < 1 || to > pages ? "" : null;
    return el("button", { disabled, "data-turn": text, onclick: () => go({ page: String(to) }) }, text);
  };
  return [
    el("p", {}, `${count(found.length)} of ${count(all)} problems${holds}`),
    ...found.slice((page - 1) * PER_PAGE, page * PER_PAGE).map(card),
    el("p", { class: "controls" }, turn(page - 1, "previous"), `page ${page} of ${pages}`, turn(page + 1, "next")),
  ];
}
