// The page of a plan: the drawings of a run's report, and bars of the memory of each phase.

const NUM_COLORS = 12;
const data = JSON.parse(byId("data").textContent);
const gigabytes = (bytes) => `${Number((bytes / 1e9).toPrecision(3))} GB`;
// More parts than colours: the next ones have them paler.
const partColor = (i) => (i < NUM_COLORS ? `var(--c${i})` : `color-mix(in oklch, var(--c${i % NUM_COLORS}) 45%, var(--card))`);

byId("facts").append(...facts(data.facts).childNodes);
byId("memory").querySelector(".charts").append(...data.memory.map(drawMemory));
showStep();

// One bar for each phase, of the roles' purposes; the line is what a device has.
function drawMemory({ title, room, phases, parts }) {
  const most = Math.max(room, ...phases.map((_, p) => parts.reduce((sum, part) => sum + part.bytes[p], 0)));
  const rows = phases.map((phase, p) => {
    let at = 0;
    const bars = parts.map((part, i) => {
      const start = at;
      at += part.bytes[p];
      return svg("rect", { x: `${(100 * start) / most}%`, y: 2, width: `${(100 * part.bytes[p]) / most}%`, height: 18, fill: partColor(i) },
        svg("title", {}, `${part.name}: ${gigabytes(part.bytes[p])}`));
    });
    const limit = svg("line", { class: "room", x1: `${(100 * room) / most}%`, x2: `${(100 * room) / most}%`, y1: 0, y2: 22 });
    const drawing = svg("svg", { width: "100%", height: 22, role: "img", "aria-label": `${phase}: ${gigabytes(at)}` }, ...bars, limit);
    return [el("span", { class: "lane-name" }, `${phase} ${gigabytes(at)}`), el("div", { class: "track" }, drawing)];
  });
  return el("figure", { class: "chart" }, el("div", { class: "head" }, el("h3", {}, title)),
    el("div", { class: "legend plain" }, ...parts.map((part, i) => swatch(partColor(i), part.name))),
    el("div", { class: "lanes" }, ...rows.flat()), el("figcaption", {}, `The line is what a device has: ${gigabytes(room)}.`));
}
