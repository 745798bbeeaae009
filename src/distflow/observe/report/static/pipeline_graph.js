// How a step runs: the pipeline as a graph. Its time line is drawn by timeline.js.

const NODE_HEIGHT = 46;
const GAP = 18; // between nodes of one layer
const REACH = 46; // between layers, for the edges

function showStep() {
  byId("step").hidden = !data.pipeline.length && !data.timelines.length;
  if (data.pipeline.length) showPipeline();
  if (data.timelines.length) showTimeline();
}

function showPipeline() {
  const figure = byId("pipeline");
  figure.hidden = false;
  const sides = [...new Set(data.pipeline.map((node) => node.plane))];
  const what = { rollout: "rollout: for each prompt", training: "training: for each step" };
  figure.querySelector(".legend").append(...sides.map((side) => swatch(`var(--${sideColor(side)})`, what[side] ?? side)));
  const timed = data.pipeline.some((node) => node.seconds !== null);
  figure.querySelector("figcaption").textContent =
    `Arrows show what waits for what${timed ? "; seconds are the mean of a step" : ""}. Point at a node to see what it reads and writes.`;
  const place = figure.querySelector(".drawing");
  place.setAttribute("aria-label", numbered(data.pipeline.map((node) => node.deps.length ? `${node.name} after ${node.deps.join(" and ")}` : node.name).join("; ")));
  let drawnAt = 0;
  new ResizeObserver(() => {
    if (place.clientWidth === drawnAt) return;
    drawnAt = place.clientWidth;
    place.replaceChildren(drawPipeline(drawnAt));
  }).observe(place);
}

const sideColor = (side) => (side === "rollout" ? "c1" : "c0");

// The nodes by layer, with places for the edges that pass a layer; each stands near what it follows.
function layered() {
  const layers = [];
  const items = new Map();
  const put = (item) => {
    (layers[item.layer] ??= []).push(item);
    return item;
  };
  for (const node of data.pipeline) items.set(node.name, put({ node, layer: node.layer, before: [] }));
  for (const node of data.pipeline) {
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
function drawPipeline(room) {
  const layers = layered();
  const longest = Math.max(...data.pipeline.flatMap((node) => [node.name.length * 7.9, about(node).length * 6.6]));
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
  const boxes = data.pipeline.map((node) => {
    const { x, y } = at.get(node.name);
    const columns = (names, verb) => (names.length ? `\n${verb} ${names.join(", ")}` : "");
    return svg("g", { class: `node ${sideColor(node.plane)}`, transform: `translate(${x} ${y})` },
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
