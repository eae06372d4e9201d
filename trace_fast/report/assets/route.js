// The address says what is open: #rollout-5, #rollout-5/turn-2, or a part of the file's page.
function route() {
  const match = /^#rollout-(\d+)(?:\/(prompt|turn-\d+|answer))?$/.exec(location.hash);
  const place = match ? Number(match[1]) - 1 : -1;
  const isRollout = place >= 0 && place < data.rollouts.length;
  byId("file-view").hidden = isRollout;
  byId("rollout-view").hidden = !isRollout;
  if (!isRollout) {
    showFile();
    return;
  }
  if (detailState.place !== place || !byId("rollout-title")) renderRollout(place);
  const target = match[2] && byId(match[2]);
  if (target) {
    target.scrollIntoView({ block: "start" });
    target.focus({ preventScroll: true });
  } else {
    scrollTo(0, 0);
    byId("rollout-title").focus({ preventScroll: true });
  }
}

function showFile() {
  const left = detailState.place;
  detailState.place = null;
  byId("rollout-view").replaceChildren();
  if (!byId("first-secured").classList.contains("js-plotly-plot")) drawFirstSecured();
  const part = ["overview", "rollouts", "groups"].find((id) => `#${id}` === location.hash);
  if (part) byId(part).scrollIntoView({ block: "start" });
  if (left !== null) byId("table").querySelector(`a[href="${rolloutHash(left)}"]`)?.focus({ preventScroll: part !== "rollouts" });
}

function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || byId("rollout-view").hidden) return;
  if (event.target.closest("input, select, textarea, .scroll")) return;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") location.hash = "#rollouts";
  else if (step && neighbour(step)) location.hash = rolloutHash(neighbour(step).place);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // keep the address: it says which rollout is open
  byId("main").focus();
});
addEventListener("hashchange", route);
addEventListener("keydown", onKey);
renderOverview();
setUpTable();
setUpHeatmap();
setUpPrinting();
route();
