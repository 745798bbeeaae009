// Where the time of a step goes: a bar for each step with its phases and waits, and who waits for whom.

const BARS_HEIGHT = 150;

function showStepTimes() {
  const { times } = data;
  if (!times.seconds) return;
  byId("step").hidden = false;
  const figure = byId("step-times");
  figure.hidden = false;
  const sums = times.parts.map((_, place) => times.bars.reduce((sum, bar) => sum + (bar.seconds[place] ?? 0), 0));
  const total = sums.reduce((a, b) => a + b, 0);
  const phases = [...new Set(times.parts.map(({ phase }) => phase))];
  figure.querySelector(".legend").replaceChildren(...phases.map((phase) =>
    swatch(phaseColor(phase), phase || "between phases", percent(sums.reduce((sum, own, place) => sum + (times.parts[place].phase === phase ? own : 0), 0) / total))));
  figure.querySelector(".drawing").replaceChildren(drawStepTimes(times, sums));
  figure.querySelector("figcaption").textContent =
    `A bar is a step of the training loop; its pale parts are waits. ${plural(times.workers, "worker")} ran ${seconds(times.seconds)}, and ${percent(times.idle / times.seconds)} of that was idle: the training loop waited and the engine drew nothing.`;
  figure.querySelector(".scroll")?.remove();
  figure.append(table("Who waits for whom", [["who", ({ who }) => who], ["waits for", (row) => row["waits for"]], ["time", (row) => seconds(row.seconds)]], times.waits));
}

// As among the curves.
function phaseColor(phase) {
  const stacked = Object.keys(data.series.y).filter((name) => /^timing_s\/(?!step$|eval$|save$|save_wait$)/.test(name)).sort();
  const known = stacked.indexOf(`timing_s/${phase}`);
  return known < 0 ? "var(--c7)" : `var(--c${known % NUM_COLORS})`;
}

const percent = (share) => `${Number((share * 100).toPrecision(share < 0.1 ? 1 : 2))} %`;
const partName = ({ phase, waits_for }) => `${phase || "between phases"}${waits_for ? `, waiting for ${waits_for}` : ""}`;

function drawStepTimes({ bars, parts }, sums) {
  const highest = Math.max(...bars.map((bar) => Object.values(bar.seconds).reduce((a, b) => a + b, 0)));
  const slot = 100 / bars.length;
  const drawn = bars.flatMap((bar, i) => {
    let y = BARS_HEIGHT;
    return Object.entries(bar.seconds).map(([place, time]) => {
      const part = parts[place];
      const height = (time / highest) * (BARS_HEIGHT - 4);
      y -= height;
      return svg("rect", { x: `${i * slot}%`, y, width: `${slot * 0.92}%`, height, fill: phaseColor(part.phase), "fill-opacity": part.waits_for ? 0.35 : 1 },
        svg("title", {}, `step ${bar.steps}: ${partName(part)} ${seconds(time)}`));
    });
  });
  const every = Math.ceil(bars.length / 12);
  const labels = bars.map((bar, i) => [bar.steps, i]).filter(([, i]) => i % every === 0).map(([name, i]) =>
    svg("text", { x: `${(i + 0.46) * slot}%`, y: BARS_HEIGHT + 15, "text-anchor": "middle" }, name));
  const said = parts.map((part, place) => `${partName(part)} ${seconds(sums[place])}`).join(", ");
  return svg("svg", { class: "histogram", width: "100%", height: BARS_HEIGHT + 22, role: "img", "aria-label": `time of the training loop by step: ${said}` },
    svg("line", { x1: 0, x2: "100%", y1: BARS_HEIGHT, y2: BARS_HEIGHT, class: "base" }), ...drawn, ...labels);
}
