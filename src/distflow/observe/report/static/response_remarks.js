// What reward functions reported on a response, a box for each part of the reward. All of it is text of a model, a row or a program.

const NEARLY_RIGHT = 1 - 1e-6;

// null if it is unknown.
function isRight(response) {
  const right = response.failure ? null : response.acc ?? response.score;
  return typeof right === "number" ? right >= NEARLY_RIGHT : null;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const named = (name, ...nodes) => el("div", { class: "named" }, el("h5", {}, name), ...nodes);

// How remarks of the built-in reward functions are shown; each gives null for what it does not know, which is then shown as it is.
const REMARKS = {
  failed: (cases) => !Array.isArray(cases) || !cases.every((one) => isObject(one) && "case" in one) ? null
    : cases.length === 0 ? el("p", { class: "kept" }, "all cases passed")
    : named("cases that failed", el("ul", { class: "cases" }, ...cases.map((one) => el("li", {}, textBox(one.case), el("p", { class: "why" }, inert(one.why ?? "")),
      ...(one.printed ? [el("p", { class: "printed" }, "it printed"), textBox(one.printed)] : []))))),
  followed: (kept) => !isObject(kept) ? null
    : named("instructions", el("ul", { class: "kept-list" }, ...Object.entries(kept).map(([name, is]) =>
      el("li", { class: is ? "kept" : "broken" }, inert(name), is ? "" : " · not followed")))),
  reason: (text) => typeof text !== "string" ? null : named("reason", textBox(text)),
  extracted: (text) => named("extracted", text === null ? el("p", { class: "broken" }, "no answer was found") : textBox(text)),
  wanted: (text) => named("compared with", ...(Array.isArray(text) ? text : [text]).map((one) => textBox(one))),
  program: (text) => typeof text !== "string" ? null
    : el("details", { class: "program" }, el("summary", {}, `the program, ${plural(text.trimEnd().split("\n").length, "line")}`), textBox(text)),
};

const FIGURES = {
  sandbox: (level) => ["sandbox", level],
  seconds: (value) => typeof value === "number" ? ["took", seconds(value)] : null,
  share: (value) => typeof value === "number" ? ["share passed", number(value)] : null,
};

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

function remark(part, said) {
  const figures = [];
  const nodes = [];
  for (const key of [...Object.keys(REMARKS), ...Object.keys(said).filter((key) => !Object.hasOwn(REMARKS, key))]) {
    if (!Object.hasOwn(said, key)) continue;
    const node = Object.hasOwn(REMARKS, key) ? REMARKS[key](said[key]) : null;
    const figure = Object.hasOwn(FIGURES, key) ? FIGURES[key](said[key]) : null;
    if (node) nodes.push(node);
    else if (said[key] !== null) figures.push(figure ?? [key, typeof said[key] === "object" ? JSON.stringify(said[key]) : number(said[key])]);
  }
  if ("failed" in said && said.program === null) nodes.unshift(el("p", { class: "broken" }, "no program was found in the response"));
  return el("div", { class: "remarks" }, el("h5", { class: "part" }, inert(part)), ...nodes,
    ...(figures.length ? [facts(figures, true)] : []));
}

const remarks = (response) => Object.entries(response.remarks ?? {}).filter(([, said]) => isObject(said))
  .map(([part, said]) => remark(part, said));
