// The idle invoice: what the devices did in each step, or for what they waited.

const INVOICE_HEIGHT = 150;
const KIND_COLORS = { busy: "var(--c0)", overhead: "var(--c4)", idle: "var(--c1)", down: "var(--c11)", unknown: "var(--c5)" };

function showInvoice() {
  const { invoice } = data;
  if (!invoice.seconds) return;
  byId("step").hidden = false;
  const figure = byId("invoice");
  figure.hidden = false;
  const share = (kind) => invoice.causes.reduce((sum, cause) => sum + (cause.kind === kind ? cause.seconds : 0), 0) / invoice.seconds;
  const kinds = Object.keys(KIND_COLORS).filter((kind) => share(kind) > 0);
  figure.querySelector(".legend").append(...kinds.map((kind) => swatch(KIND_COLORS[kind], kind, percent(share(kind)))));
  figure.querySelector(".drawing").append(drawInvoice(invoice, kinds));
  const price = invoice.gpu_hour;
  const money = (time) => (price * time / 3600).toFixed(2);
  const total = price === null ? "" : ` They cost ${money(invoice.seconds)} (cost.gpu_hour=${price}).`;
  figure.querySelector("figcaption").textContent =
    `A bar is a step: the time of all devices (${invoice.devices}), ${seconds(invoice.seconds)} in the whole figure.${total} Point at it to see the causes.`;
  const columns = [["", ({ kind }) => kind], ["what, or waiting for what", ({ cause }) => cause], ["time", (row) => seconds(row.seconds)],
    ["share", (row) => percent(row.seconds / invoice.seconds)], ...(price === null ? [] : [["costs", (row) => money(row.seconds)]])];
  figure.append(table("Causes", columns, invoice.causes));
}

function drawInvoice({ steps, causes }, kinds) {
  const totals = steps.map(({ parts }) => parts.reduce((sum, part) => sum + part[1], 0));
  const highest = Math.max(...totals);
  const slot = 100 / steps.length;
  const bars = steps.flatMap(({ step, parts }, i) => {
    let y = INVOICE_HEIGHT;
    return kinds.map((kind) => {
      const own = parts.filter(([cause]) => causes[cause].kind === kind).sort((a, b) => b[1] - a[1]);
      const time = own.reduce((sum, part) => sum + part[1], 0);
      const height = (time / highest) * (INVOICE_HEIGHT - 4);
      y -= height;
      const listed = own.map(([cause, part]) => `${causes[cause].cause} ${seconds(part)}`).join(", ");
      return svg("rect", { x: `${i * slot}%`, y, width: `${slot * 0.92}%`, height, fill: KIND_COLORS[kind] },
        svg("title", {}, `${/^\d/.test(step) ? "step " : ""}${step}: ${kind} ${seconds(time)}: ${listed}`));
    });
  });
  const every = Math.ceil(steps.length / 12);
  const labels = steps.map(({ step }, i) => [step, i]).filter(([step, i]) => i % every === 0 && /^\d/.test(step)).map(([step, i]) =>
    svg("text", { x: `${(i + 0.46) * slot}%`, y: INVOICE_HEIGHT + 15, "text-anchor": "middle" }, step));
  const said = kinds.map((kind) => `${kind}: ${causes.filter((cause) => cause.kind === kind).slice(0, 3).map(({ cause }) => cause).join(", ")}`).join("; ");
  return svg("svg", { class: "histogram", width: "100%", height: INVOICE_HEIGHT + 22, role: "img", "aria-label": `time of the devices by step: ${said}` },
    svg("line", { x1: 0, x2: "100%", y1: INVOICE_HEIGHT, y2: INVOICE_HEIGHT, class: "base" }), ...bars, ...labels);
}
