// Transcript of one rollout: a section a turn, tinted by its credit, with its numbers in words.
const LONG = 2400, HEAD = 1500, TAIL = 500;

function renderTranscript(r) {
  const texts = JSON.parse(byId(`texts-${r.place}`).textContent);
  const extra = texts.filter(([role]) => role === "extra");
  const segments = texts.filter(([role]) => role !== "extra");
  const of = (turn) => segments.filter(([, t]) => t === turn);
  const box = el("div", { class: "transcript" });
  if (!segments.length) box.append(el("p", { class: "note", text: "No transcript: it comes from the rollouts file, which was not given for this rollout." }));
  if (of(-1).length) box.append(turnSection("prompt", "Prompt", of(-1), { class: "even" }));
  for (let k = 0; k < r.turns; k += 1) {
    box.append(turnSection(`turn-${k}`, `Turn ${k}`, of(k), tint(r.deltas[k]), turnBadges(r, k), r.tools[k]));
  }
  if (r.finished) {
    const badges = [badge(`δ ${signed(r.deltas[r.turns])}`), r.secured_at === r.turns + 1 ? badge("first secured here", "secured") : null];
    box.append(turnSection("answer", "Answer generation", of(r.turns), { class: "apart" }, badges));
  } else if (of(r.turns).length) {
    box.append(turnSection("answer", "After the last turn (cut off before an answer)", of(r.turns), { class: "apart" }));
  }
  if (extra.length) {
    box.append(el("details", { class: "extra" }, el("summary", { text: "Other fields of the record" }),
      el("dl", { class: "pairs" }, ...extra.flatMap(([, , name, ...text]) => [el("dt", { text: name, dir: "auto" }), el("dd", {}, textBlock(...text))]))));
  }
  return box;
}

const badge = (text, kind = "") => el("span", { class: `badge ${kind}`, text });

function turnBadges(r, k) {
  return [
    badge(`δ ${signed(r.deltas[k])}`, r.deltas[k] < 0 ? "loss" : r.deltas[k] > 0 ? "gain" : ""),
    badge(`reward ${signed(r.rewards[k])}`),
    k === r.decisive ? badge("decisive", "mark") : null,
    k === r.harmful ? badge("most harmful", "mark") : null,
    r.secured_at === k + 1 ? badge("first secured here", "secured") : null,
    r.secured_at !== null && r.secured_at <= k ? badge("post-secured") : null,
  ];
}

function turnSection(id, title, segments, shade, badges = [], tool = null) {
  return el("section", { id, tabindex: -1, class: `turn ${shade.class}`, vars: shade.vars, "aria-labelledby": `${id}-title` },
    el("header", {},
      el("h4", { id: `${id}-title` }, title, tool === null ? null : el("span", { class: "tool", dir: "auto", text: tool })),
      el("span", { class: "badges" }, ...badges)),
    ...segments.map(([role, , name, ...text]) => el("div", { class: "segment" },
      el("span", { class: "role", text: name !== null && name !== tool ? `${role}: ${name}` : role }), textBlock(...text))));
}

/** Text as it is, long middles folded away; what was cut from the file is marked with its size. */
function textBlock(head, tail, omitted) {
  const block = el("div", { class: "text", dir: "auto" });
  const cut = () => el("span", { class: "cut", text: `[${plural(omitted, "character")} cut to keep this file small]` });
  const full = () => block.replaceChildren(head, ...(omitted ? [cut(), tail] : []));
  const length = head.length + tail.length;
  if (length <= LONG) {
    full();
    return block;
  }
  const start = head.slice(0, splitAt(head, HEAD));
  const last = omitted ? tail : head;
  const ending = last.slice(splitAt(last, Math.max(omitted ? 0 : start.length, last.length - TAIL)));
  const hidden = plural(length - start.length - ending.length, "more character");
  const button = el("button", {
    type: "button", class: "fold", text: `Show all: ${hidden}`, data: { hidden },
    on: { click: () => { full(); block.tabIndex = -1; block.focus({ preventScroll: true }); } },
  });
  block.append(start, button, ...(omitted ? [cut()] : []), ending);
  return block;
}

/** Place near n that is not inside a surrogate pair. */
const splitAt = (text, n) => (/[\uDC00-\uDFFF]/.test(text[n] ?? "") ? n - 1 : n);
