// What rollout and training did over one step or several: phases, groups, decoding and waits, one lane each.

const LANE = 22;
const MAX_GROUPS_HEIGHT = 190;
let stalest = 1;

function showTimeline() {
  const figure = byId("timeline");
  figure.hidden = false;
  const groups = data.timelines.flatMap((line) => line.lanes).filter((lane) => lane.kind === "group");
  stalest = Math.max(1, ...groups.flatMap((lane) => lane.spans.map((span) => span[3] ?? 0)));
  const buttons = data.timelines.map((line) => {
    const which = line.first === null ? "" : line.first === line.last ? `: ${line.first}` : `: ${line.first} to ${line.last}`;
    const button = el("button", { type: "button", "aria-pressed": "false", onclick: () => choose(line, button) }, `${line.why}${which}, ${seconds(line.seconds)}`);
    return button;
  });
  let chosen = data.timelines[0];
  const choose = (line, pressed) => {
    chosen = line;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
    drawTimeline(figure, chosen);
  };
  figure.querySelector(".choices").append(...buttons);
  choose(chosen, buttons[0]);
  let drawnAt = 0;
  new ResizeObserver(() => {
    const width = figure.querySelector(".lanes").clientWidth;
    if (width !== drawnAt) drawTimeline(figure, chosen);
    drawnAt = width;
  }).observe(figure.querySelector(".lanes"));
}

function drawTimeline(figure, line) {
  const place = figure.querySelector(".lanes");
  place.replaceChildren(...line.lanes.flatMap((lane) => {
    const track = el("div", { class: "track" });
    return [el("span", { class: "lane-name" }, inert(lane.name)), track];
  }), el("span", {}), el("div", { class: "track axis" }));
  const tracks = [...place.querySelectorAll(".track")];
  const width = tracks[0].clientWidth;
  line.lanes.forEach((lane, i) => tracks[i].append(drawLane(lane, line, width)));
  tracks.at(-1).append(drawAxis(line, width));
  figure.querySelector(".legend").replaceChildren(...legend(line));
  const several = line.first < line.last;
  const began = several ? "Time in seconds; a dashed line ends each step" : "Time in seconds since the step began";
  const groups = line.lanes.some((lane) => lane.kind === "group") ? " A bar of the groups is one prompt with all its responses, as stale as its oldest token, and pale while it waits for its step." : "";
  figure.querySelector("figcaption").textContent = `${began}.${groups} ${line.notes.join(" ")}`.trim();
}

// From fresh to the stalest group of all time lines, so that a colour means the same in each.
const staleColor = (steps) => `color-mix(in oklch, var(--c3) ${Math.round(100 * steps / stalest)}%, var(--c2))`;

function legend(line) {
  const groups = line.lanes.filter((lane) => lane.kind === "group").flatMap((lane) => lane.spans);
  const swatches = [...new Set(groups.map((span) => span[3]).filter((steps) => steps !== null))].sort((a, b) => a - b)
    .map((steps) => swatch(staleColor(steps), steps === 0 ? "fresh" : `${steps} step${steps > 1 ? "s" : ""} stale`));
  if (groups.some((span) => span[3] === null && span[2] === "complete")) swatches.push(swatch("var(--early)", "queued"));
  if (groups.some((span) => span[2] !== "complete")) swatches.push(swatch("var(--bad)", "dropped"));
  if (!groups.length) { // else their colours would be taken for those of the groups
    const phases = line.lanes.filter((lane) => lane.kind === "phase");
    const colors = new Map(phases.flatMap((lane) => lane.spans.map(([, , what]) => [what, spanColor(lane, what)])));
    for (const [what, color] of colors) swatches.push(swatch(color, what));
  }
  if (line.synced.length) swatches.push(swatch("var(--accent)", "weight sync"));
  if (line.paused.length) swatches.push(swatch("var(--wait)", "validation"));
  return swatches;
}

function drawLane(lane, line, width) {
  const rows = lane.kind === "phase" ? [lane.spans] : packed(lane.spans); // phases of one thread lie within one another
  const isThin = rows.length > 4;
  const rowHeight = isThin ? Math.max(Math.min(MAX_GROUPS_HEIGHT / rows.length, 6), 0.5) : LANE;
  const height = Math.ceil(rows.length * rowHeight);
  const x = (t) => (t / line.seconds) * width;
  const bar = (from, to, row, fill, rest = {}) => svg("rect", {
    class: "span", x: x(from), y: row * rowHeight, width: Math.max(x(to) - x(from) - 0.5, 0.7), height: rowHeight * (isThin ? 0.8 : 0.94), rx: isThin ? 1 : 4, fill, ...rest });
  const bars = rows.flatMap((row, r) => row.map(([start, end, what, level, until]) => {
    const fill = spanColor(lane, what, level);
    const box = svg("g", {}, svg("title", {}, describeSpan(lane, what, level, end - start, until === null ? 0 : until - end)));
    if (until !== null && until > end) box.append(bar(end, until, r, fill, { "fill-opacity": 0.3 }));
    if (end > start) box.append(bar(start, end, r, fill));
    const labels = lane.kind === "decode" ? [`version ${level}`] : [`${what} ${seconds(end - start)}`, what];
    const label = isThin ? "" : labels.find((text) => x(end) - x(start) > text.length * 6.6 + 10);
    if (label) box.append(svg("text", { class: lane.kind, x: x(start) + 6, y: r * rowHeight + 15 }, label));
    return box;
  }));
  const said = lane.spans.slice(0, 12).map(([start, end, what, level]) => describeSpan(lane, what, level, end - start, 0)).join(", ");
  return svg("svg", { width, height, role: "img", "aria-label": `${lane.name}: ${said}` }, ...backdrop(lane, line, x, height), ...bars, ...marks(line, x, height));
}

function describeSpan(lane, what, level, took, waited) {
  if (lane.kind === "decode") return `${what}, weights of version ${level}, ${seconds(took)}`;
  const stale = lane.kind !== "group" || level === null ? "" : level === 0 ? ", fresh" : `, ${level} step${level > 1 ? "s" : ""} stale`;
  return `${what} ${seconds(took)}${waited > 0 ? `, then ${seconds(waited)} until its step` : ""}${stale}`;
}

// Validations, drawn below the rollout's spans.
function backdrop(lane, line, x, height) {
  if (lane.kind === "phase" || lane.kind === "wait") return [];
  return line.paused.map(([start, end]) => svg("rect", { class: "pause", x: x(start), y: 0, width: Math.max(x(end) - x(start), 1), height },
    svg("title", {}, `validation ${seconds(end - start)}`)));
}

function marks(line, x, height) {
  const at = (t, kind, title) => svg("line", { class: kind, x1: x(t), x2: x(t), y1: 0, y2: height }, svg("title", {}, title));
  return [...line.steps.map(([t, step]) => at(t, "step-end", `step ${step} ends`)), ...line.synced.map(([t, version]) => at(t, "sync", `weights of version ${version} are synced`))];
}

// What overlaps goes into rows of its own; a group keeps its row until its step takes it.
function packed(spans) {
  const rows = [];
  const free = [];
  for (const span of spans) {
    let r = free.findIndex((end) => end <= span[0] + 1e-9);
    if (r < 0) r = rows.push([]) - 1;
    rows[r].push(span);
    free[r] = Math.max(span[1], span[4] ?? 0);
  }
  return rows;
}

// A phase has the colour that it has among the curves.
function spanColor(lane, what, level) {
  if (lane.kind === "wait") return "var(--wait)";
  if (lane.kind === "decode") return level % 2 ? "var(--c10)" : "var(--c0)";
  if (lane.kind !== "phase") return level !== null ? staleColor(level) : what === "complete" ? "var(--early)" : "var(--bad)";
  const stacked = Object.keys(data.series.y).filter((name) => /^timing_s\/(?!step$|eval$|save$|save_wait$)/.test(name)).sort();
  const known = stacked.indexOf(`timing_s/${what}`);
  return known < 0 ? "var(--c7)" : `var(--c${known % NUM_COLORS})`;
}

// Seconds, and below them the numbers of the steps where there are several.
function drawAxis(line, width) {
  const total = line.seconds;
  const x = (t) => (t / total) * width;
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((s) => total / s <= Math.max(width / 90, 2)) ?? 5000;
  const ticks = [];
  for (let t = 0; t <= total + 1e-9; t += step) ticks.push(t);
  const borders = [0, ...line.steps.map(([t]) => t), total];
  const names = line.steps.length ? borders.slice(1).map((end, i) => [(borders[i] + end) / 2, line.first + i]) : [];
  return svg("svg", { width, height: names.length ? 34 : 18 }, ...ticks.map((t) => svg("text", {
    x: x(t), y: 13, "text-anchor": t === 0 ? "start" : t > total * 0.97 ? "end" : "middle" }, String(Number(t.toPrecision(3))))),
  ...names.map(([t, number]) => svg("text", { class: "step-name", x: x(t), y: 29, "text-anchor": "middle" }, `${width / names.length > 60 ? "step " : ""}${number}`)));
}
