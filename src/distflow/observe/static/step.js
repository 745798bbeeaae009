// How a step runs: the program as a graph, and the time line of some steps.

const NODE_HEIGHT = 46;
const GAP = 18; // between nodes of one layer
const REACH = 46; // between layers, for the edges
const LANE = 22;

function showStep() {
  byId("step").hidden = !data.program.length && !data.timelines.length;
  if (data.program.length) showProgram();
  if (data.timelines.length) showTimeline();
}

function showProgram() {
  const figure = byId("program");
  figure.hidden = false;
  const planes = [...new Set(data.program.map((node) => node.plane))];
  const what = { experience: "experience plane: for each prompt", learning: "learning plane: for each step" };
  figure.querySelector(".legend").append(...planes.map((plane) => swatch(`var(--${planeColor(plane)})`, what[plane] ?? plane)));
  const timed = data.program.some((node) => node.seconds !== null);
  figure.querySelector("figcaption").textContent =
    `Arrows show what waits for what${timed ? "; seconds are the mean of a step" : ""}. Point at a node to see what it reads and writes.`;
  const place = figure.querySelector(".drawing");
  place.setAttribute("aria-label", numbered(data.program.map((node) => node.deps.length ? `${node.name} after ${node.deps.join(" and ")}` : node.name).join("; ")));
  let drawnAt = 0;
  new ResizeObserver(() => {
    if (place.clientWidth === drawnAt) return;
    drawnAt = place.clientWidth;
    place.replaceChildren(drawProgram(drawnAt));
  }).observe(place);
}

const planeColor = (plane) => (plane === "experience" ? "c1" : "c0");

// The nodes by layer, with places for the edges that pass a layer; each stands near what it follows.
function layered() {
  const layers = [];
  const items = new Map();
  const put = (item) => {
    (layers[item.layer] ??= []).push(item);
    return item;
  };
  for (const node of data.program) items.set(node.name, put({ node, layer: node.layer, before: [] }));
  for (const node of data.program) {
    for (const dep of node.deps) {
      let last = items.get(dep);
      while (last.layer < node.layer - 1) last = put({ layer: last.layer + 1, before: [last] });
      items.get(node.name).before.push(last);
    }
  }
  for (const layer of layers.slice(1)) {
    for (const item of layer) item.near = mean(item.before.map((other) => layers[other.layer].indexOf(other)));
    layer.sort((a, b) => a.near - b.near);
  }
  return layers;
}

// Layers run from left to right where there is room, else downwards.
function drawProgram(room) {
  const layers = layered();
  const longest = Math.max(...data.program.flatMap((node) => [node.name.length * 7.9, about(node).length * 6.6]));
  const nodeWidth = Math.min(Math.max(longest + 28, 120), 260);
  const most = Math.max(...layers.map((layer) => layer.length));
  const isAcross = layers.length * (nodeWidth + REACH) - REACH <= room;
  const width = isAcross ? layers.length * (nodeWidth + REACH) - REACH : most * (nodeWidth + GAP) - GAP;
  const height = isAcross ? most * (NODE_HEIGHT + GAP) - GAP : layers.length * (NODE_HEIGHT + REACH) - REACH;
  const at = new Map();
  layers.forEach((layer, l) => layer.forEach((item, i) => {
    const place = i + (most - layer.length) / 2;
    item.x = isAcross ? l * (nodeWidth + REACH) : place * (nodeWidth + GAP);
    item.y = isAcross ? place * (NODE_HEIGHT + GAP) : l * (NODE_HEIGHT + REACH);
    if (item.node) at.set(item.node.name, item);
  }));
  const start = ({ x, y }) => (isAcross ? [x, y + NODE_HEIGHT / 2] : [x + nodeWidth / 2, y]);
  const end = ({ x, y }) => (isAcross ? [x + nodeWidth, y + NODE_HEIGHT / 2] : [x + nodeWidth / 2, y + NODE_HEIGHT]);
  const edges = layers.flat().flatMap((item) => item.before.map((other) => {
    const [x1, y1] = end(other);
    let [x2, y2] = start(item);
    if (item.node && isAcross) x2 -= 7;
    else if (item.node) y2 -= 7;
    const bend = isAcross ? `${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2}` : `${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2}`;
    const by = item.node ? "" : `L${end(item).join(" ")}`;
    return svg("path", { class: "edge", d: `M${x1} ${y1}C${bend} ${x2} ${y2}${by}`, ...(item.node ? { "marker-end": "url(#head)" } : {}) });
  }));
  const boxes = data.program.map((node) => {
    const { x, y } = at.get(node.name);
    const columns = (names, verb) => (names.length ? `\n${verb} ${names.join(", ")}` : "");
    return svg("g", { class: `node ${planeColor(node.plane)}`, transform: `translate(${x} ${y})` },
      svg("title", {}, node.name + columns(node.reads, "reads") + columns(node.writes, "writes")),
      svg("rect", { width: nodeWidth, height: NODE_HEIGHT, rx: 8 }),
      svg("rect", { class: "side", width: 4, height: NODE_HEIGHT - 16, x: 0, y: 8, rx: 2 }),
      svg("text", { class: "name", x: 14, y: about(node) ? 19 : 27 }, node.name.slice(0, 29)),
      svg("text", { class: "about", x: 14, y: 35 }, about(node).slice(0, 38)));
  });
  const head = svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 1, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { d: "M0 0L8 4L0 8Z", class: "head" }));
  return svg("svg", { width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}` }, svg("defs", {}, head), ...edges, ...boxes);
}

function about(node) {
  const parts = [node.engines.length ? `${node.engines.join(", ")} engine` : "", node.seconds === null ? "" : seconds(node.seconds)];
  return parts.filter(Boolean).join(" · ");
}

function showTimeline() {
  const figure = byId("timeline");
  figure.hidden = false;
  const buttons = data.timelines.map((line) => {
    const button = el("button", { type: "button", "aria-pressed": "false", onclick: () => choose(line, button) }, `${line.why}: ${line.step}, ${seconds(line.seconds)}`);
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
  line.lanes.forEach((lane, i) => tracks[i].append(drawLane(lane, line.seconds, width)));
  tracks.at(-1).append(drawAxis(line.seconds, width));
  const left = line.left_out ? ` ${line.left_out} ${line.left_out > 1 ? "spans are" : "span is"} too short to be seen, or too many.` : "";
  figure.querySelector("figcaption").textContent = `Time in seconds since the step began. A bar of the groups is one prompt with all its answers.${left}`;
}

function drawLane(lane, total, width) {
  const rows = packed(lane.spans);
  const isThin = rows.length > 4;
  const rowHeight = isThin ? Math.max(Math.min(190 / rows.length, 6), 1.5) : LANE;
  const x = (t) => (t / total) * width;
  const bars = rows.flatMap((row, r) => row.map(([start, end, what]) => {
    const size = Math.max(x(end) - x(start), 1);
    const label = `${what} ${seconds(end - start)}`;
    const box = svg("g", {}, svg("title", {}, label),
      svg("rect", { class: "span", x: x(start), y: r * rowHeight, width: Math.max(size - 0.5, 0.7), height: rowHeight * (isThin ? 0.8 : 0.94), rx: isThin ? 1 : 4, fill: spanColor(lane, what) }));
    if (!isThin && size > label.length * 6.6 + 10) box.append(svg("text", { class: lane.kind, x: x(start) + 6, y: r * rowHeight + 15 }, label));
    return box;
  }));
  return svg("svg", { width, height: Math.ceil(rows.length * rowHeight), role: "img", "aria-label": `${lane.name}: ${lane.spans.slice(0, 12).map(([start, end, what]) => `${what} ${seconds(end - start)}`).join(", ")}` }, ...bars);
}

// What overlaps goes into rows of its own.
function packed(spans) {
  const rows = [];
  for (const span of spans) {
    const row = rows.find((known) => known.at(-1)[1] <= span[0] + 1e-9);
    if (row) row.push(span);
    else rows.push([span]);
  }
  return rows;
}

// A phase has the colour that it has among the curves.
function spanColor(lane, what) {
  if (lane.kind === "wait") return "var(--wait)";
  if (lane.kind !== "phase") return what === "complete" ? "var(--c1)" : "var(--bad)";
  const stacked = Object.keys(data.series.y).filter((name) => /^timing_s\/(?!step$|eval$|save$)/.test(name)).sort();
  const known = stacked.indexOf(`timing_s/${what}`);
  return known < 0 ? "var(--c7)" : `var(--c${known % NUM_COLORS})`;
}

function drawAxis(total, width) {
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((s) => total / s <= Math.max(width / 90, 2)) ?? 5000;
  const ticks = [];
  for (let t = 0; t <= total + 1e-9; t += step) ticks.push(t);
  return svg("svg", { width, height: 18 }, ...ticks.map((t) => svg("text", {
    x: (t / total) * width, y: 13, "text-anchor": t === 0 ? "start" : t > total * 0.97 ? "end" : "middle" }, String(Number(t.toPrecision(3))))));
}
