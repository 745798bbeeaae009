// Small figures without an axis of steps: histograms, and what did not change.

const BAR_HEIGHT = 150;

// With domains the name alone does not say whether a part of the reward or a domain is meant.
const isTwofold = (name) => data.domains.length > 0 && name.startsWith("reward/") && name.split("/").length > 2 && name in data.docs;

function showConstants() {
  const place = byId("constants");
  place.hidden = !data.constants.length;
  const number_of = `${data.constants.length} metric${data.constants.length > 1 ? "s" : ""}`;
  place.querySelector("summary").textContent = data.charts.length ? `${number_of} that did not change` : number_of;
  if (!data.charts.length) place.open = true;
  place.querySelector(".constants").replaceChildren(...data.constants.map(({ name, value, unit }) =>
    el("div", { title: data.docs[name] ? `${name}: ${data.docs[name]}` : name }, el("span", {}, inert(isTwofold(name) ? data.docs[name] : name)), el("b", {}, `${number(value)} ${unit}`.trim()))));
}

function showHistograms() {
  byId("histograms").hidden = !data.histograms.length;
  byId("histograms").replaceChildren(...data.histograms.map(drawHistogram));
}

// The earlier responses are the pale bars, the later ones the strong bars beside them.
function drawHistogram({ title, unit, bins, parts }) {
  const highest = Math.max(...parts.flatMap((part) => part.shares));
  const slot = 100 / bins.length;
  const width = Math.min((slot * 0.84) / parts.length, 6);
  const tones = parts.length > 1 ? ["early", "late"] : ["late"];
  const bars = parts.flatMap((part, p) => part.shares.map((share, b) => {
    const height = Math.max((share / highest) * (BAR_HEIGHT - 18), share ? 1.5 : 0);
    const x = b * slot + slot / 2 + (p - parts.length / 2) * width;
    return svg("rect", { class: tones[p], x: `${x}%`, y: BAR_HEIGHT - height, width: `${width * 0.94}%`, height, rx: 1.5 },
      svg("title", {}, `${bins[b]} ${unit}: ${percent(share)} of ${part.name}`));
  }));
  const every = Math.ceil(bins.length / 8);
  const labels = bins.map((bin, b) => [bin, b]).filter(([, b]) => b % every === 0).map(([bin, b]) =>
    svg("text", { x: `${b * slot + slot / 2}%`, y: BAR_HEIGHT + 15, "text-anchor": "middle" }, String(bin).split(" ")[0]));
  const top = svg("text", { x: "100%", y: 11, "text-anchor": "end" }, `highest bar ${percent(highest)}`);
  const summary = parts.map((part) => {
    const most = part.shares.indexOf(Math.max(...part.shares));
    return `${part.name}: most often ${bins[most]} (${percent(part.shares[most])})`;
  });
  return el("figure", { class: "chart" },
    el("div", { class: "head" }, el("h3", {}, title), el("span", { class: "unit" }, unit)),
    el("div", { class: "legend plain" }, ...parts.map((part, p) => swatch(`var(--${tones[p]})`, part.name, `${part.number.toLocaleString("en")} responses`))),
    svg("svg", { class: "histogram", width: "100%", height: BAR_HEIGHT + 22, role: "img", "aria-label": `${title} ${summary.join("; ")}` },
      svg("line", { x1: 0, x2: "100%", y1: BAR_HEIGHT, y2: BAR_HEIGHT, class: "base" }), ...bars, ...labels, top));
}

const percent = (share) => `${Number((share * 100).toPrecision(share < 0.1 ? 1 : 2))} %`;
