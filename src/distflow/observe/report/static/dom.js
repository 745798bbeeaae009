// Building blocks of the page. All text of models and data enters as text nodes, never as markup.
"use strict";

const root = document.documentElement;

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, isRead(name) ? numbered(value) : value);
  }
  node.append(...children.map((child) => (typeof child === "string" ? inert(child) : child)));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, name === "aria-label" ? numbered(value) : value);
  node.append(...children.map((child) => (typeof child === "string" ? numbered(child) : child)));
  return node;
}

const isRead = (name) => name === "title" || name === "aria-label";

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Characters that cannot be seen, or that move, hide or turn round the text beside them, are shown by their number;
// not so the joiner inside an emoji.
const HIDDEN = /(?!(?<=\p{Extended_Pictographic}\uFE0F?\p{Emoji_Modifier}?)\u200D)[^\P{C}\n\t]|[\u2028\u2029]/gu;

const codeOf = (character) => `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const numbered = (text) => String(text).replace(HIDDEN, codeOf);

function inert(text) {
  const fragment = document.createDocumentFragment();
  const source = String(text);
  let end = 0;
  for (const match of source.matchAll(HIDDEN)) {
    fragment.append(source.slice(end, match.index));
    fragment.append(el("span", { class: "ctl", title: "a character that cannot be seen" }, codeOf(match[0])));
    end = match.index + match[0].length;
  }
  fragment.append(source.slice(end));
  return fragment;
}

function textBox(text, tag = "div") {
  if (text === null || text === undefined || text === "") return el(tag, { class: "text empty" }, "(empty)");
  const lines = Array.isArray(text) && text.length && text.every((line) => typeof line === "string") ? text.join("\n") : text;
  return el(tag, { class: "text" }, inert(typeof lines === "string" ? lines : JSON.stringify(lines)));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function scoreBadge(score) {
  if (typeof score !== "number") return el("span", { class: "score", title: "no score" }, score ? String(score) : "none");
  return el("span", { class: `score ${score > 0.5 ? "high" : "low"}` }, number(score));
}

function facts(pairs, small) {
  const spans = pairs.map(([key, value]) => el("span", {}, el("b", {}, inert(key)), inert(value)));
  return el("div", { class: small ? "facts small" : "facts" }, ...spans);
}

// Seconds for people: three digits are enough to compare two phases.
function seconds(value) {
  return value >= 100 ? `${Math.round(value)} s` : `${Number(value.toPrecision(value < 1 ? 2 : 3))} s`;
}

// A table of texts, numbers and nodes. columns: label and what a row shows; a text in the first names the row.
function table(label, columns, rows, kind = "keys rows") {
  const head = el("tr", {}, ...columns.map(([name]) => el("th", { scope: "col" }, inert(name))));
  const cell = (value, place) => typeof value === "string" && !place ? el("th", { scope: "row" }, inert(value))
    : el("td", {}, value instanceof Node ? value : typeof value === "number" ? number(value) : inert(value ?? ""));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", { class: kind }, el("thead", {}, head),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...columns.map(([, show], place) => cell(show(row), place)))))));
}

function swatch(color, label, extra) {
  const node = el("span", { class: "swatch" }, inert(label), extra ? el("b", {}, extra) : "");
  node.style.setProperty("--c", color);
  return node;
}
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
