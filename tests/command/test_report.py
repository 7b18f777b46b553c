"""The HTML report."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

from fx_passes.errors import ArtifactError, InputError
from lowering.command.report import Lowering, ReportTable, render_report, write_report

VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Collects text, checks that every element is closed, and notes what is loaded from elsewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [value for key, value in attrs if key in ("src", "href") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


ENGINE = {
    "compute_capabilities": ["8.9"],
    "kernels": 61,
    "int8_compute": 1,
    "float_compute": 1,
    "activation_bytes": 70_200_000,
    "weight_bytes": 25_800_000,
    "engine_bytes": 26_100_000,
    "rows": [
        {
            "name": "conv1_myl0_1",
            "kind": "correlation",
            "modules": ["layer1.0.conv1"],
            "sources": ["net.py:3"],
            "inputs": ["Int8[1,3,8,8]"],
            "outputs": ["Half[1,4,6,6]"],
            "bytes": 480,
            "int8": True,
        }
    ],
}


def report(**changes):
    return {
        "target": "tensorrt-rtx",
        "precision": "int8",
        "flops_share": 1.0,
        "flops": 8_000_000,
        "segments": [
            {
                "name": "segment_0",
                "backend": "tensorrt-rtx 1.7",
                "precision": "int8 + fp16",
                "nodes": 3,
                "flops": 8_000_000,
                "ops": [
                    {"node": "conv1", "op": "conv2d", "int8": True, "reason": "weighted op", "source": "net.py:3"},
                    {"node": "dw", "op": "conv2d", "int8": False, "reason": "depthwise <costs> more", "source": None},
                ],
                "engines": [ENGINE],
                "float_twin": {"precision": "fp16", **ENGINE, "kernels": 57},
            }
        ],
        "fallbacks": [{"node": "decode", "source": "net.py:9", "reason": "wrapped by the user"}],
        "threads": None,
        "versions": {"torch": torch.__version__},
        "settings": {"float_type": "fp16"},
        **changes,
    }


def test_a_page_holds_what_was_found():
    table = ReportTable("Latency", ("run", "ms"), [("float", 40.0), ("int8", 10.0)], bars=1, note="2 threads")
    graph = "<svg xmlns='http://www.w3.org/2000/svg'><rect width='4' height='3'/></svg>"
    page = Page(render_report([Lowering("net", "one segment & <more>", report(), [table], graph)], title="A <page>"))
    assert page.open == []
    assert page.outside == []  # nothing is fetched when it is opened
    assert {"A <page>", "one segment & <more>", "depthwise <costs> more", "net.py:9", "2 threads"} <= set(page.texts)
    assert "1 of 2 convolutions and matrix products take int8." in page.texts
    assert "57" in page.texts  # the fp16 twin's kernels
    assert {"layer1.0.conv1", "Half[1,4,6,6]", "correlation (int8)"} <= set(page.texts)
    assert "svg" in page.tags


def test_bars_are_scaled_to_the_longest():
    table = ReportTable("t", ("run", "ms"), [("a", 40.0), ("b", 10.0), ("c", None)], bars=1)
    text = render_report([], title="t", tables=[table])
    assert [part.split("%")[0] for part in text.split('<i style="width: ')[1:]] == ["100.0", "25.0", "0.0"]


def test_float_lowerings_have_no_coverage():
    segment = {**report()["segments"][0], "ops": [], "float_twin": None, "engines": [{"ops": {"Conv": 2}}]}
    portable = {**report()["segments"][0], "engines": [{**ENGINE, "compute_capabilities": None, "rows": []}]}
    assert "any (portable)" in Page(render_report([Lowering("n", "s", report(segments=[portable]))], title="t")).texts
    page = Page(render_report([Lowering("net", "s", report(segments=[segment], fallbacks=[]))], title="t"))
    assert not any("take int8" in text for text in page.texts)
    assert "Stays in Python" not in page.texts


def test_a_graph_must_be_svg():
    with pytest.raises(InputError, match="no SVG"):
        render_report([Lowering("net", "s", report(), graph="<script>alert(1)</script>")], title="t")


def test_writing_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "deep" / "report.html"
    for title in ("first", "second"):
        assert write_report(path, [], title=title) == path
    assert "second" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write the report"):
        write_report(tmp_path / "file" / "report.html", [], title="t")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="cannot write the report"):
        write_report(tmp_path / "folder", [], title="t")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
