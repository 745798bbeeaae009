// The top of the page: what ran, the numbers to read first, what went wrong, responses before and after.

function setTheme(theme) {
  root.dataset.theme = theme;
  for (const chart of charts) chart.redraw();
}

// The parts of the page that this run has.
const CONTENTS = [["problems", "problems"], ["compare", "before and after"], ["curves", "curves"], ["samples", "responses"], ["step", "time"], ["setup", "configuration"]];

function showContents() {
  const there = CONTENTS.filter(([id]) => !byId(id).hidden);
  byId("contents").append(...there.map(([id, label]) => el("a", { href: `#${id}` }, label)));
}

function showFailure() {
  if (!data.failure || !data.failure.traceback) return;
  byId("failure").append(el("details", {}, el("summary", {}, "Where it was raised"), el("pre", { tabindex: "0" }, inert(data.failure.traceback))));
}

function startTheme() {
  const asked = /theme=(dark|light)/.exec(location.hash + location.search);
  const system = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.theme = asked ? asked[1] : system.matches ? "dark" : "light";
  system.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    keepState({ theme: root.dataset.theme });
  });
}

function showStatus({ word, detail }) {
  byId("status").className = `pill ${{ finished: "good", failed: "bad", stopped: "flat" }[word] ?? ""}`;
  byId("status").textContent = numbered(word);
  byId("status").title = numbered(detail);
}

function showTop() {
  showStatus(data.status);
  byId("facts").replaceChildren(...facts(data.head).childNodes);
  byId("tiles").replaceChildren();
  for (const tile of data.tiles) {
    byId("tiles").append(
      el("div", { class: "tile" }, el("p", { class: "label" }, tile.label), el("p", { class: "value" }, tile.value),
        el("p", { class: "note" }, tile.note)),
    );
  }
  if (!data.api) byId("written").textContent = `Written ${data.written} by distflow. This file is complete: it loads nothing.`;
}

function showProblems() {
  byId("problems").hidden = !data.problems.length;
  byId("problems").querySelector("ul").replaceChildren();
  for (const group of data.problems) {
    const where = [];
    if (group.count > 1) where.push(`${group.count.toLocaleString("en")} times`);
    if (group.first !== null) where.push(group.count > 1 ? `after steps ${group.first} to ${group.last}` : `after step ${group.first}`);
    if (group.rolled_back) where.push("rolled back");
    const item = el("li", { class: group.kind }, el("span", { class: "kind" }, group.kind), el("span", { class: "message" }, inert(group.message)), " ",
      el("span", { class: "where" }, where.join(", ")));
    const fields = Object.entries(group.fields).filter(([key]) => key !== "raised" && key !== "traceback").map(([key, value]) =>
      [key, typeof value === "string" ? value : JSON.stringify(value)]);
    if (fields.length) item.append(facts(fields, true));
    byId("problems").querySelector("ul").append(item);
  }
}

function showCompare() {
  const compare = data.compare;
  if (!compare) return;
  const section = byId("compare");
  section.hidden = false;
  section.querySelector(".pairs").replaceChildren();
  const problems = (n) => `${n.toLocaleString("en")} problem${n === 1 ? "" : "s"}`;
  const lead = `The same validation problems at step ${compare.first} and at step ${compare.last}: ${problems(compare.num_better)} ` +
    `scored higher afterwards, ${compare.num_worse.toLocaleString("en")} lower, ${compare.num_same.toLocaleString("en")} the same` +
    ".";
  section.querySelector(".lead").textContent = lead;
  for (const pair of compare.examples) {
    const response = (name, side) => el("div", { class: "response" },
      el("h4", {}, el("span", {}, side.num_responses > 1 ? `${name}, 1 of ${side.num_responses}` : name), scoreBadge(side.score)),
      textBox(side.response));
    const card = el("article", { class: "pair" }, el("div", { class: "text prompt", tabindex: "0" }, inert(pair.prompt ?? "")));
    if (pair.ground_truth !== null) {
      card.append(el("div", { class: "truth" }, "ground truth: ", textBox(pair.ground_truth, "span")));
    }
    card.append(el("div", { class: "responses" },
      response(`step ${compare.first}`, pair.before), response(`step ${compare.last}`, pair.after)));
    section.querySelector(".pairs").append(card);
  }
}
