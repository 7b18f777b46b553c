"""The report page in a real browser: no errors, nothing wider than a phone, tables that sort, graphs that zoom.

A copy of the page gets a script at its end that does what a reader does, and tells the page around it what it sees: a
frame can be as narrow as a phone, a window cannot.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
import torch
from torch import nn

from lowering import lower_to_onnx, lower_to_trt
from lowering.command.report import Latency, Lowering, placement_drawing, write_report
from lowering.compare import compare

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")

BEFORE = """<script>
window.failures = [];
window.addEventListener("error", (event) => window.failures.push(String(event.message)));
console.error = (...parts) => window.failures.push(parts.join(" "));
</script>"""
AFTER = """<script>
const seen = { failures: window.failures };
document.querySelectorAll("details").forEach((each) => { each.open = true; });
const page = document.documentElement;
seen.width = page.clientWidth;
seen.overflow = page.scrollWidth - page.clientWidth;
const table = document.querySelector("table.sorted");
const column = [...table.querySelectorAll("th")].findIndex((header) => header.textContent.startsWith("bytes"));
const numbers = () => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].textContent));
const button = table.querySelectorAll("th button")[column];
button.click(); seen.rising = numbers();
button.click(); seen.falling = numbers();
const search = table.closest(".scroll").previousElementSibling;
search.value = "no such row"; search.dispatchEvent(new Event("input"));
seen.found = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
search.value = ""; search.dispatchEvent(new Event("input"));
seen.back = [...table.tBodies[0].rows].filter((row) => !row.hidden).length;
const drawing = document.querySelector(".graph svg");
const zoom = document.querySelectorAll(".zoom button");
zoom[2].click(); const fitted = drawing.getBoundingClientRect().width;
zoom[1].click(); seen.zoomed = drawing.getBoundingClientRect().width / fitted;
const cells = [...document.querySelectorAll("td, .card p")];
seen.narrowest = Math.min(...cells.map((each) => each.clientWidth).filter(Boolean));
seen.cards = [...document.querySelectorAll(".card h3")].map((each) => each.textContent);
parent.postMessage("SEEN" + JSON.stringify(seen) + "END", "*");
</script>"""
AROUND = """<!doctype html><output></output><script>
addEventListener("message", (event) => { document.querySelector("output").textContent = event.data; });
</script><iframe src="{page}" style="border: 0; width: {width}px; height: 1000px"></iframe>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    torch.manual_seed(0)
    images = torch.randn(1, 3, 32, 32)
    stem = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5), nn.GELU()).eval()
    engine = lower_to_trt(model, images, calibration=[images])
    session = lower_to_onnx(model, images, calibration=[images])
    accuracy = compare(model, {"int8": session}, [images])["int8"][0]
    latency = [Latency("float", 3.0, 2.9, 3.3), Latency("int8", 1.0, 0.9, 1.1)]
    parts = [
        Lowering.of("engine", engine, graph=placement_drawing(model, images, "tensorrt-rtx")),
        Lowering.of("a long name of a model: on the CPU", session, accuracy=accuracy, latency=latency),
    ]
    return write_report(tmp_path_factory.mktemp("page") / "report.html", parts, title="A report")


@pytest.fixture(scope="module", params=[1280, 420], ids=["wide", "phone"])
def seen(request, page):
    text = page.read_text(encoding="utf-8").replace("<body>", f"<body>{BEFORE}", 1)
    driven = page.with_name(f"driven-{request.param}.html")
    driven.write_text(text.replace("</body>", f"{AFTER}</body>"), encoding="utf-8")
    around = page.with_name(f"around-{request.param}.html")
    around.write_text(AROUND.replace("{page}", driven.name).replace("{width}", str(request.param)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    profile = f"--user-data-dir={page.parent / str(request.param)}"
    command = [
        CHROMIUM,
        *flags,
        profile,
        "--window-size=1400,1200",
        "--virtual-time-budget=5000",
        "--dump-dom",
        around.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<output>SEEN(.*?)END</output>", ran.stdout, re.S)
    assert found, ran.stderr[-2000:]
    return {**json.loads(unescape(found[1])), "window": request.param}


def test_nothing_fails_and_nothing_is_wider_than_the_page(seen):
    assert seen["failures"] == []
    assert seen["width"] == seen["window"]
    assert seen["overflow"] <= 0
    assert seen["narrowest"] >= 30  # no text is broken letter by letter
    assert seen["cards"] == ["Lowered", "Speed", "Accuracy", "Size"] * 2


def test_tables_sort_and_search(seen):
    assert len(seen["rising"]) > 1
    assert seen["rising"] == sorted(seen["rising"])
    assert seen["falling"] == sorted(seen["rising"], reverse=True)
    assert (seen["found"], seen["back"]) == (0, len(seen["rising"]))


def test_the_graph_zooms(seen):
    assert seen["zoomed"] == pytest.approx(1.3, rel=0.02)
