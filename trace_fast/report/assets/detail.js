// One rollout: numbers and charts on the left, the transcript beside them.
const detailState = { place: null };

function renderRollout(place) {
  const r = data.rollouts[place];
  const view = byId("rollout-view");
  const plot = el("div", { class: "plot", id: "rollout-plot" });
  view.replaceChildren(
    stepper(r),
    el("h2", { id: "rollout-title", tabindex: -1 }, el("span", { class: "kicker", text: `Rollout ${place + 1} of ${data.rollouts.length}` }), el("bdi", { text: r.id })),
    facts(r),
    el("p", { class: "verdict", id: "verdict" }, ...verdict(r)),
    el("div", { class: "columns" },
      el("div", { class: "numbers" }, el("h3", { text: "Credit by turn" }), plot, turnTable(r)),
      el("div", {}, el("h3", { text: "Transcript" }), renderTranscript(r))),
  );
  detailState.place = place;
  drawRollout(plot, r, (where) => { goTo(place, where); });
}

/** Opens the place, also when the address already names it (then no hashchange would come). */
function goTo(place, where) {
  const hash = rolloutHash(place, where);
  if (location.hash === hash) route();
  else location.hash = hash;
}

function neighbour(step) {
  const rows = tableState.rows;
  const at = rows.findIndex((r) => r.place === detailState.place);
  return at < 0 ? null : rows[at + step] ?? null;
}

function stepper(r) {
  detailState.place = r.place;
  const link = (step, text, id) => {
    const other = neighbour(step);
    return other ? el("a", { id, href: rolloutHash(other.place), text }) : el("span", { id, class: "off", text });
  };
  return el("nav", { class: "stepper", "aria-label": "Rollouts" },
    el("a", { id: "back", href: "#rollouts", text: "All rollouts" }), link(-1, "← Previous", "previous"), link(1, "Next →", "next"));
}

function facts(r) {
  const rows = [
    ["Group", data.groups[r.group]], ["Gold answer", r.answer ?? "given as token ids"],
    ["Outcome (reward)", outcomeText(r, 3)],
    ["Outcome advantage", signed(r.advantage)],
    ["Tool turns", count(r.turns) + (r.finished ? "" : ", cut off before an answer")],
    ["Mean log-probability", `${plain(r.mean_logprobs[0])} → ${plain(last(r.mean_logprobs))} nats`],
    ["First secured", stateName(r.secured_at, r.turns)],
    ["Tokens", count(last(r.boundaries))],
    r.source ? ["Source", r.source] : null, r.model ? ["Reference", r.model] : null,
  ].filter(Boolean);
  return el("dl", { class: "facts" }, ...rows.map(([name, value]) =>
    el("div", { data: { fact: name } }, el("dt", { text: name }), el("dd", { text: value, dir: "auto" }))));
}

function verdict(r) {
  const named = (turn) => [
    el("a", { href: rolloutHash(r.place, `turn-${turn}`), text: `turn ${turn}` }),
    r.tools[turn] === null ? "" : el("bdi", { class: "tool", text: r.tools[turn] }), ` (δ ${signed(r.deltas[turn])})`,
  ];
  const answer = r.finished ? [` Answer generation, apart: δ ${signed(r.deltas[r.turns])}.`] : [];
  if (r.turns === 0) return ["No tool turns.", ...answer];
  return [
    ...(r.decisive === null ? ["No turn made the answer more predictable"] : ["Decisive: ", ...named(r.decisive)]), ". ",
    ...(r.harmful === null ? ["No turn made it less predictable"] : ["Most harmful: ", ...named(r.harmful)]), ".", ...answer,
  ];
}

function turnTable(r) {
  const headings = ["Turn", "Tool", "log p after", "V after", "δ", "Reward"];
  const row = (k, name, where, shade) => el("tr", { class: shade.class, vars: shade.vars },
    el("th", { scope: "row" }, el("a", { href: rolloutHash(r.place, where), text: name })),
    el("td", { dir: "auto", class: "text", text: (k < r.turns ? r.tools[k] : null) ?? "–" }),
    ...[plain(r.mean_logprobs[k + 1], 4), signed(r.values[k + 1], 4), signed(r.deltas[k], 4), signed(r.rewards[k], 4)].map((text, i) =>
      el("td", { class: `number${i === 2 ? " cell" : ""}`, text })));
  const start = el("tr", {}, el("th", { scope: "row", text: "start" }), el("td", { text: "–" }),
    el("td", { class: "number", text: plain(r.mean_logprobs[0], 4) }), el("td", { class: "number", text: signed(r.values[0], 4) }), el("td"), el("td"));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of each turn" },
    el("table", { id: "turns" },
      el("thead", {}, el("tr", {}, ...headings.map((text, i) => el("th", { scope: "col", class: i > 1 ? "number" : null, text })))),
      el("tbody", {}, start, ...r.deltas.slice(0, r.turns).map((delta, k) => row(k, String(k), `turn-${k}`, tint(delta)))),
      r.finished ? el("tfoot", {}, row(r.turns, "answer", "answer", { class: "apart" })) : null));
}
