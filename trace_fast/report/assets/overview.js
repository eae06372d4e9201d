// Whole-file figures: tiles, credit by tool, lists, settings.
function renderOverview() {
  const { summary, rollouts } = data;
  const secured = rollouts.filter((r) => r.secured === "in time").length;
  const tiles = [
    ["rollouts", count(rollouts.length)],
    ["groups", count(data.groups.length)],
    ["tool turns", count(summary.turns)],
    ["right", count(summary.outcomes.right)],
    ["wrong", count(summary.outcomes.wrong)],
    ["without reward", count(summary.outcomes.unknown)],
    ["secured", count(secured)],
    ["post-secured turns", count(summary.post_secured_turns)],
  ];
  byId("tiles").append(
    ...tiles.map(([name, value]) => el("div", { data: { tile: name } }, el("dt", { text: name }), el("dd", { text: value }))),
  );
  byId("disagreeing").hidden = data.disagreeing === 0;
  byId("disagreeing").textContent =
    `${plural(data.disagreeing, "score record")} named another first secured state: scored with another threshold. ` +
    "This page uses its own throughout.";
  renderTools(summary.tools);
  renderList("secured-wrong", summary.secured_but_wrong, (r) => `secured ${stateName(r.secured_at, r.turns)}`);
  renderList("right-unsecured", summary.right_but_never_secured, (r) =>
    r.secured_at === null ? `ends at ${plain(last(r.mean_logprobs))} nats` : "only after the answer");
  renderList("post-secured", summary.post_secured, (r) => `${plural(r.post_secured, "turn")} of ${r.turns}`);
  const share = summary.turns ? (100 * summary.post_secured_turns) / summary.turns : 0;
  byId("post-secured-total").textContent =
    `${count(summary.post_secured_turns)} of ${plural(summary.turns, "turn")} (${share.toFixed(1)} %) came after the ` +
    `answer was secured; their δ adds up to ${signed(summary.post_secured_credit)}.`;
  const rows = [...data.settings];
  if (data.models.length) rows.unshift([data.models.length > 1 ? "reference models" : "reference model", data.models.join(", ")]);
  byId("settings").hidden = rows.length === 0;
  byId("settings").querySelector("dl").append(
    ...rows.flatMap(([name, value]) => [el("dt", { text: name, dir: "auto" }), el("dd", { text: value, dir: "auto" })]),
  );
}

function renderTools(tools) {
  const table = byId("tools");
  const largest = Math.max(1e-9, ...tools.map((tool) => Math.abs(tool.mean)));
  const headings = ["Tool", "Turns", "Mean δ", "", "Sum δ", "δ > 0", "δ < 0", "Post-secured"];
  table.append(
    el("thead", {}, el("tr", {}, ...headings.map((text, i) =>
      el(text ? "th" : "td", { scope: text ? "col" : null, class: i ? "number" : null, text })))),
    el("tbody", {}, ...tools.map((tool) => el("tr", {},
      el("th", { scope: "row", dir: "auto", text: tool.name ?? "(not recorded)", class: tool.name === null ? "absent" : null }),
      el("td", { class: "number", text: count(tool.turns) }),
      el("td", { class: "number", text: signed(tool.mean) }),
      el("td", { class: "meter", "aria-hidden": "true" },
        el("span", { class: tool.mean < 0 ? "loss" : "gain", vars: { "--size": (Math.abs(tool.mean) / largest).toFixed(4) } })),
      el("td", { class: "number", text: signed(tool.total) }),
      el("td", { class: "number", text: count(tool.helped) }),
      el("td", { class: "number", text: count(tool.harmed) }),
      el("td", { class: "number", text: count(tool.post_secured) }),
    ))),
  );
  if (!tools.length) table.append(el("tbody", {}, el("tr", {}, el("td", { text: "No tool turns in this file." }))));
}

/** List of links to rollouts, the first few at once, the rest on demand. */
function renderList(id, places, remark) {
  const box = byId(id);
  const shown = 8;
  box.append(el("p", { class: "count", text: plural(places.length, "rollout") }));
  if (!places.length) return;
  const item = (i) => el("li", {}, rolloutLink(i, data.rollouts[i].id), el("span", { class: "remark", text: remark(data.rollouts[i]) }));
  const list = el("ol", { class: "links" }, ...places.slice(0, shown).map(item));
  box.append(list);
  if (places.length <= shown) return;
  const button = el("button", {
    type: "button",
    text: `Show all ${count(places.length)}`,
    on: { click: () => { list.append(...places.slice(shown).map(item)); button.remove(); list.children[shown].querySelector("a").focus(); } },
  });
  box.append(button);
}
