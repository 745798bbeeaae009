// The table of samples: sorted, filtered, opened.

const PAGE_ROWS = 25;

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
    const cell = el("td", { colspan: [...row.cells].filter((cell) => cell.offsetWidth).length },
      el("div", { class: "full" }, part("prompt", sample.prompt), part("response", sample.response)));
    if (sample.ground_truth !== undefined) more.unshift(["ground truth", typeof sample.ground_truth === "string" ? sample.ground_truth : JSON.stringify(sample.ground_truth)]);
    cell.append(facts(more, true));
    row.after(el("tr", { class: "more" }, cell));
  }
}
