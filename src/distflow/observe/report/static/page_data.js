// Where the page's data come from: a report has all of them inside, a dashboard asks its server.

const data = JSON.parse(byId("data").textContent);
const EMBEDDED = {}; // parts that a report makes of what it has
const asked = {}; // the number of the last question about each part
const wrong = {};
let pending = 0;

// Gives a part of the data to `draw`, in a report at once.
function load(part, params, draw) {
  return data.api ? ask(part, params, draw) : draw(EMBEDDED[part] ? EMBEDDED[part](params) : data);
}

// Of several questions about one part, the answer to the last one counts.
async function ask(part, params, draw) {
  const key = part === "group" ? JSON.stringify(params) : part;
  const number = asked[key] = (asked[key] ?? 0) + 1;
  busy(1);
  const { ok, content } = await answerOf(`${data.api}${part}?${inAddress({ run: data.runs, ...params })}`);
  busy(-1);
  if (number !== asked[key]) return;
  wrong[part] = ok ? "" : content.error;
  byId("said").replaceChildren(inert(Object.values(wrong).filter(Boolean).join(" · ")));
  if (ok) draw(content);
}

async function answerOf(url) {
  try {
    const answer = await fetch(url, { headers: { Authorization: `Bearer ${data.token}` } });
    return { ok: answer.ok, content: await answer.json() };
  } catch (error) {
    return { ok: false, content: { error: `The dashboard does not answer (${error.message}). It may have ended.` } };
  }
}

function busy(more) {
  pending += more;
  document.body.setAttribute("aria-busy", String(pending > 0));
}

const inAddress = (params) => new URLSearchParams(Object.entries(params).flatMap(([name, value]) => [value].flat().map((one) => [name, one])).filter(([, value]) => value !== ""));

// What the reader chose: a dashboard keeps it in the address.
const state = (name) => (data.api ? new URLSearchParams(location.search).get(name) ?? "" : "");

function keepState(values) {
  if (!data.api) return;
  const address = new URL(location.href);
  for (const [name, value] of Object.entries(values)) {
    if (value === "" || value === null) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  history.replaceState(null, "", address);
}
