// The table of responses: a row for each prompt and step, which opens to all its responses.

const PAGE_ROWS = 20;
const MAX_DOTS = 32;

const rewards = (group) => group.responses.map((response) => response.score).filter((score) => typeof score === "number");
const isTruncated = (response) => ["length", "context"].includes(response.finish_reason);

const prompts = (group) => String(group.prompt ?? "");
const lengths = (group) => mean(group.responses.map((response) => response.response_length).filter((n) => typeof n === "number"));
// Who said what in an episode of a workflow, each branch after the one that it comes from.
const OWNERS = ["prompt", "policy", "tool", "environment"];
const turns = ({ conversation, response }) => Array.isArray(conversation) && conversation.length
  ? conversation.map((turn) => {
    const { owner, text, agent, fork } = Object(turn);
    const branch = fork ? `fork ${fork}: ` : "";
    const who = `${agent ? `${agent}: ` : ""}${branch}${owner}${["policy", "unused"].includes(owner) ? " (drawn)" : " (given)"}`;
    return el("div", { class: OWNERS.includes(owner) ? `turn by-${owner}` : "turn" }, el("h4", {}, inert(who)), textBox(text));
  })
  : [textBox(response)];
const isMasked = (response) => response.masked > 0;

const COLUMNS = [
  { key: "step", label: "step", width: "5.4rem", value: (group) => group.step },
  { key: "split", label: "set", width: "4.4rem", isText: true, value: (group) => group.split, wide: true },
  { key: "domain", label: "domain", width: "6.5rem", byDomain: true, isText: true, value: (group) => group.domain ?? "", wide: true },
  { key: "mean", label: "reward", width: "5.6rem", scored: true, value: (group) => mean(rewards(group)) },
  { key: "responses", label: "responses", width: "10.5rem", scored: true, value: (group) => group.responses.length, wide: true },
  { key: "length", label: "tokens", width: "5.2rem", value: lengths, wide: true },
  { key: "prompt", label: "prompt", isText: true, value: prompts },
  { key: "response", label: "response", isText: true, value: (group) => String(group.responses[0]?.response ?? "") },
];

// What the selection offers: label and which groups it takes.
const WHICH = {
  all: ["all groups", () => true],
  mixed: ["different rewards", (group) => new Set(rewards(group)).size > 1],
  equal: ["all rewards equal", (group) => rewards(group).length > 1 && new Set(rewards(group)).size === 1],
  right: ["a correct response", (group) => group.responses.some((response) => isRight(response) === true)],
  wrong: ["a wrong response", (group) => group.responses.some((response) => isRight(response) === false)],
  cut: ["a truncated response", (group) => group.responses.some(isTruncated)],
  failed: ["a response without a score", (group) => rewards(group).length < group.responses.length],
  error: ["a reward error", (group) => group.responses.some((response) => response.failure === "error")],
  timeout: ["a reward timeout", (group) => group.responses.some((response) => response.failure === "timeout")],
  masked: ["a response left out of the loss", (group) => group.responses.some(isMasked)],
  dropped: ["dropped, not trained on", (group) => group.responses.some((response) => response.dropped)],
};

const sameTexts = (group) => [group.prompt, group.truth, ...group.responses.flatMap((response) => [response.response, response.errors, JSON.stringify(response.remarks ?? {})])];

// What there is to choose from among the groups that the page has.
function summarize({ groups, places, num_groups, num_responses, num_files, all_files }) {
  const found = groups.flatMap(rewards);
  return {
    num_groups, num_responses, num_files, all_files, num_shown: groups.length,
    // What was only read, as in supervised training, has no rewards.
    is_scored: found.length > 0 || groups.some((group) => group.responses.some((response) => response.errors)),
    domains: [...new Set(groups.map((group) => group.domain ?? ""))].sort(),
    places: places ?? [...new Set(groups.map((group) => `${group.split} ${group.step}`))],
    which: Object.fromEntries(Object.entries(WHICH).map(([name, [, takes]]) => [name, groups.filter(takes).length])),
    lowest: Math.min(...found), highest: Math.max(...found),
  };
}

// A page of the groups that fit, in order.
function chooseGroups({ text, step, which, domain, low, high, sort, down, page }) {
  const words = text.toLowerCase();
  const takes = WHICH[which || "all"][1];
  const groups = data.samples.groups.filter((group) => {
    if (step && `${group.split} ${group.step}` !== step) return false;
    if (domain !== "all" && `=${group.domain ?? ""}` !== domain) return false;
    const average = mean(rewards(group));
    if (low !== "" && !(average !== null && average >= Number(low))) return false;
    if (high !== "" && !(average !== null && average <= Number(high))) return false;
    if (!takes(group)) return false;
    return !words || sameTexts(group).some((t) => String(t ?? "").toLowerCase().includes(words));
  });
  const { value } = COLUMNS.find((column) => column.key === sort);
  const sign = down ? -1 : 1;
  const sorted = groups.map((group) => [value(group), group]).sort(([a], [b]) => {
    const known = [a, b].map((v) => v !== null && v !== undefined);
    if (!known[0] || !known[1]) return known[1] - known[0];
    return a < b ? -sign : a > b ? sign : 0;
  }).map(([, group]) => group);
  return { total: groups.length, groups: sorted.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS) };
}

EMBEDDED.samples = () => data.samples;
EMBEDDED.group = ({ group }) => group;

const FILTERS = ["text", "step", "domain", "which", "low", "high"];

class Samples {
  constructor() {
    this.section = byId("samples");
    this.form = this.section.querySelector("form");
    this.form.addEventListener("input", () => this.show(0));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.show(0)));
    this.read();
  }

  // A dashboard has groups of all steps, or all those of one step.
  read() {
    const step = state("step");
    return load("samples", { step }, (found) => {
      data.samples = found;
      this.readStep = step;
      this.start(summarize(found));
    });
  }

  start(found) {
    const isFirst = !this.columns;
    this.found = found;
    this.section.hidden = !found.num_shown && !data.api;
    this.section.querySelector(".lead").textContent = found.all_files ? this.lead() : "The folder has no samples.";
    this.form.hidden = !found.num_shown;
    if (!found.num_shown) return;
    this.section.querySelector("h2").textContent = found.is_scored ? "What did it write?" : "What was it trained on?";
    for (const label of this.form.querySelectorAll(".scored")) label.hidden = !found.is_scored;
    const hasDomains = found.domains.length > 1;
    this.form.querySelector(".by-domain").hidden = !hasDomains;
    this.columns = COLUMNS.filter((column) => (found.is_scored || !column.scored) && (hasDomains || !column.byDomain));
    const values = FILTERS.map((name) => [name, state(name)]);
    this.choices();
    for (const [name, value] of values) if (value) this.form.elements[name].value = name === "domain" ? found.domains.indexOf(value.slice(1)) : value;
    if (isFirst) {
      this.sort = { column: this.columns.find((column) => column.key === state("sort")) ?? COLUMNS[0], down: state("down") !== "0" };
      this.page = Number(state("page")) || 0;
    }
    this.head();
    this.show(this.page);
  }

  lead() {
    const { num_groups, num_responses, num_files, all_files, num_shown } = this.found;
    const files = num_files === all_files ? plural(all_files, "sample file") : `${num_files} of the ${plural(all_files, "sample file")}`;
    const row = "A row is a prompt with all its responses; open it to read them. ";
    if (num_shown === num_groups && num_files === all_files) return `${row}All groups of ${this.readStep ? "this step" : "the run"} are here.`;
    const rest = data.api ? "Choose a step to see all of its groups." : "The folder samples holds all.";
    return `${row}Here are ${num_shown.toLocaleString("en")} of the ${plural(num_groups, "group")} (${plural(num_responses, "response")}) in ${files}${num_files === all_files ? "" : ", evenly chosen"}: ` +
      `Filters see these alone. ${rest}`;
  }

  choices() {
    const { step, which, domain } = this.form.elements;
    const option = (value, label) => el("option", { value }, label);
    domain.replaceChildren(option("all", "all"), ...this.found.domains.map((name, i) => option(i, inert(name || "(none)"))));
    step.replaceChildren(option("", "all"), ...this.found.places.map((name) => option(name, inert(name))));
    which.replaceChildren(...Object.entries(WHICH).filter(([name]) => this.found.which[name]).map(([name, [label]]) =>
      option(name, name === "all" ? label : `${label} (${this.found.which[name].toLocaleString("en")})`)));
  }

  head() {
    const row = el("tr");
    for (const column of this.columns) {
      const button = el("button", { type: "button", onclick: () => this.sortBy(column) }, column.label);
      column.cell = el("th", { scope: "col", class: column.wide ? "wide-only" : "" }, button);
      if (column.width) column.cell.style.width = column.width;
      row.append(column.cell);
    }
    this.section.querySelector("thead").replaceChildren(row);
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : !column.isText };
    this.show(0);
  }

  show(page) {
    const filters = Object.fromEntries(FILTERS.map((name) => [name, this.form.elements[name].value]));
    if (filters.domain !== "all") filters.domain = `=${this.found.domains[Number(filters.domain)]}`;
    const order = { sort: this.sort.column.key, down: this.sort.down ? 1 : 0, page };
    this.page = page;
    const plain = { domain: "all", which: "all", sort: "step", down: 1, page: 0 };
    keepState(Object.fromEntries(Object.entries({ ...filters, ...order }).map(([name, value]) => [name, value === plain[name] ? "" : value])));
    if (data.api && filters.step !== this.readStep) this.read();
    else this.draw(chooseGroups({ ...filters, ...order }), page);
  }

  draw({ groups, total }, page) {
    for (const column of this.columns) {
      if (column === this.sort.column) column.cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else column.cell.removeAttribute("aria-sort");
    }
    const from = page * PAGE_ROWS;
    this.section.querySelector("tbody").replaceChildren(...groups.map((group) => this.row(group)));
    this.section.querySelector(".count").textContent =
      groups.length ? `${(from + 1).toLocaleString("en")} to ${(from + groups.length).toLocaleString("en")} of ${total.toLocaleString("en")}` : "No group fits these filters.";
    const turn = (label, to, possible) => {
      const button = el("button", { type: "button", onclick: () => this.show(to) }, label);
      button.disabled = !possible;
      return button;
    };
    const more = from + groups.length < total;
    this.section.querySelector(".pages").replaceChildren(...(page || more ? [turn("← previous", page - 1, page > 0), turn("next →", page + 1, more)] : []));
  }

  row(group) {
    const line = (text) => textBox(String(text ?? "").slice(0, 160).replace(/\s*\n\s*/g, " ⏎ "), "span");
    const open = el("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": "Read all responses" }, "▸");
    const row = el("tr", { class: "sample", onclick: (event) => {
      if (event.target.closest("button") || !String(getSelection())) this.expand(row, group, open);
    } },
      el("td", { class: "number" }, open, number(group.step)),
      el("td", { class: "wide-only" }, inert(group.split)),
      ...(this.found.domains.length > 1 ? [el("td", { class: "wide-only" }, inert(group.domain ?? ""))] : []),
      ...(this.found.is_scored ? [el("td", { class: "number" }, scoreBadge(mean(rewards(group)))), el("td", { class: "wide-only" }, this.dots(group))] : []),
      el("td", { class: "number wide-only" }, number(lengths(group))),
      el("td", {}, line(prompts(group))),
      el("td", {}, line(group.responses[0]?.response)),
    );
    return row;
  }

  // A square for each response, from the lowest reward of the run to its highest; hollow without a score.
  dots(group) {
    const squares = group.responses.slice(0, MAX_DOTS).map(({ score }) => {
      const square = el("i", typeof score === "number" ? {} : { class: "none" });
      const place = (score - this.found.lowest) / (this.found.highest - this.found.lowest);
      if (typeof score === "number") square.style.setProperty("--q", `${Math.round((Number.isFinite(place) ? place : 0.5) * 100)}%`);
      return square;
    });
    const more = group.responses.length - squares.length;
    const known = rewards(group);
    return el("span", { class: "dots", role: "img", "aria-label": `rewards ${known.map(number).join(", ") || "unknown"}` }, ...squares, more > 0 ? `+${more}` : "");
  }

  images(group) {
    const images = group.pictures ?? data.samples.images;
    const shown = group.images.map((name, i) => (images[name] ? el("img", { src: `data:image/png;base64,${images[name]}`, alt: `image ${i + 1} of the prompt` }) : inert(`[image ${i + 1}: ${name}]`)));
    return shown.length ? [el("div", { class: "images" }, ...shown)] : [];
  }

  expand(row, group, open) {
    const isOpen = open.getAttribute("aria-expanded") === "true";
    open.setAttribute("aria-expanded", String(!isOpen));
    open.textContent = isOpen ? "▸" : "▾";
    if (isOpen) {
      row.nextSibling.remove();
      return;
    }
    const cell = el("td", { colspan: [...row.cells].filter((cell) => cell.offsetWidth).length });
    row.after(el("tr", { class: "more" }, cell));
    const params = data.api ? { step: group.step, split: group.split, place: group.place } : { group };
    load("group", params, (whole) => this.fill(cell, whole));
  }

  fill(cell, group) {
    const asked = el("div", { class: "asked" }, el("div", {}, el("h4", {}, "prompt"), textBox(group.prompt), ...this.images(group)));
    if (group.truth !== null) asked.append(el("div", {}, el("h4", {}, "ground truth"), textBox(group.truth)));
    const about = [];
    if (group.name) about.push(["group", group.name]);
    if (group.domain) about.push(["domain", group.domain]);
    if (group.prompt_length !== null) about.push(["prompt tokens", number(group.prompt_length)]);
    const versions = new Set(group.responses.flatMap((response) => response.versions ?? []));
    if (versions.size) about.push(["weights of step", [...versions].join(", ")]);
    cell.append(asked, facts(about, true), el("div", { class: "group" }, ...group.responses.map((response) => this.response(response, group))));
  }

  response(response, { step, split }) {
    const said = this.found.is_scored ? [el("span", {}, "reward ", scoreBadge(response.score))] : [];
    if (response.uid && data.api) said.unshift(el("a", { href: address("sample", { uid: response.uid, step, split }) }, inert(response.uid)));
    if (response.reward !== undefined) said.push(el("span", {}, `net reward ${number(response.reward)}`));
    if (typeof response.advantage === "number") said.push(el("span", {}, `advantage ${response.advantage > 0 ? "+" : ""}${number(response.advantage)}`));
    else if (response.advantage !== undefined) said.push(el("span", {}, `advantage ${number(response.advantage)}`));
    if (response.acc !== undefined) said.push(el("span", {}, `accuracy ${number(response.acc)}`));
    if (response.dropped) said.push(el("span", { class: "warn" }, inert(`dropped: ${response.dropped}`)));
    else if (isMasked(response)) said.push(el("span", { class: "warn" }, response.masked > 0.9999 ? "left out of the loss" : `${Math.round(100 * response.masked)} % of it left out of the loss`));
    if (response.response_length !== undefined) said.push(el("span", {}, `${number(response.response_length)} tokens`));
    if (isTruncated(response)) said.push(el("span", { class: "warn" }, "truncated"));
    else if (response.finish_reason && response.finish_reason !== "stop") said.push(el("span", {}, inert(`ended by ${response.finish_reason}`)));
    if (response.kind) said.push(el("span", {}, inert(response.kind)));
    const parts = Object.entries(response.reward_parts ?? {});
    const shown = parts.length > 1 ? parts.map(([name, value]) => [name, value !== null && typeof value === "object" ? JSON.stringify(value) : number(value)]) : [];
    const node = el("div", { class: "one" }, el("div", { class: "said" }, ...said), ...turns(response));
    if (shown.length) node.append(facts(shown, true));
    node.append(...remarks(response));
    if (response.errors) node.append(el("p", { class: "error" }, response.failure === "timeout" ? "out of time: " : "reward error: ", inert(typeof response.errors === "string" ? response.errors : response.errors.join("\n"))));
    return node;
  }
}
