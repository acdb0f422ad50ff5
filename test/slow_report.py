"""The page of --report in headless Chromium: values under the cursor, the keyboard, light and dark, narrow and wide
windows, runs of 1,000 and 100,000 steps. make test-report runs it; PICTURES=DIR also keeps a picture of each page."""

import json
import os
import re
import subprocess
import time

import pytest
from report_files import RUN, page_data, write_log
from trainer_runs import binaries, write_text

BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000")
# What a test adds to a copy of the page: it acts, and writes what it saw into the page's title.
DRIVER = """<script>
const seen = {};
const figures = Object.fromEntries([...document.querySelectorAll("figure")].map(f => [f.getAttribute("aria-label"), f]));
const said = name => figures[name].querySelector("output").textContent;
function point(name, share) {
  const svg = figures[name].querySelector("svg"), box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const x = box.left + (62 + share * (view.width - 76)) * box.width / view.width;
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: box.top + 50, bubbles: true }));
}
function press(name, ...keys) {
  for (const key of keys) figures[name].dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  return said(name);
}
%s
document.documentElement.innerHTML = ""; document.documentElement.textContent = "SEEN" + JSON.stringify(seen) + "END";
</script>"""


def drive(page, actions, width=1000, dark=False):
    """What these actions see on a page."""
    copy = page.with_name("driven.html")
    copy.write_text(page.read_text().replace("</body>", DRIVER % actions + "</body>"))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    dom = subprocess.run([*BROWSER, *scheme, f"--window-size={width},900", "--dump-dom", f"file://{copy}"], capture_output=True,
                         text=True, timeout=120, check=True).stdout
    return json.loads(re.search(r"SEEN(.*)END", dom, re.DOTALL)[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a run, of a plan beside runs of 1,000 and of 100,000 steps."""
    work, train = tmp_path_factory.mktemp("pages"), binaries()[0]
    write_text(work / "text")
    train(*RUN, "--steps", 20, "--eval-every", 7, "--report", "run.html", cwd=work)
    for steps in (1_000, 100_000):
        write_log(work / f"{steps}.jsonl", steps, spike=steps // 2 + 1)
        train("--plan", "--model", "d3", "--report", f"{steps}.html", "--report-with", f"{steps}.jsonl", cwd=work)
    if folder := os.environ.get("PICTURES"):
        for page in work.glob("*.html"):
            for width, scheme in ((500, 1), (800, 0), (1600, 1)):
                subprocess.run([*BROWSER, f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},2600",
                                f"--screenshot={folder}/{page.stem}-{width}.png", f"file://{page}"], check=True, timeout=120)
    return work


def test_values_under_the_cursor(pages):
    curves = page_data(pages / "run.html")["runs"][0]["curves"]
    seen = drive(pages / "run.html", """
        point("Loss", 0); seen.first = said("Loss"); seen.rate = said("Learning rate");
        point("Loss", 1); seen.last = said("Loss");
        figures["Loss"].querySelector("svg").dispatchEvent(new PointerEvent("pointerleave")); seen.none = said("Loss");""")
    numbers = [[float(n) for n in re.findall(r"\d+\.\d+", seen[key])] for key in ("first", "last")]
    assert seen["first"].startswith("step 1: training loss") and seen["last"].startswith("step 20: training loss")
    assert numbers[0] == pytest.approx([curves[key]["mean"][0] for key in ("loss", "smoothed", "val_loss")], rel=1e-5)
    assert numbers[1] == pytest.approx([curves[key]["mean"][-1] for key in ("loss", "smoothed", "val_loss")], rel=1e-5)
    assert "at step 7" in seen["first"] and "at step" not in seen["last"] and seen["none"].startswith(seen["last"])
    least = min(curves["val_loss"]["mean"])
    assert float(re.search(r"; least validation loss ([\d.]+) at step", seen["none"])[1]) == pytest.approx(least, rel=1e-5)
    assert seen["rate"].startswith("step 1: learning rate")  # the charts move together


def test_the_keyboard(pages):
    seen = drive(pages / "run.html", """
        figures["Loss"].focus(); seen.focus = document.activeElement === figures["Loss"];
        seen.right = press("Loss", "ArrowRight", "ArrowRight"); seen.left = press("Loss", "ArrowLeft");
        seen.end = press("Loss", "End", "ArrowRight"); seen.home = press("Loss", "Home"); seen.escape = press("Loss", "Escape");
        press("Memory over a step", "End");
        seen.alive = [...document.querySelectorAll("tr.alive td:first-child")].map(td => td.textContent);""")
    assert seen["focus"] and [seen[key].split(":")[0] for key in ("right", "left", "end", "home", "escape")] == [
        "step 2", "step 1", "step 20", "step 1", "step 20"]
    assert {"weights", "m", "v"} <= set(seen["alive"]) and "logits" not in seen["alive"]


def test_the_memory_is_the_plans(pages):
    memory = page_data(pages / "run.html")["memory"]
    peak = max(sum(moment[2]) for moment in memory["moments"])
    seen = drive(pages / "run.html", """seen.rest = said("Memory over a step"); seen.first = press("Memory over a step", "Home");""")
    assert seen["rest"].startswith(f"peak: {peak / 2**20:.2f} MiB in ")
    first = memory["moments"][0]
    assert seen["first"].startswith(f"{sum(first[2]) / 2**20:.2f} MiB in {first[0]}, {first[1]}: ")
    assert all(f"{kind.replace('_', ' ')} {size / 2**20:.2f} MiB" in seen["first"] for kind, size in zip(memory["kinds"], first[2]) if size)


def test_light_and_dark(pages):
    colours = """const style = getComputedStyle(document.body); seen.colours = [style.color, style.backgroundColor];"""
    brightness = [[sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in drive(pages / "run.html", colours, dark=dark)["colours"]]
                  for dark in (False, True)]
    assert brightness[0][0] + 300 < brightness[0][1] and brightness[1][1] + 300 < brightness[1][0]


@pytest.mark.parametrize("width", [500, 800, 1600])
def test_nothing_overlaps(pages, width):
    seen = drive(pages / "run.html", """
        seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth; seen.overlaps = [];
        for (const svg of document.querySelectorAll("svg")) {
          const boxes = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]), all = svg.getBoundingClientRect();
          boxes.forEach(([a, A], i) => {
            if (A.left < all.left - 1 || A.right > all.right + 1) seen.overlaps.push(a);
            for (const [b, B] of boxes.slice(i + 1))
              if (A.left < B.right && B.left < A.right && A.top + 2 < B.bottom && B.top + 2 < A.bottom) seen.overlaps.push(a + " and " + b);
          });
        }""", width=width)
    assert seen == {"wide": 0, "overlaps": []}


@pytest.mark.parametrize("steps", [1_000, 100_000])
def test_many_steps(pages, steps):
    """The spike is there, its point says how many steps it is, and the page answers at once."""
    begin = time.monotonic()
    seen = drive(pages / f"{steps}.html", """
        const begin = performance.now(); for (let i = 0; i <= 100; i++) point("Loss", i / 100); seen.milliseconds = performance.now() - begin;
        point("Loss", .5); seen.middle = said("Loss"); seen.next = press("Loss", "ArrowRight"); seen.state = document.getElementById("state").textContent;
        seen.key = figures["Loss"].querySelector(".key").textContent;""")
    assert time.monotonic() - begin < 20 and seen["milliseconds"] < 2000
    found = [seen["middle"], seen["next"]]
    assert any("100" in re.findall(r"training loss ([\d.]+)", text) for text in found) if steps == 1_000 else \
        any(re.search(r"training loss [\d.]+ \(4\.\d+ to 100\)", text) for text in found), found
    assert ("up to 64 steps" in seen["state"]) == (steps == 100_000)
    assert "training loss" in seen["key"] and "this run" not in seen["key"]  # which is a plan
