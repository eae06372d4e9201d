// Shared by all parts: the data, building elements, writing numbers. Text reaches the page through textContent only.
const data = JSON.parse(document.getElementById("report-data").textContent);
const byId = (id) => document.getElementById(id);

/** Element with properties (class, text, on, attributes, dataset, vars) and children (nodes or strings). */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "text") node.textContent = value;
    else if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "vars") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Signed number with a true minus; a value that rounds to zero has no sign. */
function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return (value < 0 ? "−" : "+") + text;
}

/** Plain number: sign only when negative. */
const plain = (value, digits = 3) => signed(value, digits).replace("+", "");
const count = (n) => n.toLocaleString("en-US");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** How strongly a credit is tinted: 0..1 of the file's scale; the sign picks the hue through the class. */
function tint(delta) {
  const share = Math.min(1, Math.abs(delta) / data.scale);
  return { class: delta > 0 ? "gain" : delta < 0 ? "loss" : "even", vars: { "--share": share.toFixed(3) } };
}

const rolloutHash = (i, place = "") => `#rollout-${i + 1}${place && "/" + place}`;
const rolloutLink = (i, text, place = "") => el("a", { href: rolloutHash(i, place), dir: "auto", text });
const stateName = (state, turns) =>
  state === null ? "never" : state === 0 ? "before turn 0" : state <= turns ? `after turn ${state - 1}` : "after the answer";
const outcomeMark = { right: "✓ right", wrong: "✗ wrong", unknown: "? unknown" };
const outcomeText = (r, digits) => outcomeMark[r.outcome] + (r.reward === null ? "" : ` (${plain(r.reward, digits)})`);
const last = (array) => array[array.length - 1];
