"""draw: every call has its box and colour, boxes do not overlap, edges go down, the text is well-formed SVG."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import convert_fx, draw, fuse_fx, prepare_calibration_fx, propagate_shapes, trace, wrap
from fx_passes.analysis.draw import _KINDS
from fx_passes.analysis.drawing_layout import lay_out
from fx_passes.errors import ArtifactError

torch.set_num_threads(1)
SVG = "{http://www.w3.org/2000/svg}"


@wrap
def decode(x):
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.scale = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 1),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, x):
        y = F.relu(self.conv1(x))
        z = self.conv2(y) + y * self.scale
        return decode(z.view(x.shape[0], -1))


def parse(svg):
    root = ET.fromstring(svg)
    groups = {g.get("id"): g for g in root.iter(f"{SVG}g")}
    fills = {name: g.find(f"{SVG}rect").get("fill") for name, g in groups.items()}
    kinds = {name: next(k for k, (_, fill, _) in _KINDS.items() if fill == f) for name, f in fills.items()}
    return root, groups, kinds


def texts(group):
    return [t.text for t in group.iter(f"{SVG}text")]


def test_boxes_kinds_and_shapes():
    gm = propagate_shapes(trace(Net().eval()), torch.rand(2, 3, 4, 4), dynamic_shapes={"x": {0: "n"}})
    root, groups, kinds = parse(draw(gm))
    assert kinds == {
        "x": "end", "conv1": "float", "relu": "float", "conv2": "float", "mul": "float", "add": "float",
        "view": "float", "decode": "fallback", "output": "end",
    }  # fmt: skip
    assert texts(groups["conv1"]) == ["conv1", "conv2d", "n\u00d74\u00d74\u00d74"]
    assert "test_draw.py:" in groups["conv1"].find(f"{SVG}title").text
    edges = [p for p in root.iter(f"{SVG}path") if p.get("fill") == "none"]
    assert len(edges) == 9  # x-conv1-relu-conv2-add, relu-mul-add, add-view-decode-output; not the size of x


def test_quantized_graph_has_int8_edges_instead_of_boxes():
    torch.manual_seed(0)
    prepared = prepare_calibration_fx(Net().eval(), target="tensorrt")
    prepared(torch.rand(2, 3, 4, 4))
    for gm in (prepared, convert_fx(prepared)):
        root, _, kinds = parse(draw(gm))
        assert {k.split("_")[0] for k in kinds} == {
            "x",
            "conv1",
            "relu",
            "conv2",
            "mul",
            "add",
            "view",
            "decode",
            "output",
        }
        assert kinds["conv1"] == kinds["conv2"] == "quantized" and kinds["relu"] == "float"
        assert sum(p.get("stroke-width") == "2.4" for p in root.iter(f"{SVG}path")) >= 2
        assert "(prepared, tensorrt)" in draw(prepared) and "quantization: " in draw(prepared)


def test_aliased_values_and_segments():
    class Writes(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    gm = fuse_fx(Writes())
    root, groups, _ = parse(draw(gm))
    assert groups["x"].find(f"{SVG}rect").get("stroke-dasharray") and "shares memory: " in groups["x"][0].text
    assert "may share memory" in draw(gm) and "may share memory" not in draw(trace(nn.ReLU()))

    glue = trace(nn.ReLU(), leaves=[])
    outer = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    outer.add_submodule("segment_0", torch.fx.symbolic_trace(glue))
    next(n for n in outer.graph.nodes if n.op == "call_module").target = "segment_0"
    assert "segment" in parse(draw(outer))[2].values()
    assert root is not None


def test_names_are_escaped():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.relu, (x,))
    node.meta["source"] = ("/somewhere/<a & b>.py", 3)
    graph.output(node)
    svg = draw(torch.fx.GraphModule(nn.Module(), graph))
    assert "source: <a & b>.py:3" in parse(svg)[1]["relu"].find(f"{SVG}title").text
    assert "/somewhere" not in svg


def test_file(tmp_path):
    gm = trace(nn.ReLU())
    text = draw(gm, tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8") == text
    assert [p.name for p in tmp_path.iterdir()] == ["graph.svg"]
    with pytest.raises(ArtifactError, match=r"cannot write the drawing to .*missing"):
        draw(gm, tmp_path / "missing" / "graph.svg")


def random_graph(size, seed):
    generator = random.Random(seed)
    edges = {
        (generator.randrange(max(0, b - 12), b), b) for b in range(1, size) for _ in range(generator.randrange(0, 3))
    }
    return [generator.uniform(40, 200) for _ in range(size)], sorted(edges)


@pytest.mark.parametrize("size, seed", [(1, 0), (12, 1), (60, 2), (200, 3)])
def test_layout(size, seed):
    widths, edges = random_graph(size, seed)
    layout = lay_out(widths, edges, rows=20)
    boxes = layout.placed[:size]
    spots = {}
    for i, box in enumerate(boxes):
        spots.setdefault((box.column, box.row), []).append((box.x - widths[i] / 2, box.x + widths[i] / 2))
        left, right = layout.columns[box.column]
        assert left - 1e-6 <= box.x - widths[i] / 2 and box.x + widths[i] / 2 <= right + 1e-6
    for row in spots.values():
        row.sort()
        assert all(a[1] < b[0] for a, b in pairwise(row))
    for path, (a, b) in zip(layout.edges, edges, strict=True):
        assert (path[0], path[-1]) == (a, b)
        places = [(layout.placed[i].column, layout.placed[i].row) for i in path]
        for (column, row), (next_column, next_row) in pairwise(places):
            assert (next_column, next_row) in ((column, row + 1), (column + 1, 0))
    assert all(a[1] < b[0] for a, b in pairwise(layout.columns))
    assert layout.rows <= 25


def test_empty_graph():
    graph = torch.fx.Graph()
    graph.output(None)
    assert parse(draw(torch.fx.GraphModule(nn.Module(), graph)))[2] == {"output": "end"}
