// The page of a run: reads `#data` and draws it. The other scripts of this folder come before this one.

const data = JSON.parse(document.getElementById("data").textContent);

function showLog() {
  if (!data.log.length) return;
  byId("log").hidden = false;
  for (const event of data.log) {
    const when = event.t ? new Date(event.t * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
    const what = event.step === null ? event.kind : `${event.kind} ${event.step}`;
    byId("log").querySelector("ol").append(el("li", { class: event.rolled_back ? "gone" : "" },
      el("time", {}, when), el("span", {}, inert(what)), el("span", {}, inert(event.message))));
  }
}

function showSetup() {
  const place = byId("changed");
  if (data.changed && !data.changed.length) place.append(el("p", { class: "lead" }, `The preset ${data.preset} as it is.`));
  if (data.changed && data.changed.length) {
    const row = (change) => el("tr", {}, el("th", { scope: "row" }, inert(change.key)), el("td", { class: "was" }, inert(change.before)),
      el("td", {}, inert(change.now)), el("td", { class: "where" }, inert(change.where)));
    const head = ["key", data.preset ? "in the preset" : "default", "here", "set by"].map((name) => el("th", { scope: "col" }, name));
    place.append(
      el("p", { class: "lead" }, data.preset ? `What differs from the preset ${data.preset}:` : "What differs from the defaults:"),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Changed keys" },
        el("table", { class: "keys" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...data.changed.map(row)))));
  }
  if (data.config) {
    byId("config").hidden = false;
    byId("config").querySelector("pre").append(inert(data.config));
  }
  if (data.facts.length) {
    byId("what-ran").hidden = false;
    byId("what-ran").querySelector(".facts").replaceWith(facts(data.facts));
  }
  byId("setup").hidden = !data.config && !data.facts.length && !data.log.length && !(data.changed ?? []).length;
}

startTheme();
showTop();
showFailure();
showProblems();
showCompare();
showDomains();
showCharts();
showConstants();
showHistograms();
new Samples();
showStep();
showInvoice();
showLog();
showSetup();
showContents();
root.dataset.ready = String(charts.length);
