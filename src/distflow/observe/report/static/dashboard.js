// The pages of a dashboard. They are made of the parts of a report, whose data come from the server, and follow a run.

const EVERY_MS = 1000;
const own = el("section", { id: "own" }); // what a page has besides the sections of a report
const one = data.runs.length === 1;
Object.assign(data, { problems: [], docs: {}, trials: {}, units: {}, others: [] });

const address = (page, params = {}) =>
  `/${page === "runs" ? "" : page}?${inAddress({ run: page === "runs" ? [] : data.runs, theme: state("theme"), ...params })}`;

function go(page, params) {
  location.assign(address(page, params));
}

// A table of records as the server sends them: all columns that have a value.
function plainTable(title, records) {
  if (!records.length) return [el("h3", {}, inert(title))];
  const names = Object.keys(records[0]).filter((name) => records.some((record) => record[name] !== "" && record[name] !== null));
  return [el("h3", {}, inert(title)), table(title, names.map((name) => [name, (record) => record[name]]), records)];
}

function sparkline(values) {
  const known = values.filter((value) => typeof value === "number");
  if (known.length < 2) return "";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const points = known.map((value, i) => `${(80 * i) / (known.length - 1)},${17 - 14 * ((value - low) / (high - low || 1))}`);
  return svg("svg", { width: 80, height: 20, class: "spark", role: "img", "aria-label": `from ${number(known[0])} to ${number(known.at(-1))}` }, svg("polyline", { points: points.join(" ") }));
}

const traceLink = (label, step = "") => el("a", { class: "button", download: `trace${step && `-step-${step}`}.json`, href: `${data.api}trace?${inAddress({ run: data.runs, step })}` }, label);
const choice = (label, options, value, onchange) => {
  const select = el("select", { onchange }, ...options.map(([name, text]) => el("option", { value: name }, inert(text))));
  select.value = value;
  return el("label", {}, label, " ", select);
};

// Which run?
function showRuns() {
  const chosen = new Set(state("chosen") ? state("chosen").split("\n") : []);
  const search = el("input", { type: "search", placeholder: "name or state", oninput: () => { keepState({ text: search.value }); draw(); } });
  search.value = state("text");
  const place = el("div", {});
  const both = el("span", { class: "choices" });
  const links = () => both.replaceChildren(chosen.size > 1 ? el("a", { class: "button", href: address("compare", { run: [...chosen] }) }, `compare ${chosen.size}`) : "choose runs to compare them");
  const pick = (run) => {
    const box = el("input", { type: "checkbox", "aria-label": `choose ${run}`, onchange: () => {
      if (box.checked) chosen.add(run); else chosen.delete(run);
      keepState({ chosen: [...chosen].join("\n") });
      links();
    } });
    box.checked = chosen.has(run);
    return box;
  };
  let found = { runs: [] };
  let shown = "";
  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/);
    const rows = found.runs.filter((row) => words.every((word) => `${row.run} ${row.state}`.toLowerCase().includes(word)));
    if (JSON.stringify(rows) === shown) return;
    shown = JSON.stringify(rows);
    const base = found.runs.find((row) => row.run === state("baseline"))?.reward;
    const change = ({ reward }) => typeof base === "number" && base && typeof reward === "number" ? `${(100 * (reward / base - 1)).toFixed(1)} %` : "";
    const baseline = (run) => el("button", { type: "button", "aria-pressed": String(run === state("baseline")), onclick: () => {
      keepState({ baseline: run === state("baseline") ? "" : run });
      shown = "";
      draw();
    } }, "baseline");
    const newest = found.total > found.runs.length ? `, the newest ${found.runs.length} are shown` : "";
    const note = found.total ? newest : ". `distflow train` writes into runs/, and a folder can be named after `dashboard`";
    place.replaceChildren(
      el("p", { class: "count", role: "status" }, `${plural(found.total, "run")} below ${found.folder}${note}`),
      ...(rows.length ? [table("Runs", [["", (row) => pick(row.run)], ["run", (row) => el("a", { class: "rowlink", href: address("overview", { run: row.run }) }, inert(row.run))],
        ["state", (row) => row.state], ["step", (row) => row.total ? `${row.step} of ${row.total}` : row.step],
        ...["reward", "accuracy", "loss"].filter((name) => rows.some((row) => row[name] !== null)).map((name) => [name, (row) => row[name]]),
        ["reward by step", (row) => sparkline(row.rewards)], ["to the baseline", (row) => el("span", {}, change(row), " ", baseline(row.run))],
        ["tokens/s", (row) => row.speed], ["problems", (row) => row.problems || ""],
        ["written", (row) => new Date(1000 * row.written).toISOString().slice(5, 16).replace("T", " ")]], rows)] : []));
  };
  const read = () => load("runs", {}, (answer) => { found = answer; draw(); });
  own.append(el("div", { class: "filters" }, el("label", {}, "find ", search), both), place);
  links();
  read();
  return read;
}

// What takes long (the doctor over many steps) is asked again when it is due, for a sixth of the time at most.
function repeated(work) {
  let isDue = false;
  let isBusy = false;
  return async () => {
    isDue = true;
    if (isBusy) return;
    isBusy = true;
    while (isDue) {
      isDue = false;
      const start = performance.now();
      await work();
      await new Promise((done) => { setTimeout(done, 5 * (performance.now() - start)); });
    }
    isBusy = false;
  };
}

// Is it well?
function showSentences() {
  const lines = data.sentences.map(({ tone, text, advice }) => el("p", { class: tone }, text, ...(advice ? [" ", el("span", { class: "advice" }, advice)] : [])));
  if (data.failure) lines.splice(1, 0, el("div", { id: "failure" }, inert(data.failure.message)));
  document.querySelector(".headline").replaceChildren(...lines);
  showFailure();
}

function readCurves() {
  return load("curves", {}, (part) => {
    Object.assign(data, part);
    showCharts();
  });
}

const read = (part, ...shows) => load(part, {}, (content) => {
  Object.assign(data, content);
  for (const show of shows) show();
});

function showOverview() {
  const judge = repeated(async () => {
    await read("judged", showSentences);
    await Promise.all([read("learned", showCompare), read("setup", showLog, showSetup), read("time", showStepTimes)]);
  });
  const refresh = () => Promise.all([read("top", showTop, showProblems), readCurves()]).then(() => void judge());
  refresh();
  return refresh;
}

// What happened in step N?
function showStepPage() {
  const draw = (found) => {
    const links = [["prev", found.previous, "← previous"], ["next", found.next, "next →"]].filter(([, step]) => step !== null)
      .map(([rel, step, label]) => el("a", { rel, class: "button", href: address("step", { step }) }, label));
    own.replaceChildren(el("div", { class: "row" }, el("h3", {}, `Step ${found.step}`), el("span", { class: "choices" }, ...links,
      ...(found.slowest ? [el("a", { class: "button", href: address("sample", { uid: found.slowest, step: found.step, split: "train" }) }, "the sample it waited for")] : []),
      el("a", { class: "button", href: address("samples", { step: `train ${found.step}` }) }, "its samples"), traceLink("its Chrome trace", found.step))),
      ...found.head.map((line) => el("p", { class: "lead" }, inert(line))),
      ...plainTable(found.groups.length ? "Groups that it trained on" : "No group is known", found.groups), ...plainTable(found.dropped_note, found.dropped));
  };
  load("step", { step: state("step") }, draw);
}

// What does it write?
function showSamples() {
  const samples = new Samples();
  return () => byId("samples").querySelector("tr.more") || samples.read(); // what is open stays open
}

// Why this reward?
const TOKEN_VALUES = { log_prob: "log-prob of the rollout", difference: "log-prob of training minus rollout", advantage: "advantage", version: "weight version", owner: "owner", trained: "trained on" };

function showTokens(tokens) {
  if (!tokens.length) return [el("p", { class: "lead" }, "Its tokens are not in the folder: trainer.save_groups keeps them.")];
  const box = el("div", { class: "tokens" });
  const scale = el("div", { class: "legend plain" });
  const draw = (name) => {
    const known = tokens.map((token) => token[name]).filter((value) => typeof value === "number");
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const kinds = name === "owner" ? [...new Set(tokens.map((token) => token.owner).filter(Boolean))] : [];
    const color = (value) => typeof value === "number" ? `color-mix(in oklab, var(--c0) ${Math.round((100 * (value - low)) / (high - low || 1))}%, var(--c1))`
      : kinds.includes(value) ? `var(--c${kinds.indexOf(value) % NUM_COLORS})` : "var(--wait)";
    const ends = known.length ? [...new Set([low, high])] : kinds;
    scale.replaceChildren(...ends.map((value) => swatch(color(value), typeof value === "number" ? number(value) : value)));
    box.replaceChildren(...tokens.map((token, i) => {
      const about = Object.entries(TOKEN_VALUES).map(([key, label]) => `${label} ${number(token[key])}`).join("\n");
      const span = el("span", { title: `token ${i}: id ${token.id}\n${about}` }, token.text ? token.text.replace(/\n/g, "⏎\n") : `${token.id} `);
      span.style.setProperty("--c", color(token[name]));
      return span;
    }));
    keepState({ tokens: name === "log_prob" ? "" : name });
  };
  const first = Object.hasOwn(TOKEN_VALUES, state("tokens")) ? state("tokens") : "log_prob";
  draw(first);
  return [el("h3", {}, `Its ${plural(tokens.length, "token")}${tokens[0].text === null ? ", by their ids" : ""}`), el("div", { class: "filters" },
    choice("coloured by", Object.entries(TOKEN_VALUES), first, (event) => draw(event.target.value)), scale), box];
}

function showSample() {
  load("sample", { uid: state("uid"), step: state("step"), split: state("split") }, (found) => {
    const view = Object.assign(Object.create(Samples.prototype), { found: { is_scored: true, domains: [] } });
    const cell = el("div", { class: "card" });
    view.fill(cell, found.group);
    const others = found.others.map(({ uid, score }) => el("a", { class: "button", "aria-current": uid === found.uid ? "true" : null, href: address("sample", { uid, step: found.step, split: found.split }) }, inert(uid), " ", scoreBadge(score)));
    own.replaceChildren(el("h3", {}, inert(`Sample ${found.uid}`)), facts([["step", found.step], ["split", found.split], ...found.facts]),
      el("p", { class: "choices" }, "its group: ", ...others), el("p", {}, el("a", { href: address("step", { step: found.step }) }, `what happened in step ${found.step}`)), cell, ...showTokens(found.tokens));
  });
}

// What differs?
function showComparison() {
  const draw = (found) => {
    const [a, b] = found.pair;
    const other = choice(`${a} is compared with`, found.runs.slice(1).map((run) => [run, run]), b, (event) => go("compare", { against: event.target.value }));
    const signed = (value) => typeof value === "number" ? `${value > 0 ? "+" : ""}${number(value)}` : "";
    const percent = (row) => row.a && row.difference !== null ? `${signed((100 * row.difference) / Math.abs(row.a))} %` : "";
    const words = { true: "yes, in this pair", false: "no", null: "too few steps" };
    const changed = found.config.map((row) => ({ key: row.key, [a]: row.a, [b]: row.b }));
    own.replaceChildren(el("p", { class: "filters" }, other), el("p", { class: "lead" }, inert(`First difference (A is ${a}, B is ${b}): ${found.first_difference}.`)),
      ...plainTable(`${plural(changed.length, "key")} of the config differ${changed.length === 1 ? "s" : ""}`, changed),
      facts([["same", found.same.join(", ") || "nothing known"], ["different", found.different.join(", ") || "nothing known"],
        [`findings only in ${a}`, found.findings.only_a.join(", ") || "none"], [`findings only in ${b}`, found.findings.only_b.join(", ") || "none"]]),
      el("h3", {}, "Means of the last common steps, with 95 % intervals; other seeds may differ by more"),
      table("Metrics", [["metric", (row) => row.metric], [a, (row) => row.a], [b, (row) => row.b], ["difference", (row) => signed(row.difference)], ["%", percent],
        ["interval", (row) => row.low === null ? "" : `${signed(row.low)} to ${signed(row.high)}`], ["can one tell?", (row) => words[row.differs]]], found.metrics));
    Object.assign(data, found.curves);
    showCharts();
  };
  const refresh = () => load("compare", { against: state("against") }, draw);
  refresh();
  return refresh;
}

// The sections of a report that a page has, and what draws it; that gives what to do when the run has gone on.
const DRAWN = {
  runs: [[], showRuns],
  overview: [["summary", "problems", "compare", "curves", "step", "setup"], showOverview],
  step: [[], showStepPage],
  samples: [["samples"], showSamples],
  sample: [[], showSample],
  compare: [["curves"], showComparison],
};

function startFrame() {
  const page = data.pages.find(({ name }) => name === data.page);
  document.title = numbered(`${page.question} ${data.runs.join(", ")} · distflow dashboard`);
  document.querySelector(".brand").textContent = `${page.title}: ${page.question}`;
  byId("status").hidden = !one;
  document.querySelector(".skip").remove();
  const link = ({ name, title, question, key }) => el("a", { href: address(name), title: `${question} (g ${key})`, "aria-current": name === data.page ? "page" : null }, title);
  const there = data.pages.filter(({ name, of_run }) => name === data.page || !of_run || (of_run === "several" ? data.runs.length > 1 : one && !["sample"].includes(name)));
  document.querySelector("header").append(el("nav", { id: "pages", "aria-label": "Pages" }, ...there.map(link)), el("p", { id: "said", role: "alert" }));
  const sections = DRAWN[data.page][0];
  for (const section of [...document.querySelector("main").children]) if (!sections.includes(section.id)) section.remove();
  if (!["overview", "samples"].includes(data.page)) document.querySelector("main").prepend(own);
  if (data.status) showStatus(data.status);
  byId("written").textContent = `Keys: / find, j and k next and previous row, n and p next and previous step, ${there.map(({ title, key }) => `g ${key} ${title}`).join(", ")}.`;
}

let waitsForLetter = false;

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  const page = waitsForLetter && data.pages.find(({ key }) => key === event.key);
  waitsForLetter = event.key === "g";
  if (page) return go(page.name);
  if (event.key === "/") {
    event.preventDefault();
    document.querySelector("main input[type=search]")?.focus();
  }
  if (event.key === "j" || event.key === "k") {
    const rows = [...document.querySelectorAll("main tbody .open, main tbody .rowlink")];
    const at = rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    rows[Math.min(Math.max(at, 0), rows.length - 1)]?.focus();
  }
  if (event.key === "n" || event.key === "p") document.querySelector(`a[rel=${event.key === "n" ? "next" : "prev"}]`)?.click();
}

// Asks whether the run has gone on, and draws what is new.
function follow(refresh) {
  let { version } = data;
  const look = async () => {
    if (!document.hidden && data.page === "runs") await refresh();
    if (!document.hidden && one) {
      let isNew = false;
      await load("state", { page: data.page }, (now) => {
        showStatus(now.status);
        isNew = now.version !== version;
        version = now.version;
      });
      if (isNew) await refresh?.();
    }
    setTimeout(look, EVERY_MS);
  };
  look();
}

startTheme();
startFrame();
document.addEventListener("keydown", onKey);
follow(DRAWN[data.page][1]());
