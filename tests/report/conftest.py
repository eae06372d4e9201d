"""Score records made from one-step credits, and a real browser to look at the page with."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trace_fast.report import ReportEntry, write_report
from trace_fast.rollout import Segment

CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"

# One-step credits of the paper's A.5; the last entry is answer generation.
A5_DELTAS = {
    "P1": [6.39, 0.59, 0.10, 0.05],
    "P2": [1.63, -1.03, -1.04, 6.05, 0.03],
    "P3": [0.88, 5.86, 0.00, -0.00],
    "P4": [5.48, 0.06, 0.00],
    "P5": [1.18, -0.12, -0.19, -0.14, 0.43, 5.44, 0.02, 0.00],
    "N1": [1.47, 0.13, 1.49, -0.00, -4.83, -0.78],
    "N2": [2.31, 0.10, -1.32, 0.09, 0.35, 0.98, -4.05, -1.09],
    "N3": [2.19, -0.35, 0.10, -1.03, 0.96, 0.50, -3.63, 0.19, -1.22],
    "N4": [1.42, -0.10, 0.82, 0.08, -3.41, -0.97],
    "N5": [2.00, 0.43, 0.06, -2.46, 0.40, 1.98, -3.48, -1.03],
}


@pytest.fixture(scope="session")
def a5_deltas() -> dict[str, list[float]]:
    return A5_DELTAS


@pytest.fixture(scope="session")
def make_record() -> Callable[..., dict[str, Any]]:
    """``make_record(id, deltas, gap=..., finished=..., **keys)``: a score record with these one-step credits.

    ``gap`` is d_0 = -mean_logprobs[0] + 1e-3; states follow from V_k = log(d_0 / d_k).
    """

    def make(
        rollout_id: str, deltas: list[float], *, gap: float = 2.0, finished: bool = True, **keys: Any
    ) -> dict[str, Any]:
        values = [0.0]
        for delta in deltas:
            values.append(values[-1] + delta)
        mean_logprobs = [min(0.0, 1e-3 - gap * math.exp(-value)) for value in values]
        turns = len(deltas) - finished
        rewards = []
        for k in range(turns):
            weights = [0.8 ** (u - k) for u in range(k, min(k + 3, turns))]
            credits = deltas[k : min(k + 3, turns)]
            rewards.append(sum(w * c for w, c in zip(weights, credits, strict=True)) / sum(weights))
        record: dict[str, Any] = {
            "id": rollout_id,
            "group": "g",
            "n_turns": turns,
            "boundaries": [100 + 50 * k for k in range(len(values))],
            "answer": "Ian Stevens",
            "mean_logprobs": mean_logprobs,
            "values": values,
            "deltas": deltas,
            "turn_rewards": rewards,
            "outcome_advantage": None,
            "secured_at": next((k for k, value in enumerate(mean_logprobs) if value >= -0.3), None),
            "reward": None,
            "extra": {},
            "model": "tiny@0123",
            "status": "ok",
        }
        assert set(keys) <= {*record, "source"}
        return record | keys

    return make


@pytest.fixture(scope="session")
def make_transcript() -> Callable[..., tuple[Segment, ...]]:
    """``make_transcript(tools, text=...)``: prompt, one action and observation a tool, final answer."""

    def make(tools: list[str | None], text: str = "An observation.") -> tuple[Segment, ...]:
        segments = [Segment("system", "Answer with evidence.", -1), Segment("user", "Who managed it?", -1)]
        for k, tool in enumerate(tools):
            segments.append(Segment("assistant", f"Action of turn {k}.", k, tool))
            segments.append(Segment("tool", f"{text} (turn {k})", k, tool))
        return (*segments, Segment("assistant", "It was Ian Stevens.", len(tools)))

    return make


@pytest.fixture(scope="session")
def a5_entries(
    make_record: Callable[..., dict[str, Any]], make_transcript: Callable[..., tuple[Segment, ...]]
) -> list[ReportEntry]:
    """The ten rollouts of A.5: P1..P5 right, N1..N5 wrong, all secured but N4; tools search, open, find in turn."""
    entries = []
    for name, deltas in A5_DELTAS.items():
        right = name.startswith("P")
        record = make_record(
            name,
            deltas,
            gap=4.0 if name == "N4" else 2.0,
            group="positive" if right else "negative",
            answer="Air Georgian" if name == "P1" else "Ian Stevens",
            reward=1.0 if right else 0.1,
            outcome_advantage=1.0 if right else -1.0,
        )
        tools: list[str | None] = [("search", "open", "find")[k % 3] for k in range(len(deltas) - 1)]
        entries.append(ReportEntry(record, make_transcript(tools)))
    return entries


@pytest.fixture(scope="session")
def a5_page(a5_entries: list[ReportEntry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "a5.html"
    write_report(path, a5_entries, title="Ten rollouts", settings={"horizon": "3"})
    return path


class Page:
    """The few things that tests do in the browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, place: str = "") -> None:
        self.driver.get("about:blank")  # a changed hash alone would not load the page anew
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # what came before is not this page's
        self.driver.get(path.as_uri() + place)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def keep(self, path: Path) -> None:
        """The page at ``path``, opened only if another one is open; light, on a screen."""
        self.media()
        if self.driver.current_url.partition("#")[0] != path.as_uri():
            self.open(path)

    def go(self, place: int, where: str = "") -> None:
        """Opens a rollout (1-based) of the page that is open."""
        self.js("location.hash = arguments[0]", f"#rollout-{place}{where}")
        self.until(f"document.querySelector('.kicker')?.textContent.startsWith('Rollout {place} of ')")

    def text(self, selector: str) -> str:
        return str(self.js("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)", selector))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def until(self, script: str) -> None:
        """Waits until the expression is true; times out with the expression in the message."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 10, 0.02).until(lambda _: self.js(f"return Boolean({script})"), script)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def media(self, *, scheme: str = "light", kind: str = "") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> dict[str, str | None]:
        """Every address asked for since ``open``, the page's own included, and why it was blocked, if it was."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        events = [(m["method"], m["params"]) for m in messages]
        blocked = {p["requestId"]: p.get("blockedReason") for name, p in events if name == "Network.loadingFailed"}
        asked = [(p["requestId"], p["request"]["url"]) for name, p in events if name == "Network.requestWillBeSent"]
        return {url: blocked.get(request) for request, url in asked if not url.startswith(("about:", "data:"))}


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Debian's Chromium, headless, with a fresh profile."""
    for program, package in ((CHROMIUM, "chromium"), (CHROMEDRIVER, "chromium-driver")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is absent: install Debian's package {package}")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    switches = ["headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
    switches += ["disable-background-networking", "disable-component-update", "window-size=1400,1000"]
    for switch in [*switches, f"user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield Page(driver)
    finally:
        driver.quit()
