// How a run was configured, and what happened when.

function showLog() {
  if (!data.log.length) return;
  byId("log").hidden = false;
  byId("log").querySelector("ol").replaceChildren();
  for (const event of data.log) {
    const when = event.t ? new Date(event.t * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
    const what = event.step === null ? event.kind : `${event.kind} ${event.step}`;
    byId("log").querySelector("ol").append(el("li", { class: event.rolled_back ? "gone" : "" },
      el("time", {}, when), el("span", {}, inert(what)), el("span", {}, inert(event.message))));
  }
}

function showSetup() {
  const place = byId("changed");
  place.replaceChildren();
  if (data.changed && !data.changed.length) place.append(el("p", { class: "lead" }, `The preset ${data.preset} as it is.`));
  if (data.changed && data.changed.length) {
    const was = (change) => el("span", { class: "was" }, inert(change.before));
    place.append(
      el("p", { class: "lead" }, data.preset ? `What differs from the preset ${data.preset}:` : "What differs from the defaults:"),
      table("Changed keys", [["key", (change) => change.key], [data.preset ? "in the preset" : "default", was], ["here", (change) => change.now],
        ["set by", (change) => change.where]], data.changed, "keys"));
  }
  if (data.config) {
    byId("config").hidden = false;
    byId("config").querySelector("pre").replaceChildren(inert(data.config));
  }
  if (data.facts.length) {
    byId("what-ran").hidden = false;
    byId("what-ran").querySelector(".facts").replaceChildren(...facts(data.facts).childNodes);
  }
  byId("setup").hidden = !data.config && !data.facts.length && !data.log.length && !(data.changed ?? []).length;
}
