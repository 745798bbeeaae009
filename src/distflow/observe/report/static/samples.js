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
    const { owner, text, agent, fork, why } = Object(turn);
    const branch = fork ? `fork ${fork}${why ? ` (${why})` : ""}: ` : "";
    const who = `${agent ? `${agent}: ` : ""}${branch}${owner}${owner === "policy" ? " (drawn)" : " (given)"}`;
    return el("div", { class: OWNERS.includes(owner) ? `turn by-${owner}` : "turn" }, el("h4", {}, inert(who)), textBox(text));
  })
  : [textBox(response)];
// Episodes in a simulator as animations: one that succeeded, and one that did not.
const videos = (group) => {
  const shown = (group.videos ?? []).map(({ webp, instruction, response }) => {
    const { score, reward_parts: parts } = Object(group.responses[response]);
    const how = `${Object(parts).success === 1 ? "success" : "no success"} in ${number(Object(parts).env_steps)} env steps, reward ${number(score)}`;
    const caption = `response ${response + 1} of step ${group.step}: ${instruction}: ${how}`;
    return el("figure", {}, el("img", { src: `data:image/webp;base64,${webp}`, alt: "its observations, one after another" }), el("figcaption", {}, inert(caption)));
  });
  return shown.length ? [el("div", { class: "images" }, ...shown)] : [];
};
const isMasked = (response) => response.masked > 0;

const COLUMNS = [
  { key: "step", label: "step", width: "5.4rem", value: (group) => group.step },
  { key: "split", label: "set", width: "4.4rem", value: (group) => group.split, wide: true },
  { key: "domain", label: "domain", width: "6.5rem", byDomain: true, value: (group) => group.domain ?? "", wide: true },
  { key: "mean", label: "reward", width: "5.6rem", scored: true, value: (group) => mean(rewards(group)) },
  { key: "responses", label: "responses", width: "10.5rem", scored: true, value: (group) => group.responses.length, wide: true },
  { key: "length", label: "tokens", width: "5.2rem", value: lengths, wide: true },
  { key: "prompt", label: "prompt", value: prompts },
  { key: "response", label: "response", value: (group) => String(group.responses[0]?.response ?? "") },
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

class Samples {
  constructor() {
    const { groups, num_groups, num_responses, num_files, all_files } = data.samples;
    if (!groups.length) return;
    this.section = byId("samples");
    this.section.hidden = false;
    this.form = this.section.querySelector("form");
    this.sort = { column: COLUMNS[0], down: true };
    const found = groups.flatMap(rewards);
    // What was only read, as in supervised training, has no rewards.
    this.isScored = found.length > 0 || groups.some((group) => group.responses.some((response) => response.errors));
    this.section.querySelector("h2").textContent = this.isScored ? "What did it write?" : "What was it trained on?";
    for (const label of this.form.querySelectorAll(".scored")) label.hidden = !this.isScored;
    this.domains = [...new Set(groups.map((group) => group.domain ?? ""))].sort();
    const hasDomains = this.domains.length > 1;
    this.form.querySelector(".by-domain").hidden = !hasDomains;
    this.columns = COLUMNS.filter((column) => (this.isScored || !column.scored) && (hasDomains || !column.byDomain));
    this.lowest = Math.min(...found);
    this.highest = Math.max(...found);
    const all = groups.length === num_groups && num_files === all_files;
    const files = num_files === all_files ? plural(all_files, "sample file") : `${num_files} of the ${plural(all_files, "sample file")}, evenly chosen`;
    this.section.querySelector(".lead").textContent = `A row is a prompt with all its responses; open it to read them. ` + (all
      ? "All groups of the run are here."
      : `Here are ${groups.length.toLocaleString("en")} of the ${plural(num_groups, "group")} (${plural(num_responses, "response")}) in ${files}: evenly taken ` +
        "from each domain, after a few with reward errors. Filters see these alone; the folder samples holds all.");
    this.choices();
    this.head();
    this.form.addEventListener("input", () => this.show(0));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.show(0)));
    this.show(0);
  }

  choices() {
    const { step, which, domain } = this.form.elements;
    domain.append(el("option", { value: "all" }, "all"));
    for (const [i, name] of this.domains.entries()) domain.append(el("option", { value: String(i) }, inert(name || "(none)")));
    step.append(el("option", { value: "" }, "all"));
    for (const name of new Set(data.samples.groups.map((group) => `${group.split} ${group.step}`))) {
      step.append(el("option", { value: name }, inert(name)));
    }
    for (const [name, [label, takes]] of Object.entries(WHICH)) {
      const number = data.samples.groups.filter(takes).length;
      if (number) which.append(el("option", { value: name }, name === "all" ? label : `${label} (${number.toLocaleString("en")})`));
    }
  }

  head() {
    const row = el("tr");
    for (const column of this.columns) {
      const button = el("button", { type: "button", onclick: () => this.sortBy(column) }, column.label);
      column.cell = el("th", { scope: "col", class: column.wide ? "wide-only" : "" }, button);
      if (column.width) column.cell.style.width = column.width;
      row.append(column.cell);
    }
    this.section.querySelector("thead").append(row);
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : typeof column.value(data.samples.groups[0]) === "number" };
    this.show(0);
  }

  chosen() {
    const { text, step, which, domain, low, high } = this.form.elements;
    const wanted = domain.value === "all" ? null : this.domains[Number(domain.value)];
    const words = text.value.toLowerCase();
    const takes = WHICH[which.value || "all"][1];
    const groups = data.samples.groups.filter((group) => {
      if (step.value && `${group.split} ${group.step}` !== step.value) return false;
      if (wanted !== null && (group.domain ?? "") !== wanted) return false;
      const average = mean(rewards(group));
      if (low.value !== "" && !(average !== null && average >= Number(low.value))) return false;
      if (high.value !== "" && !(average !== null && average <= Number(high.value))) return false;
      if (!takes(group)) return false;
      return !words || sameTexts(group).some((t) => String(t ?? "").toLowerCase().includes(words));
    });
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    return groups.map((group) => [column.value(group), group]).sort(([a], [b]) => {
      const known = [a, b].map((v) => v !== null && v !== undefined);
      if (!known[0] || !known[1]) return known[1] - known[0];
      return a < b ? -sign : a > b ? sign : 0;
    }).map(([, group]) => group);
  }

  show(page) {
    const groups = this.chosen();
    for (const column of this.columns) {
      if (column === this.sort.column) column.cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else column.cell.removeAttribute("aria-sort");
    }
    const from = page * PAGE_ROWS;
    this.section.querySelector("tbody").replaceChildren(...groups.slice(from, from + PAGE_ROWS).map((group) => this.row(group)));
    this.section.querySelector(".count").textContent =
      groups.length ? `${(from + 1).toLocaleString("en")} to ${Math.min(from + PAGE_ROWS, groups.length).toLocaleString("en")} of ${groups.length.toLocaleString("en")}` : "No group fits these filters.";
    const turn = (label, to, possible) => {
      const button = el("button", { type: "button", onclick: () => this.show(to) }, label);
      button.disabled = !possible;
      return button;
    };
    const more = from + PAGE_ROWS < groups.length;
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
      ...(this.domains.length > 1 ? [el("td", { class: "wide-only" }, inert(group.domain ?? ""))] : []),
      ...(this.isScored ? [el("td", { class: "number" }, scoreBadge(mean(rewards(group)))), el("td", { class: "wide-only" }, this.dots(group))] : []),
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
      const place = (score - this.lowest) / (this.highest - this.lowest);
      if (typeof score === "number") square.style.setProperty("--q", `${Math.round((Number.isFinite(place) ? place : 0.5) * 100)}%`);
      return square;
    });
    const more = group.responses.length - squares.length;
    const known = rewards(group);
    return el("span", { class: "dots", role: "img", "aria-label": `rewards ${known.map(number).join(", ") || "unknown"}` }, ...squares, more > 0 ? `+${more}` : "");
  }

  images(group) {
    const { images } = data.samples;
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
    const asked = el("div", { class: "asked" }, el("div", {}, el("h4", {}, "prompt"), textBox(group.prompt), ...this.images(group)));
    if (group.truth !== null) asked.append(el("div", {}, el("h4", {}, "ground truth"), textBox(group.truth)));
    const about = [];
    if (group.name) about.push(["group", group.name]);
    if (group.domain) about.push(["domain", group.domain]);
    if (group.prompt_length !== null) about.push(["prompt tokens", number(group.prompt_length)]);
    const versions = new Set(group.responses.flatMap((response) => response.versions ?? []));
    if (versions.size) about.push(["weights of step", [...versions].join(", ")]);
    cell.append(asked, facts(about, true), ...videos(group), el("div", { class: "group" }, ...group.responses.map((response) => this.response(response))));
    row.after(el("tr", { class: "more" }, cell));
  }

  response(response) {
    const said = this.isScored ? [el("span", {}, "reward ", scoreBadge(response.score))] : [];
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
