// The page of a run: draws what `#data` holds. All text of models and data enters as text nodes, never as markup.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const NUM_COLORS = 12;
const PAGE_ROWS = 25;
const FEW_POINTS = 25; // a curve of so few is drawn with its points and never smoothed

// ---------------------------------------------------------------- small helpers

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Characters that cannot be seen, or that move, hide or turn round the text beside them, are shown by their number;
// not so the joiner inside an emoji.
const HIDDEN = /(?!(?<=\p{Extended_Pictographic}\uFE0F?\p{Emoji_Modifier}?)\u200D)[^\P{C}\n\t]|[\u2028\u2029]/gu;

function inert(text) {
  const fragment = document.createDocumentFragment();
  const source = String(text);
  let end = 0;
  for (const match of source.matchAll(HIDDEN)) {
    fragment.append(source.slice(end, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    fragment.append(el("span", { class: "ctl", title: "a character that cannot be seen" }, `U+${code}`));
    end = match.index + match[0].length;
  }
  fragment.append(source.slice(end));
  return fragment;
}

function textBox(text, tag = "div") {
  if (text === null || text === undefined || text === "") return el(tag, { class: "text empty" }, "(empty)");
  return el(tag, { class: "text" }, inert(typeof text === "string" ? text : JSON.stringify(text)));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function scoreBadge(score) {
  if (typeof score !== "number") return el("span", { class: "score", title: "no verdict" }, score ? String(score) : "none");
  return el("span", { class: `score ${score > 0.5 ? "high" : "low"}` }, number(score));
}

function facts(pairs, small) {
  const spans = pairs.map(([key, value]) => el("span", {}, el("b", {}, inert(key)), inert(value)));
  return el("div", { class: small ? "facts small" : "facts" }, ...spans);
}

// ---------------------------------------------------------------- top of the page

function setTheme(theme) {
  root.dataset.theme = theme;
  for (const chart of charts) chart.redraw();
}

function startTheme() {
  const asked = /theme=(dark|light)/.exec(location.hash);
  const system = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = asked ? asked[1] : system.matches ? "dark" : "light";
  system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
}

function showTop() {
  const tone = { finished: "good", failed: "bad" }[data.status.word];
  if (tone) byId("status").classList.add(tone);
  byId("status").title = data.status.detail;
  byId("facts").replaceWith(facts(data.run));
  for (const tile of data.tiles) {
    byId("tiles").append(
      el("div", { class: "tile" }, el("p", { class: "label" }, tile.label), el("p", { class: "value" }, tile.value),
        el("p", { class: "note" }, tile.note)),
    );
  }
  byId("written").textContent = `Written ${data.written} by distflow. This file is complete: it loads nothing.`;
}

function showProblems() {
  if (!data.problems.length) return;
  byId("problems").hidden = false;
  for (const group of data.problems) {
    const where = [];
    if (group.count > 1) where.push(`${group.count.toLocaleString("en")} times`);
    if (group.first !== null) where.push(group.count > 1 ? `steps ${group.first} to ${group.last}` : `step ${group.first}`);
    if (group.rolled_back) where.push("rolled back");
    const item = el("li", { class: group.kind }, el("span", { class: "kind" }, group.kind), inert(group.message), " ",
      el("span", { class: "where" }, where.join(", ")));
    const fields = Object.entries(group.fields).map(([key, value]) =>
      [key, typeof value === "string" ? value : JSON.stringify(value)]);
    if (fields.length) item.append(facts(fields, true));
    byId("problems").querySelector("ul").append(item);
  }
}

function showCompare() {
  const compare = data.compare;
  if (!compare) return;
  const section = byId("compare");
  section.hidden = false;
  const problems = (n) => `${n.toLocaleString("en")} problem${n === 1 ? "" : "s"}`;
  let lead = `The same held-out problems at step ${compare.first} and at step ${compare.last}: ${problems(compare.num_better)} ` +
    `scored higher afterwards, ${compare.num_worse.toLocaleString("en")} lower, ${compare.num_same.toLocaleString("en")} the same.`;
  if (compare.lengths) {
    lead += ` Mean length of a response: ${compare.lengths[0].toFixed(1)} tokens before, ${compare.lengths[1].toFixed(1)} after.`;
  }
  section.querySelector(".lead").textContent = lead;
  for (const pair of compare.examples) {
    const answer = (name, side) => el("div", { class: "answer" },
      el("h4", {}, el("span", {}, side.num_answers > 1 ? `${name}, 1 of ${side.num_answers}` : name), scoreBadge(side.score)),
      textBox(side.response));
    const card = el("article", { class: "pair" }, el("div", { class: "text prompt", tabindex: "0" }, inert(pair.prompt ?? "")));
    if (pair.ground_truth !== undefined) {
      card.append(el("div", { class: "truth" }, "ground truth: ", textBox(pair.ground_truth, "span")));
    }
    card.append(el("div", { class: "answers" },
      answer(`step ${compare.first}`, pair.before), answer(`step ${compare.last}`, pair.after)));
    section.querySelector(".pairs").append(card);
  }
}

// ---------------------------------------------------------------- curves

const charts = [];
const sync = uPlot.sync("run");

// Columns of a chart: only the steps that one of its metrics was measured at. A step without a measurement is
// `undefined` (joined over), a measurement that is not finite is `null` (a gap) and gets a mark.
function columns(names) {
  const rows = [];
  for (let i = 0; i < data.series.x.length; i++) {
    if (names.some((name) => data.series.y[name][i] !== null)) rows.push(i);
  }
  const x = rows.map((i) => data.series.x[i]);
  const marks = [];
  const y = names.map((name, s) => rows.map((i, at) => {
    const value = data.series.y[name][i];
    if (typeof value === "string") {
      marks.push({ x: x[at], series: s, value });
      return null;
    }
    return value === null ? undefined : value;
  }));
  return { x, y, marks };
}

function smooth(values, weight) {
  if (!weight) return values;
  let mean = null;
  let total = 0;
  return values.map((value) => {
    if (typeof value !== "number") return value;
    mean = (mean ?? 0) * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

function stack(y, shown) {
  let below = null;
  return y.map((values, s) => {
    if (!shown[s]) return values.map(() => undefined);
    below = values.map((value, i) => (typeof value === "number" ? value : 0) + (below ? below[i] : 0));
    return below;
  });
}

function shortNames(names) {
  if (names.length === 1) return names;
  const parts = names.map((name) => name.split("/"));
  let same = 0;
  while (parts.every((p) => p.length > same + 1 && p[same] === parts[0][same])) same++;
  return parts.map((p) => p.slice(same).join("/"));
}

class Chart {
  constructor(spec, place) {
    this.spec = spec;
    this.shown = spec.names.map(() => true);
    this.columns = columns(spec.names);
    this.labels = shortNames(spec.names);
    this.build(place);
    charts.push(this);
  }

  build(place) {
    const { spec } = this;
    this.values = [];
    const legend = el("div", { class: "legend", role: "group", "aria-label": "Lines" }, ...spec.names.map((name, s) => {
      const value = el("b", {});
      this.values.push(value);
      const button = el("button", { type: "button", "aria-pressed": "true", title: this.title(name), onclick: () => this.toggle(s, button) },
        inert(this.labels[s]), value);
      button.style.setProperty("--c", `var(--c${s % NUM_COLORS})`);
      return button;
    }));
    this.plotPlace = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": this.summary(), onkeydown: (event) => this.key(event) });
    const doc = data.docs[spec.names[0]];
    this.figure = el("figure", { class: "chart" },
      el("div", { class: "head" }, el("h3", {}, inert(spec.question)), el("span", { class: "unit" }, spec.unit)),
      legend, this.plotPlace, el("figcaption", {}, spec.kind === "stack" ? "the phases on top of each other" : doc ? inert(`${this.labels[0]}: ${doc}`) : "",
        this.columns.marks.length ? el("span", { class: "bad" }, ` × ${this.columns.marks.length} not finite`) : ""));
    place.append(this.figure);
    this.redraw();
    new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.plotPlace);
  }

  title(name) {
    return data.docs[name] ? `${name}: ${data.docs[name]}` : name;
  }

  summary() {
    const parts = this.spec.names.map((name, s) => {
      const known = this.columns.y[s].filter((v) => typeof v === "number");
      return known.length ? `${name} from ${number(known[0])} to ${number(known[known.length - 1])}` : name;
    });
    return `${this.spec.question} ${parts.join("; ")}. Arrow keys move along the steps.`;
  }

  size() {
    return { width: Math.max(this.plotPlace.clientWidth, 120), height: 210 };
  }

  // With smoothing, a faint raw line stays under each smoothed one.
  drawn() {
    const { x, y } = this.columns;
    const weight = Number(byId("smoothing").value);
    const visible = (values, s) => (this.shown[s] ? values : values.map(() => undefined));
    if (this.spec.kind === "stack") {
      const smoothed = y.map((values) => smooth(values, weight));
      const stacked = stack(smoothed, this.shown);
      const color = (s) => `--c${s % NUM_COLORS}`;
      // Filled from the top of the stack down, so that each layer covers the sum of those below it.
      const order = stacked.map((_, s) => s).reverse();
      return { data: [x, ...order.map((s) => stacked[s])], lines: order.map((s) => ({ color: css(color(s)), width: 1, fill: true })) };
    }
    const lines = [];
    const columnsDrawn = [x];
    // The first line is drawn last: where two are equal it is the one to see.
    [...y.keys()].reverse().forEach((s) => {
      const values = y[s];
      const color = css(`--c${s % NUM_COLORS}`);
      const isDense = values.filter((value) => value !== undefined).length > FEW_POINTS;
      if (weight && isDense) {
        columnsDrawn.push(visible(values, s));
        lines.push({ color: `${color}55`, width: 1 });
      }
      columnsDrawn.push(visible(isDense ? smooth(values, weight) : values, s));
      lines.push({ color, width: 2, points: !isDense });
    });
    return { data: columnsDrawn, lines };
  }

  redraw() {
    const { data: drawn, lines } = this.drawn();
    this.plot?.destroy();
    const isStack = this.spec.kind === "stack";
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const range = (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (isStack) return [0, high * 1.05 || 1];
      const space = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
      return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
    };
    const first = this.columns.x[0];
    const last = this.columns.x[this.columns.x.length - 1];
    const options = {
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, ...(first === last ? { range: () => [first - 1, first + 1] } : {}) }, y: { range } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1000000] },
        { ...axis, size: 52, gap: 4, space: 34, values: (_, ticks) => ticks.map(number) },
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: line.color, width: line.width, fill: line.fill ? line.color : undefined,
        points: { show: Boolean(line.points), size: 6, fill: line.color },
      }))],
      hooks: { setCursor: [(plot) => this.readOut(plot)], draw: [(plot) => this.mark(plot)] },
    };
    this.plot = new uPlot(options, drawn, this.plotPlace);
    this.readOut(this.plot);
  }

  // The legend shows the values under the cursor, or the last ones.
  readOut(plot) {
    const at = plot.cursor.idx;
    this.values.forEach((place, s) => {
      const column = this.columns.y[s];
      let value = at === null || at === undefined ? undefined : column[at];
      if (value === null) value = this.columns.marks.find((m) => m.series === s && m.x === this.columns.x[at]).value;
      if (at === null || at === undefined) value = column.filter((v) => v !== undefined).pop() ?? undefined;
      place.textContent = number(value);
    });
    const step = at === null || at === undefined ? "" : ` · step ${this.columns.x[at]}`;
    this.figure.querySelector(".unit").textContent = this.spec.unit + step;
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    const size = 4 * devicePixelRatio;
    const y = bbox.top + bbox.height - size * 2;
    for (const mark of this.columns.marks) {
      if (!this.shown[mark.series]) continue;
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = css("--bad");
      ctx.beginPath();
      ctx.moveTo(x - size, y - size);
      ctx.lineTo(x + size, y + size);
      ctx.moveTo(x - size, y + size);
      ctx.lineTo(x + size, y - size);
      ctx.stroke();
    }
    ctx.restore();
  }

  toggle(s, button) {
    this.shown[s] = !this.shown[s];
    button.setAttribute("aria-pressed", String(this.shown[s]));
    this.redraw();
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const top = this.columns.x.length - 1;
    const at = Math.min(Math.max((this.plot.cursor.idx ?? top) + moves[event.key], 0), top);
    this.plot.setCursor({ left: this.plot.valToPos(this.columns.x[at], "x"), top: 20 });
  }
}

function showCharts() {
  const note = [];
  if (data.series.thinned) note.push("Neighbouring steps are put together, each curve keeps its lowest and highest values.");
  if (data.series.left_out.length) note.push(`${data.series.left_out.length} more metrics are only in metrics.jsonl.`);
  if (data.series.x.length === 0) note.push("No metrics were recorded.");
  else note.push("Point at a chart to read all of them at one step; drag to zoom, double-click to zoom out.");
  byId("curves-note").textContent = note.join(" ");
  for (const spec of data.charts) new Chart(spec, byId("charts"));
  byId("smoothing").value = data.series.x.length > 40 ? "0.6" : "0";
  if (byId("smoothing").value !== "0") for (const chart of charts) chart.redraw();
  byId("smoothing").addEventListener("change", () => { for (const chart of charts) chart.redraw(); });
  if (!data.others.length) return;
  const others = byId("others");
  others.hidden = false;
  others.querySelector("summary").textContent = `${data.others.length} other metric${data.others.length > 1 ? "s" : ""}`;
  others.addEventListener("toggle", () => {
    for (const name of data.others) {
      new Chart({ question: name, kind: "line", unit: "", names: [name] }, others.querySelector(".charts"));
    }
  }, { once: true });
}

// ---------------------------------------------------------------- samples

const COLUMNS = [
  { key: "step", label: "step", width: "5.6rem", value: (row) => row.step },
  { key: "split", label: "set", width: "4.6rem", value: (row) => row.split, wide: true },
  { key: "score", label: "score", width: "5.2rem", value: (row) => row.score },
  { key: "advantage", label: "adv.", width: "5rem", value: (row) => row.advantage, wide: true },
  { key: "length", label: "tokens", width: "5rem", value: (row) => row.response_length, wide: true },
  { key: "prompt", label: "prompt", value: (row) => row.prompt ?? "" },
  { key: "response", label: "response", value: (row) => row.response ?? "" },
];

class Samples {
  constructor() {
    const { rows, num_rows, num_steps, all_steps } = data.samples;
    if (!rows.length) return;
    this.section = byId("samples");
    this.section.hidden = false;
    this.form = this.section.querySelector("form");
    this.sort = { column: COLUMNS[0], down: true };
    this.page = 0;
    const all = rows.length === num_rows && num_steps === all_steps;
    this.section.querySelector(".lead").textContent = all
      ? "All samples of the run. Open one to read it whole."
      : `${rows.length.toLocaleString("en")} samples, evenly taken from ${num_steps} of ${all_steps} sample files; all are in the folder samples.`;
    this.steps();
    this.head();
    this.form.addEventListener("input", () => this.show(0));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.show(0)));
    this.show(0);
  }

  steps() {
    const select = this.form.elements.step;
    select.append(el("option", { value: "" }, "all"));
    for (const name of new Set(data.samples.rows.map((row) => `${row.split} ${row.step}`))) {
      select.append(el("option", { value: name }, inert(name)));
    }
  }

  head() {
    const row = el("tr");
    for (const column of COLUMNS) {
      const button = el("button", { type: "button", onclick: () => this.sortBy(column) }, column.label);
      column.cell = el("th", { scope: "col", class: column.wide ? "wide-only" : "" }, button);
      if (column.width) column.cell.style.width = column.width;
      row.append(column.cell);
    }
    this.section.querySelector("thead").append(row);
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : typeof data.samples.rows[0][column.key] === "number" };
    this.show(0);
  }

  chosen() {
    const { text, step, low, high } = this.form.elements;
    const words = text.value.toLowerCase();
    const rows = data.samples.rows.filter((row) => {
      if (step.value && `${row.split} ${row.step}` !== step.value) return false;
      if (low.value !== "" && !(row.score >= Number(low.value))) return false;
      if (high.value !== "" && !(row.score <= Number(high.value))) return false;
      return !words || [row.prompt, row.response, row.ground_truth].some((t) => String(t ?? "").toLowerCase().includes(words));
    });
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    return rows.map((row) => [column.value(row), row]).sort(([a], [b]) => {
      const known = [a, b].map((v) => v !== null && v !== undefined);
      if (!known[0] || !known[1]) return known[1] - known[0];
      return a < b ? -sign : a > b ? sign : 0;
    }).map(([, row]) => row);
  }

  show(page) {
    this.page = page;
    const rows = this.chosen();
    for (const column of COLUMNS) {
      if (column === this.sort.column) column.cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else column.cell.removeAttribute("aria-sort");
    }
    const from = page * PAGE_ROWS;
    this.section.querySelector("tbody").replaceChildren(...rows.slice(from, from + PAGE_ROWS).map((row) => this.row(row)));
    this.section.querySelector(".count").textContent =
      rows.length ? `${(from + 1).toLocaleString("en")} to ${Math.min(from + PAGE_ROWS, rows.length).toLocaleString("en")} of ${rows.length.toLocaleString("en")}` : "No sample fits these filters.";
    const turn = (label, to, possible) => {
      const button = el("button", { type: "button", onclick: () => this.show(to) }, label);
      button.disabled = !possible;
      return button;
    };
    const more = from + PAGE_ROWS < rows.length;
    this.section.querySelector(".pages").replaceChildren(...(page || more ? [turn("← earlier", page - 1, page > 0), turn("later →", page + 1, more)] : []));
  }

  row(sample) {
    const line = (text) => textBox(String(text ?? "").slice(0, 160).replace(/\s*\n\s*/g, " ⏎ "), "span");
    const open = el("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": "Read the whole sample" }, "▸");
    const row = el("tr", { class: "sample", onclick: (event) => {
      if (event.target.closest("button") || !String(getSelection())) this.expand(row, sample, open);
    } },
      el("td", { class: "number" }, open, number(sample.step)),
      el("td", { class: "wide-only" }, inert(sample.split)),
      el("td", { class: "number" }, scoreBadge(sample.score)),
      el("td", { class: "number wide-only" }, number(sample.advantage)),
      el("td", { class: "number wide-only" }, number(sample.response_length)),
      el("td", {}, line(sample.prompt)),
      el("td", {}, line(sample.response)),
    );
    return row;
  }

  expand(row, sample, open) {
    const isOpen = open.getAttribute("aria-expanded") === "true";
    open.setAttribute("aria-expanded", String(!isOpen));
    open.textContent = isOpen ? "▸" : "▾";
    if (isOpen) {
      row.nextSibling.remove();
      return;
    }
    const part = (title, text) => el("div", {}, el("h4", {}, title), textBox(text));
    const more = [];
    if (sample.domain) more.push(["domain", sample.domain]);
    for (const [name, value] of Object.entries(sample.reward_parts ?? {})) {
      more.push([`reward ${name}`, value !== null && typeof value === "object" ? JSON.stringify(value) : number(value)]);
    }
    if (sample.errors && sample.errors.length !== 0) more.push(["errors", typeof sample.errors === "string" ? sample.errors : JSON.stringify(sample.errors)]);
    if (sample.advantage !== undefined) more.push(["advantage", number(sample.advantage)]);
    if (sample.prompt_length !== undefined) more.push(["prompt tokens", number(sample.prompt_length)]);
    if (sample.response_length !== undefined) more.push(["response tokens", number(sample.response_length)]);
    if (sample.finish_reason) more.push(["ended by", sample.finish_reason]);
    if (sample.versions !== undefined) more.push(["weights of step", [].concat(sample.versions).join(" to ")]);
    if (sample.uid) more.push(["uid", sample.uid]);
    const cell = el("td", { colspan: COLUMNS.length },
      el("div", { class: "full" }, part("prompt", sample.prompt), part("response", sample.response)));
    if (sample.ground_truth !== undefined) more.unshift(["ground truth", typeof sample.ground_truth === "string" ? sample.ground_truth : JSON.stringify(sample.ground_truth)]);
    cell.append(facts(more, true));
    row.after(el("tr", { class: "more" }, cell));
  }
}

// ---------------------------------------------------------------- bottom of the page

function showLog() {
  if (!data.log.length) return;
  byId("log").hidden = false;
  for (const event of data.log) {
    const when = event.t ? new Date(event.t * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
    const what = event.step === null ? event.kind : `${event.kind} ${event.step}`;
    byId("log").querySelector("ol").append(el("li", { class: event.rolled_back ? "gone" : "" },
      el("time", {}, when), el("span", {}, inert(what)), el("span", {}, inert(event.message))));
  }
}

function showConfig() {
  if (!data.config) return;
  byId("config").hidden = false;
  byId("config").querySelector("pre").append(inert(data.config));
}

startTheme();
showTop();
showProblems();
showCompare();
showCharts();
new Samples();
showLog();
showConfig();
root.dataset.ready = String(charts.length);
