// Charts. The chart library reads markup in its texts, so none of a rollout's text is ever given to it: numbers
// and fixed words only. Colours of text and lines come from the style sheet, so that both themes and paper work.
const BLUE = "#2f7fc6", ORANGE = "#d9731f", GREY = "#868d97", CLEAR = "rgba(0,0,0,0)";
const PLOT_OPTIONS = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false, showTips: false };

function plotLayout(extra) {
  return {
    paper_bgcolor: CLEAR, plot_bgcolor: CLEAR, dragmode: false, hovermode: "closest",
    font: { family: "inherit", size: 12 },
    hoverlabel: { bgcolor: "#22262c", bordercolor: "#22262c", font: { color: "#ffffff", family: "inherit" } },
    ...extra,
  };
}

function drawFirstSecured() {
  const bins = data.summary.first_secured;
  const positions = bins.map((_, i) => i);
  const short = bins.map(([name]) => name.replace("before turn 0", "start").replace("after turn ", "turn ").replace("after the answer", "answer"));
  const every = Math.ceil(bins.length / 14);
  const shown = positions.filter((i) => i % every === 0 || i >= bins.length - 2);
  Plotly.newPlot(byId("first-secured"), [{
    type: "bar", x: positions, y: bins.map(([, n]) => n), customdata: bins.map(([name]) => name),
    marker: { color: bins.map((_, i) => (i < bins.length - 2 ? BLUE : GREY)) },
    text: bins.map(([, n]) => (n ? String(n) : "")), textposition: "outside", cliponaxis: false, textangle: 0, textfont: { size: 10 }, constraintext: "none",
    hovertemplate: "%{customdata}: %{y} rollouts<extra></extra>",
  }], plotLayout({
    height: 250, margin: { l: 44, r: 8, t: 18, b: 62 }, bargap: 0.25,
    xaxis: { tickvals: shown, ticktext: shown.map((i) => short[i]), fixedrange: true, tickangle: bins.length > 7 ? -45 : 0 },
    yaxis: { title: { text: "rollouts" }, fixedrange: true, rangemode: "tozero" },
  }), PLOT_OPTIONS);
  byId("first-secured").setAttribute("role", "img");
  byId("first-secured").setAttribute("aria-label", "Rollouts by first secured state: " +
    bins.filter(([, n]) => n).map(([name, n]) => `${name} ${n}`).join(", "));
}

/** Three panels on one axis: states at whole numbers, each turn's bars between the states before and after it. */
function drawRollout(box, r, onTurn) {
  const states = r.mean_logprobs.map((_, k) => k);
  const isSecured = r.mean_logprobs.map((value) => value >= data.threshold);
  const names = states.map((k) => (k === 0 ? "before turn 0" : k <= r.turns ? `after turn ${k - 1}` : "after the answer"));
  const curve = (y, yaxis, label) => ({
    type: "scatter", mode: "lines+markers", x: states, y, yaxis, showlegend: false, customdata: names,
    line: { color: BLUE, width: 2 },
    marker: { size: 8, color: BLUE, symbol: isSecured.map((s) => (s ? "circle" : "circle-open")), line: { width: 2, color: BLUE } },
    hovertemplate: `${label} %{customdata}: %{y:.3f}<extra></extra>`,
  });
  const centres = r.deltas.map((_, k) => k + 0.5);
  const turns = r.deltas.map((_, k) => (k < r.turns ? `turn ${k}` : "answer generation"));
  const hue = (value, k) => (k >= r.turns ? GREY : value < 0 ? ORANGE : BLUE);
  const deltas = {
    type: "bar", x: centres, y: r.deltas, yaxis: "y3", width: 0.36, offset: r.deltas.map((_, k) => (k < r.turns ? -0.38 : -0.18)), customdata: turns, name: "δ",
    marker: { color: r.deltas.map(hue), pattern: { shape: r.deltas.map((_, k) => (k < r.turns ? "" : "/")) } }, showlegend: false,
    hovertemplate: "δ of %{customdata}: %{y:.3f}<extra></extra>",
  };
  const rewards = {
    type: "bar", x: centres.slice(0, r.turns), y: r.rewards, yaxis: "y3", width: 0.36, offset: 0.02, customdata: turns, name: "reward",
    marker: { color: CLEAR, line: { width: 1.6, color: r.rewards.map(hue) } }, showlegend: false,
    hovertemplate: "K-step reward of %{customdata}: %{y:.3f}<extra></extra>",
  };
  const every = Math.max(1, Math.ceil(r.turns / 20));
  const ticks = centres.filter((_, k) => k >= r.turns || k % every === 0);
  const heading = (text, y) => ({ text, x: 0, y, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false });
  const shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y2", y0: data.threshold, y1: data.threshold, line: { color: GREY, width: 1.5, dash: "dash" } }];
  if (r.secured_at !== null) shapes.push({ type: "line", x0: r.secured_at, x1: r.secured_at, yref: "paper", y0: 0, y1: 1, line: { color: GREY, width: 1, dash: "dot" } });
  const axis = (domain) => ({ domain, fixedrange: true, zeroline: true, zerolinewidth: 1.5 });
  const lowest = Math.min(data.threshold, ...r.mean_logprobs);
  Plotly.react(box, [curve(r.values, "y", "V"), curve(r.mean_logprobs, "y2", "log p"), deltas, rewards], plotLayout({
    height: 540, margin: { l: 52, r: 12, t: 26, b: 44 }, shapes,
    annotations: [
      heading("Value V (log gap closed)", 1), heading("Mean log-probability (dashed: secured)", 0.655),
      heading("Credit δ (filled) and K-step reward (outlined)", 0.325),
    ],
    xaxis: {
      title: { text: "turn" }, range: [-0.15, states.length - 0.85], fixedrange: true, zeroline: false, anchor: "y3",
      tickvals: ticks, ticktext: ticks.map((x) => (x - 0.5 < r.turns ? String(x - 0.5) : "answer")),
    },
    yaxis: axis([0.74, 1]), yaxis3: axis([0, 0.32]),
    yaxis2: { ...axis([0.41, 0.65]), zeroline: false, range: [lowest * 1.08, -lowest * 0.06] },
  }), PLOT_OPTIONS);
  box.removeAllListeners("plotly_click");
  box.on("plotly_click", ({ points: [point] }) => {
    const k = point.curveNumber < 2 ? point.pointNumber - 1 : point.pointNumber;
    onTurn(k < 0 ? "prompt" : k < r.turns ? `turn-${k}` : "answer");
  });
  const fully = r.deltas.map((delta, k) => `${turns[k]} ${signed(delta)}`).join(", ");
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `Value, mean log-probability and credit by turn. δ: ${fully || "none"}. The table below has all numbers.`);
}

/** On paper the page is narrower than the window, and charts have a fixed width: draw them anew for it. */
function setUpPrinting() {
  matchMedia("print").addEventListener("change", ({ matches }) => {
    for (const box of document.querySelectorAll(".plot.js-plotly-plot")) {
      if (box.offsetParent !== null) Plotly.relayout(box, matches ? { width: Math.min(box.clientWidth, 680), autosize: false } : { width: null, autosize: true });
    }
  });
}
