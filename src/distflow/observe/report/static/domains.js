// A row for each domain: what it had of the run, and what came of it.

function showDomains() {
  const { domains } = data;
  if (!domains.length) return;
  const section = byId("domains");
  section.hidden = false;
  section.querySelector(".lead").textContent = "Rewards are means over the first and the last tenth of the steps, " +
    "validation figures those of the first and the last validation.";
  const move = (ends, format) => !ends ? "–" : ends.length > 1 ? `${format(ends[0])} → ${format(ends[1])}` : format(ends[0]);
  const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
  const count = (n) => n.toLocaleString("en");
  const failed = ({ calls, errors, timeouts }) => {
    if (calls === null) return "–";
    const kinds = [[errors, "error"], [timeouts, "timeout"]].filter(([n]) => n).map(([n, kind]) => `${count(n)} ${kind}${n > 1 ? "s" : ""}`);
    return `${kinds.join(", ") || "none"} of ${count(calls)}`;
  };
  const dropped = (reasons) => Object.entries(reasons).map(([reason, n]) => `${count(n)} ${reason}`).join(", ") || "none";
  const columns = [
    ["groups", (row) => row.groups === null ? "–" : `${count(row.groups)} (${percent(row.share ?? 0)})`],
    ["reward", (row) => move(row.reward, number)],
    ["validation accuracy", (row) => move(row.accuracy, percent)],
    ["reward errors", failed],
    ["groups dropped", (row) => dropped(row.dropped)],
  ].filter(([, value]) => domains.some((row) => value(row) !== "–"));
  section.querySelector(".rows").replaceChildren(table("Domains", [["domain", (row) => row.name], ...columns], domains));
}
