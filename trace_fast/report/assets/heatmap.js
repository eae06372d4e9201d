// Group heat map: a grid of tinted numbers, one rollout a row, one turn a column; arrow keys move in it.
const HEAT_ROWS = 50;

function setUpHeatmap() {
  const choice = byId("heat-group");
  choice.append(...data.groups.map((text, i) => el("option", { value: i, text })));
  const sizes = data.groups.map(() => 0);
  for (const r of data.rollouts) sizes[r.group] += 1;
  const firstLarge = sizes.findIndex((size) => size > 1);
  choice.value = String(Math.max(0, firstLarge));
  byId("legend-low").textContent = signed(-data.scale, 2);
  byId("legend-high").textContent = signed(data.scale, 2);
  choice.addEventListener("change", () => drawHeatmap(HEAT_ROWS));
  byId("heat").addEventListener("keydown", moveInGrid);
  byId("heat").addEventListener("click", openCell);
  drawHeatmap(HEAT_ROWS);
}

function drawHeatmap(limit) {
  const members = data.rollouts.filter((r) => r.group === Number(byId("heat-group").value));
  const shown = members.slice(0, limit);
  const turns = Math.max(0, ...shown.map((r) => r.turns));
  const answered = shown.some((r) => r.finished);
  const heading = (text, props = {}) => el("th", { scope: "col", text, ...props });
  const head = el("tr", {}, heading("Rollout"), heading("Outcome"),
    ...Array.from({ length: turns }, (_, k) => heading(String(k), { class: "number", "aria-label": `turn ${k}` })),
    answered ? heading("answer", { class: "number apart" }) : null);
  const rows = shown.map((r) => el("tr", {},
    el("th", { scope: "row", dir: "auto" }, rolloutLink(r.place, r.id)),
    el("td", {}, el("span", { class: `outcome ${r.outcome}`, text: outcomeMark[r.outcome] })),
    ...Array.from({ length: turns }, (_, k) => (k < r.turns ? heatCell(r, k, `turn-${k}`) : el("td", { class: "none" }))),
    answered ? (r.finished ? heatCell(r, r.turns, "answer") : el("td", { class: "none apart" })) : null));
  byId("heat").replaceChildren(el("caption", { dir: "auto", text: `Group ${data.groups[byId("heat-group").value]}` }), el("thead", {}, head), el("tbody", {}, ...rows));
  const first = byId("heat").querySelector("td[data-place]");
  if (first) first.tabIndex = 0;
  fillMore(byId("heat-more"), members.length, shown.length, HEAT_ROWS, drawHeatmap);
}

function heatCell(r, k, place) {
  const shade = place === "answer" ? { class: "apart" } : tint(r.deltas[k]);
  const marks = (k === r.decisive ? " decisive" : "") + (k === r.harmful ? " harmful" : "");
  return el("td", {
    class: `number cell ${shade.class}${marks}`,
    vars: shade.vars,
    tabindex: -1,
    data: { place, rollout: r.place },
    title: place === "answer" ? "answer generation" : `turn ${k}${marks && ":" + marks}`,
    text: signed(r.deltas[k], 2),
  });
}

function moveInGrid(event) {
  const cell = event.target.closest("td[data-place]");
  if (!cell) return;
  if (event.key === "Enter") openCell(event);
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
  if (!down && !right) return;
  event.preventDefault();
  event.stopPropagation();
  const rows = byId("heat").tBodies[0].rows;
  const next = rows[cell.parentNode.sectionRowIndex + down]?.cells[cell.cellIndex + right];
  if (!next?.dataset.place) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function openCell(event) {
  const cell = event.target.closest("td[data-place]");
  if (cell) location.hash = rolloutHash(Number(cell.dataset.rollout), cell.dataset.place);
}
