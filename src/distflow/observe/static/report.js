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

function showConfig() {
  if (!data.config) return;
  byId("config").hidden = false;
  byId("config").querySelector("pre").append(inert(data.config));
}

startTheme();
showTop();
showProblems();
showCompare();
showCharts();
new Samples();
showLog();
showConfig();
root.dataset.ready = String(charts.length);
