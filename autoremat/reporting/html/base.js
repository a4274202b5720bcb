// Reading the report, and numbers in words. Every script below shares this scope.

const KINDS = ["resident", "output", "saved", "fetched", "gradient", "recomputed", "activation", "workspace"];
const KIND_NAMES = {
  resident: "Resident", output: "Outputs", saved: "Saved", fetched: "Fetched back", gradient: "Gradients",
  recomputed: "Recomputed", activation: "Activations", workspace: "Workspace",
};

const byId = (id) => document.getElementById(id);

/** An element with a class, a text (never markup) and children. */
function make(tag, className = "", text = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  element.append(...children);
  return element;
}

/** A size for people, rounded as the command line rounds it. */
function sizeText(nbytes, digits = 1) {
  if (Math.abs(nbytes) < 1000) return `${Math.round(nbytes)} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let power = 1;
  while (power < units.length && Number((Math.abs(nbytes) / 1000 ** power).toFixed(digits)) >= 1000) power++;
  return `${(nbytes / 1000 ** power).toFixed(digits)} ${units[power - 1]}`;
}

function timeText(us, digits = 1) {
  for (const [unit, scale] of [["µs", 1], ["ms", 1e3]]) {
    if (Number((us / scale).toFixed(digits)) < 1000) return `${(us / scale).toFixed(digits)} ${unit}`;
  }
  return `${(us / 1e6).toFixed(digits)} s`;
}

const countText = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

/** Columns of texts by number become columns of texts. */
function named(columns, texts, names) {
  const found = { ...columns };
  for (const name of names) found[name] = columns[name].map((number) => texts[number]);
  return found;
}

function readReport() {
  const report = JSON.parse(byId("report").textContent);
  for (const graph of report.graphs) {
    graph.values = named(graph.values, report.texts, ["name", "dtype", "action", "source", "module", "op", "reason"]);
    const timeline = graph.timeline;
    if (!timeline) continue;
    timeline.steps = named(timeline.steps, report.texts, ["name", "op", "module", "source"]);
    timeline.spans = named(timeline.spans, report.texts, ["value", "kind"]);
    timeline.moduleOf = new Map(graph.values.name.map((name, i) => [name, graph.values.module[i]]));
    prepare(timeline, graph.waiting ? graph.waiting.trips : []);
  }
  return report;
}

/** Adds what every drawing needs: bytes per kind and step, ends of the steps in time, copies each way. */
function prepare(timeline, trips) {
  const { steps, spans } = timeline;
  const count = steps.name.length;
  timeline.count = count;
  timeline.perKind = {};
  for (const kind of KINDS) timeline.perKind[kind] = new Float64Array(count);
  for (let i = 0; i < spans.value.length; i++) {
    const bytes = timeline.perKind[spans.kind[i]];
    bytes[spans.born[i]] += spans.nbytes[i];
    if (spans.last[i] + 1 < count) bytes[spans.last[i] + 1] -= spans.nbytes[i];
  }
  for (const kind of KINDS) {
    const bytes = timeline.perKind[kind];
    for (let i = 1; i < count; i++) bytes[i] += bytes[i - 1];
  }
  timeline.perKind.resident.fill(timeline.resident_nbytes);
  timeline.perKind.workspace.set(steps.workspace_nbytes);
  timeline.kinds = KINDS.filter((kind) => kind !== "fetched" || trips.length);
  timeline.copies = {
    out: trips.map((trip) => ({ value: trip.value, nbytes: trip.nbytes, begins: trip.sent_us, ends: trip.gone_us })),
    back: trips.map((trip) => ({ value: trip.value, nbytes: trip.nbytes, begins: trip.returns_us, ends: trip.back_us })),
  };
  timeline.ends = runningSum(steps.time_us.map((us, i) => us + steps.stall_us[i]));
  timeline.baselineEnds = runningSum(timeline.baseline_step_us);
  timeline.peak = timeline.live_nbytes.reduce((best, n, i, all) => (n > all[best] ? i : best), 0);
  const start = steps.is_backward.indexOf(1);
  timeline.backwardStart = start < 0 ? count : start;
}

/** Bytes whose copy is under way while a step runs or waits, each way. */
function flyingAt(timeline, step) {
  const [begins, ends] = [step ? timeline.ends[step - 1] : 0, timeline.ends[step]];
  const sum = (copies) => copies.reduce((sum, copy) => (copy.begins < ends && copy.ends > begins ? sum + copy.nbytes : sum), 0);
  return { out: sum(timeline.copies.out), back: sum(timeline.copies.back) };
}

function runningSum(numbers) {
  let sum = 0;
  return Float64Array.from(numbers, (n) => (sum += n));
}

/** Spans that live at a step, largest first. */
function liveAt(timeline, step, most) {
  const { spans } = timeline;
  const found = [];
  for (let i = 0; i < spans.value.length; i++) {
    if (spans.born[i] <= step && step <= spans.last[i]) found.push(i);
  }
  found.sort((a, b) => spans.nbytes[b] - spans.nbytes[a]);
  return { count: found.length, largest: found.slice(0, most) };
}

/** The colours of the current theme, by name. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}

/** Round numbers that divide a range, about `count` of them. */
function ticks(most, count) {
  if (!(most > 0)) return [0];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = 0; i * step <= most * 1.0001; i++) found.push(i * step);
  return found;
}

/** A tick's size with as many digits as its step needs. */
function tickText(value, step, text) {
  return value === 0 ? "0" : text(value, /\.0 /.test(text(step, 1)) && /\.0 /.test(text(value, 1)) ? 0 : 1);
}
