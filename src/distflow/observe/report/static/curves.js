// The curves: one figure for each question, drawn with uPlot.

const NUM_COLORS = 12;
const FEW_POINTS = 25; // a curve of so few is drawn with its points and never smoothed
const charts = [];
const sync = uPlot.sync("run");
let zoom = null; // from where to where along the axis, if not everything is shown

// Columns of a chart: only the steps that one of its metrics was measured at. A step without a measurement is
// `undefined` (joined over), a measurement that is not finite is `null` (a gap) and gets a mark.
function columns(names) {
  const rows = [];
  for (let i = 0; i < data.series.x.length; i++) {
    if (names.some((name) => (data.series.y[name]?.[i] ?? null) !== null)) rows.push(i);
  }
  const x = rows.map((i) => data.series.x[i]);
  const marks = [];
  const y = names.map((name, s) => rows.map((i, at) => {
    const value = data.series.y[name]?.[i] ?? null;
    if (typeof value === "string") {
      marks.push({ at, series: s, value });
      return null;
    }
    return value === null ? undefined : value;
  }));
  const bars = names.map((name, s) => numTrials(name) && y[s].map((share) => wilson(share, numTrials(name))));
  return { x, y, marks, bars };
}

// The problems of a domain's accuracy. Several responses to a problem are one trial.
function numTrials(name) {
  const domain = /^val_correct\/(.+)\/[^/]+$/.exec(name);
  return domain ? data.trials[domain[1]] ?? 0 : 0;
}

// The 95 % score interval of a share of independent trials (Wilson, JASA 22:158, 1927); null if it is no share.
function wilson(share, trials) {
  if (typeof share !== "number" || share < 0 || share > 1) return null;
  const z = 1.96;
  const middle = share + (z * z) / (2 * trials);
  const half = z * Math.sqrt((share * (1 - share)) / trials + ((z / trials) ** 2) / 4);
  return [middle - half, middle + half].map((end) => Math.min(Math.max(end / (1 + (z * z) / trials), 0), 1));
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
    const short = shortNames(spec.names);
    this.labels = spec.names.map((name, s) => spec.labels?.[name] ?? short[s]);
    this.colors = spec.names.map((name, s) => `--c${(spec.colors?.[name] ?? s) % NUM_COLORS}`);
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
      button.style.setProperty("--c", `var(${this.colors[s]})`);
      return button;
    }));
    this.plotPlace = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": this.summary(), onkeydown: (event) => this.key(event),
      onclick: (event) => event.shiftKey && this.openStep() });
    this.at = el("span", { class: "at" });
    const doc = data.docs[spec.names[0]];
    const sure = this.columns.bars.some(Boolean) ? " Bars: 95 % Wilson interval, as of independent problems." : "";
    this.figure = el("figure", { class: "chart" },
      el("div", { class: "head" }, el("h3", {}, inert(spec.question)), el("span", { class: "unit" }, spec.unit)),
      this.plotPlace, legend, el("figcaption", {}, spec.kind === "stack" ? "the phases, stacked" : doc ? inert(`${this.labels[0]}: ${doc}.`) : "", sure,
        this.columns.marks.length ? el("span", { class: "bad" }, ` × ${this.columns.marks.length} not finite`) : ""));
    this.plotPlace.append(this.at);
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

  // A value that is not above 0 is a gap then. Layers of a stack cannot be added up by eye on such a scale.
  isLog() {
    return byId("scale").value === "log" && this.spec.kind === "line" && this.columns.y.some((values, s) => this.shown[s] && values.some((value) => value > 0));
  }

  // With smoothing, a faint raw line stays under each smoothed one.
  drawn() {
    const { x, y } = this.columns;
    const weight = Number(byId("smoothing").value);
    const isLog = this.isLog();
    const visible = (values, s) => values.map((value) => (!this.shown[s] ? undefined : isLog && value <= 0 ? null : value));
    if (this.spec.kind === "stack") {
      const smoothed = y.map((values) => smooth(values, weight));
      const stacked = stack(smoothed, this.shown);
      // Filled from the top of the stack down, so that each layer covers the sum of those below it.
      const order = stacked.map((_, s) => s).reverse();
      return { data: [x, ...order.map((s) => stacked[s])], lines: order.map((s) => ({ color: css(this.colors[s]), width: 1, fill: true })) };
    }
    const lines = [];
    const columnsDrawn = [x];
    // The first line is drawn last: where two are equal it is the one to see.
    [...y.keys()].reverse().forEach((s) => {
      const values = y[s];
      const color = css(this.colors[s]);
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
    const [isStack, isLog] = [this.spec.kind === "stack", this.isLog()];
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const range = (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      if (isStack) return [0, high * 1.05 || 1];
      if (isLog) return [Number((low * 0.95).toExponential(1).replace(/\.\d/, "")), high * 1.2]; // from a tick below the lowest
      for (const [s, bars] of this.columns.bars.entries()) {
        for (const bar of this.shown[s] && bars ? bars : []) if (bar) [low, high] = [Math.min(low, bar[0]), Math.max(high, bar[1])];
      }
      // What differs by rounding alone is a constant, and shown as one.
      const isConstant = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
      const space = isConstant ? Math.abs(high) * 0.1 || 0.5 : (high - low) * 0.08;
      return [low >= 0 && low - space < 0 ? 0 : low - space, high + space];
    };
    const first = this.columns.x[0];
    const last = this.columns.x[this.columns.x.length - 1];
    const options = {
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, ...(first === last ? { range: () => [first - 1, first + 1] } : zoom ? { min: zoom[0], max: zoom[1] } : {}) }, y: { range, distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000, 1000000] },
        { ...axis, size: 52, gap: 4, space: 34, values: (_, ticks) => ticks.map((tick) => tick === null ? "" : number(tick)) },
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: line.color, width: line.width, fill: line.fill ? line.color : undefined,
        points: { show: Boolean(line.points), size: 6, fill: line.color },
      }))],
      hooks: { setCursor: [(plot) => this.readOut(plot)], setScale: [(plot, key) => key === "x" && this.keepZoom(plot.scales.x)], draw: [(plot) => this.bars(plot), (plot) => this.mark(plot)] },
    };
    this.plot = new uPlot(options, drawn, this.plotPlace);
    this.readOut(this.plot);
  }

  // New data, with the zoom kept.
  update() {
    const { x: before } = this.columns;
    this.columns = columns(this.spec.names);
    const { data: drawn } = this.drawn();
    if (before.length < 2 || drawn.length !== this.plot.series.length) return this.redraw();
    this.plot.setData(drawn, !zoom);
    if (zoom) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    this.readOut(this.plot);
  }

  keepZoom({ min, max }) {
    const { x } = this.columns;
    const now = x.length < 2 || (min === x[0] && max === x.at(-1)) ? null : [min, max];
    if (x.length < 2 || String(now) === String(zoom)) return;
    zoom = now;
    keepState({ zoom: zoom ? zoom.join(" to ") : "" });
  }

  // The legend shows the values under the cursor, or the last ones.
  readOut(plot) {
    const at = plot.cursor.idx;
    this.values.forEach((place, s) => {
      const column = this.columns.y[s];
      let value = at === null || at === undefined ? undefined : column[at];
      if (value === null) value = this.columns.marks.find((m) => m.series === s && m.at === at).value;
      if (at === null || at === undefined) value = column.filter((v) => v !== undefined).pop() ?? undefined;
      place.textContent = number(value);
    });
    this.at.textContent = at === null || at === undefined ? "" : `step ${this.columns.x[at]}${this.interval(at)}`;
  }

  interval(at) {
    const first = this.columns.bars.findIndex((bars, s) => bars && this.shown[s]);
    const bar = first < 0 ? null : this.columns.bars[first][at];
    return bar ? `, ${bar[0].toFixed(2)} to ${bar[1].toFixed(2)}` : "";
  }

  bars(plot) {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    const half = 4 * devicePixelRatio;
    this.columns.bars.forEach((bars, s) => {
      if (!bars || !this.shown[s]) return;
      ctx.strokeStyle = css(this.colors[s]);
      bars.forEach((bar, i) => {
        if (!bar) return;
        const x = plot.valToPos(this.columns.x[i], "x", true);
        if (x < plot.bbox.left - 1 || x > plot.bbox.left + plot.bbox.width + 1) return;
        const [low, high] = bar.map((value) => plot.valToPos(value, "y", true));
        ctx.beginPath();
        ctx.moveTo(x, low);
        ctx.lineTo(x, high);
        for (const y of [low, high]) {
          ctx.moveTo(x - half, y);
          ctx.lineTo(x + half, y);
        }
        ctx.stroke();
      });
    });
    ctx.restore();
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    const size = 4 * devicePixelRatio;
    const y = bbox.top + bbox.height - size * 2;
    for (const mark of this.columns.marks) {
      if (!this.shown[mark.series]) continue;
      const x = plot.valToPos(this.columns.x[mark.at], "x", true);
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

  // Where the dashboard shows what happened in the step under the cursor.
  openStep() {
    const at = this.plot.cursor.idx;
    if (data.api && data.runs.length === 1 && at !== null && at !== undefined) go("step", { step: this.columns.x[at] });
  }

  key(event) {
    if (event.key === "Enter") this.openStep();
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const top = this.columns.x.length - 1;
    const at = Math.min(Math.max((this.plot.cursor.idx ?? top) + moves[event.key], 0), top);
    this.plot.setCursor({ left: this.plot.valToPos(this.columns.x[at], "x"), top: 20 });
  }
}

let drawnCharts = "";

function showCharts() {
  const note = [];
  if (data.series.thinned) note.push("Neighbouring steps are put together, each curve keeps its lowest and highest values.");
  if (data.series.left_out.length) note.push(`${data.series.left_out.length} more metrics are only in metrics.jsonl.`);
  if (data.series.x.length === 0) note.push("No metrics were recorded.");
  else if (!data.charts.length) note.push("A curve needs two steps.");
  else note.push("Point at a chart to read all of them at one step; drag to zoom, double-click to zoom out.");
  if (data.api && data.runs.length === 1 && data.charts.length) note.push("Shift-click or press Enter to see what happened in a step.");
  byId("curves-note").textContent = note.join(" ");
  for (const tool of document.querySelectorAll(".tool")) tool.hidden = !data.charts.length;
  const these = JSON.stringify([data.charts, data.others]);
  if (these === drawnCharts) {
    for (const chart of charts) chart.update();
    return;
  }
  const isFirst = !drawnCharts;
  drawnCharts = these;
  for (const chart of charts.splice(0)) chart.plot.destroy();
  if (isFirst) startTools();
  byId("charts").replaceChildren();
  for (const spec of data.charts) new Chart(spec, byId("charts"));
  showOthers();
}

function startTools() {
  byId("scale").value = state("scale") === "log" ? "log" : "";
  byId("smoothing").value = state("smoothing") || (data.series.x.length > 40 ? "0.6" : "0");
  const ends = state("zoom").split(" to ").map(Number);
  if (ends.length === 2 && ends[0] < ends[1]) zoom = ends;
  for (const tool of [byId("smoothing"), byId("scale")]) {
    tool.addEventListener("change", () => {
      keepState({ [tool.id]: tool.value, zoom: zoom ? zoom.join(" to ") : "" });
      for (const chart of charts) chart.redraw();
    });
  }
}

function showOthers() {
  const others = byId("others");
  const place = others.querySelector(".charts");
  const draw = () => {
    place.replaceChildren();
    for (const name of data.others) new Chart({ question: name, kind: "line", unit: data.units[name] ?? "", names: [name] }, place);
  };
  others.hidden = !data.others.length;
  others.querySelector("summary").textContent = `${data.others.length} more metric${data.others.length > 1 ? "s" : ""}, a curve each`;
  others.ontoggle = () => { if (others.open && data.others.length && !place.childElementCount) draw(); };
  if (others.open && data.others.length) draw();
}
