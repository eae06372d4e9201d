// Table of rollouts: filters, sorting, a page of rows at a time.
const PAGE = 100;
const columns = [
  { name: "#", key: (r) => r.place, cell: (r) => String(r.place + 1), number: true },
  { name: "Id", key: (r) => r.id, cell: (r) => rolloutLink(r.place, r.id) },
  { name: "Group", key: (r) => data.groups[r.group], cell: (r) => data.groups[r.group] },
  { name: "Answer", key: (r) => r.answer, cell: (r) => r.answer ?? "–" },
  { name: "Outcome", key: (r) => r.reward, cell: (r) => el("span", { class: `outcome ${r.outcome}`, text: outcomeText(r, 2) }) },
  { name: "Turns", key: (r) => r.turns, cell: (r) => String(r.turns), number: true },
  { name: "log p first", key: (r) => r.mean_logprobs[0], cell: (r) => plain(r.mean_logprobs[0]), number: true },
  { name: "log p last", key: (r) => last(r.mean_logprobs), cell: (r) => plain(last(r.mean_logprobs)), number: true },
  { name: "Σ δ tools", key: toolCredit, cell: (r) => signed(toolCredit(r)), number: true },
  { name: "Secured", key: (r) => r.secured_at, cell: (r) => stateName(r.secured_at, r.turns) },
  { name: "Decisive", key: (r) => r.deltas[r.decisive] ?? null, cell: (r) => turnCell(r, r.decisive) },
  { name: "Most harmful", key: (r) => r.deltas[r.harmful] ?? null, cell: (r) => turnCell(r, r.harmful) },
];
const tableState = { column: 0, descending: false, rows: [], limit: PAGE };

/** Sum of delta over the tool turns; not V_T, from which it differs in credit forms other than log_ratio. */
function toolCredit(r) {
  return r.deltas.slice(0, r.turns).reduce((sum, delta) => sum + delta, 0);
}

function turnCell(r, turn) {
  if (turn === null) return "–";
  return rolloutLink(r.place, `${turn}: ${signed(r.deltas[turn])}`, `turn-${turn}`);
}

function setUpTable() {
  data.rollouts.forEach((r, place) => { r.place = place; });
  const groupChoice = byId("filters").elements.group;
  groupChoice.append(el("option", { value: "", text: "any" }), ...data.groups.map((text, i) => el("option", { value: i, text })));
  const head = el("tr");
  columns.forEach((column, i) => {
    const button = el("button", { type: "button", text: column.name, on: { click: () => sortBy(i) } });
    head.append(el("th", { scope: "col", "aria-sort": "none", class: column.number ? "number" : null }, button));
  });
  byId("table").tHead.append(head);
  for (const kind of ["input", "change"]) byId("filters").addEventListener(kind, updateTable);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(updateTable));
  byId("table").tBodies[0].addEventListener("click", (event) => {
    if (!event.target.closest("a") && getSelection().isCollapsed) event.target.closest("tr").querySelector("a").click();
  });
  updateTable();
}

function sortBy(i) {
  tableState.descending = tableState.column === i ? !tableState.descending : Boolean(columns[i].number && i);
  tableState.column = i;
  updateTable();
}

/** Rows that pass the filters, in the chosen order; missing values come last in either direction. */
function selectRows() {
  const filters = new FormData(byId("filters"));
  const wanted = (name) => filters.get(name).toLowerCase();
  const passes = (r) =>
    r.id.toLowerCase().includes(wanted("id")) &&
    (filters.get("group") === "" || r.group === Number(filters.get("group"))) &&
    (r.answer ?? "").toLowerCase().includes(wanted("answer")) &&
    (filters.get("outcome") === "" || r.outcome === filters.get("outcome")) &&
    (filters.get("secured") === "" || r.secured === filters.get("secured"));
  const { key } = columns[tableState.column];
  const sign = tableState.descending ? -1 : 1;
  const collator = new Intl.Collator(undefined, { numeric: true });
  const compare = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b);
  return data.rollouts.filter(passes).sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || y === null) return (x === null) - (y === null) || a.place - b.place;
    return sign * compare(x, y) || a.place - b.place;
  });
}

function updateTable() {
  tableState.rows = selectRows();
  tableState.limit = PAGE;
  for (const [i, th] of [...byId("table").tHead.rows[0].cells].entries()) {
    const order = tableState.descending ? "descending" : "ascending";
    th.setAttribute("aria-sort", i === tableState.column ? order : "none");
  }
  drawRows();
}

function drawRows() {
  const rows = tableState.rows.slice(0, tableState.limit);
  byId("table").tBodies[0].replaceChildren(...rows.map((r) =>
    el("tr", {}, ...columns.map((column, i) => {
      const isText = !column.number;
      return el(i === 1 ? "th" : "td", { scope: i === 1 ? "row" : null, class: isText ? "text" : "number", dir: isText ? "auto" : null }, column.cell(r));
    }))));
  byId("shown").textContent = `${count(tableState.rows.length)} of ${plural(data.rollouts.length, "rollout")}` +
    (rows.length < tableState.rows.length ? `, the first ${count(rows.length)} shown` : "");
  fillMore(byId("more"), tableState.rows.length, rows.length, PAGE, (limit) => {
    tableState.limit = limit;
    drawRows();
    byId("table").tBodies[0].rows[rows.length].querySelector("a").focus({ preventScroll: true });
  });
}

/** "Show more" and "Show all" below a list that is drawn in part. */
function fillMore(box, total, shown, step, show) {
  const button = (text, limit) => el("button", { type: "button", text, on: { click: () => show(limit) } });
  const rest = total - shown;
  box.replaceChildren(
    ...(rest > step ? [button(`Show ${step} more`, shown + step)] : []),
    ...(rest > 0 ? [button(`Show all ${count(total)}`, total)] : []),
  );
}
