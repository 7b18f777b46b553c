"""placement="auto": what it keeps in int8, within which limits, and what it says."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import convert_fx, prepare_calibration_fx, wrap
from fx_passes.errors import CalibrationError, InputError
from fx_passes.fuse.attention import write_out_attention
from fx_passes.fuse.fuse import fuse_fx
from fx_passes.quantize.accuracy.layer_error import layer_errors
from fx_passes.quantize.accuracy.meter import measured_nodes, measured_values
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.calibrated import float_reference
from fx_passes.quantize.place.overrides import Decision, decide
from fx_passes.quantize.prepare import observers_of
from fx_passes.quantize.ranges.observers import MinMaxObserver
from lowering import lower_to_trt
from lowering.command.options import Target
from lowering.compare import sqnr
from lowering.placement.search import search_placement, widened
from lowering.placement.units import Unit, bearable
from lowering.request.search import PlacementSearch
from lowering.roofline import gpu_named
from lowering.summary import placement_text
from lowering.trt.builder.layers import LayerReport

IMAGES = torch.randn(2, 16, 7, 7, generator=torch.Generator().manual_seed(0))
# Little bandwidth: 2.4 MB of weights take 8.7 us from its memory in int8, and twice that in fp16; a launch takes 2 us.
SLOW = PlacementSearch(gpu="RTX 4060", builds=6, samples=2)


class Net(nn.Module):
    """Narrow layers that only lose by int8 (a launch for the quantization), and wide ones whose weights dominate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 512, 1), nn.ReLU())
        self.wide1 = nn.Conv2d(512, 512, 3, padding=1)
        self.wide2 = nn.Conv2d(512, 512, 3, padding=1)
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide2(torch.relu(self.wide1(self.narrow(x))))
        return self.head(F.relu(x).mean((2, 3)))


@pytest.fixture(scope="module")
def placed():
    model = Net().eval()
    return model, lower_to_trt(model, IMAGES, calibration=[IMAGES], placement=SLOW)


def test_wide_layers_are_int8_and_narrow_ones_float(placed) -> None:
    _, lowered = placed
    placement = lowered.report()["placement"]
    int8 = {name for name, decision in placement["decisions"].items() if decision["int8"]}
    assert int8 == {"wide1", "wide2"}
    assert (placement["int8_layers"], placement["layers"], placement["gpu"]) == (2, 5, "RTX 4060")
    assert 3 <= placement["builds"] <= SLOW.builds
    reasons = {decision["reason"] for name, decision in placement["decisions"].items() if name not in int8}
    assert reasons == {"int8 does not lower the roofline floor on RTX 4060"}


def test_the_floor_is_below_that_of_both_extremes(placed) -> None:
    _, lowered = placed
    floors = {name: floor["total_us"] for name, floor in lowered.report()["placement"]["floors"].items()}
    assert floors["placed"] < floors["float"]
    assert floors["placed"] <= floors["int8 wherever possible"]
    # The engine that came out is the one that was searched: 2 of 5 layers.
    engine = lowered.report()["segments"][0]["engines"][0]
    assert (engine["int8_compute"], engine["float_compute"]) == (2, 3)


def test_the_outputs_keep_the_accuracy(placed) -> None:
    model, lowered = placed
    placement = lowered.report()["placement"]
    with torch.no_grad():
        found = sqnr(model(IMAGES), lowered.simulate(IMAGES))
    assert placement["sqnr_db"] >= SLOW.sqnr_db
    assert found > 0.9 * placement["sqnr_db"]  # the float part is fp16 here


def test_the_summary_says_what_was_searched(placed) -> None:
    text = placed[1].summary()
    assert "Placement searched for RTX 4060" in text
    assert "2 of 5 layers in int8" in text
    assert "roofline floor (no measurement)" in text
    assert "int8 does not lower the roofline floor on RTX 4060" in text


def prepared_net(**options) -> torch.fx.GraphModule:
    prepared = prepare_calibration_fx(Net(), IMAGES, qconfig={"": options})
    calibrate(prepared, [IMAGES])
    return prepared


class Costs:
    """Stands for a builder: launches, and weights of the float and of the int8 layers, without building anything."""

    def __init__(self, saved: dict[str, float]):
        self.saved = saved
        self.seen: list[frozenset[str]] = []

    def __call__(self, name: str, program) -> LayerReport:
        int8 = {
            str(user.meta["fx_node"])
            for node in program.call_nodes()
            if "dequantize_per_tensor" in str(node.target) and len(node.all_input_nodes[0].users) == 1
            for user in node.users
        } & set(self.saved)
        self.seen.append(frozenset(int8))
        rows = []
        for layer, saved in self.saved.items():
            size = round(272e9 * (50e-6 - (saved * 1e-6 if layer in int8 else 0.0)))  # bytes of so many us
            rows.append(
                {"name": layer, "modules": [layer], "inputs": ["Half[1]"], "int8": False, "operations": 0,
                 "reads": [], "constants": [[layer, size]], "writes": []}
            )  # fmt: skip
        return LayerReport(len(rows), len(int8), len(rows) - len(int8), 0, 0, 0, rows=rows)


LAYERS = ("narrow_0", "narrow_2", "wide1", "wide2", "head")


def search(saved: dict[str, float], wish: PlacementSearch = SLOW):
    from benchmarks.program import as_program

    prepared = prepared_net()
    costs = Costs(saved)
    program = as_program(convert_fx(prepared), IMAGES)
    return search_placement(prepared, {"s": program}, costs, [IMAGES], wish, gpu_named("RTX 4060")), costs


def test_what_gains_is_chosen_and_nothing_else() -> None:
    found, _ = search({"narrow_0": -3.0, "narrow_2": 1.0, "wide1": 2.0, "wide2": 2.0, "head": -1.0})
    assert {name for name, decision in found.decisions.items() if decision.int8} == {"narrow_2", "wide1", "wide2"}
    assert found.float_floor.total_us - found.floor.total_us == pytest.approx(5.0, abs=1e-3)


def test_where_nothing_gains_the_model_stays_float() -> None:
    found, _ = search(dict.fromkeys(LAYERS, -1.0))
    assert found.int8_layers == 0
    assert found.floor == found.float_floor
    assert math.isinf(found.sqnr_db)
    assert found.as_dict()["sqnr_db"] is None


def test_the_noise_limit_takes_layers_back() -> None:
    gains = dict.fromkeys(LAYERS, 1.0)
    everything, _ = search(gains)
    assert everything.int8_layers == len(LAYERS)
    limit = everything.sqnr_db + 3.0
    fewer, _ = search(gains, PlacementSearch(gpu="RTX 4060", builds=6, samples=2, sqnr_db=limit))
    assert 0 < fewer.int8_layers < len(LAYERS)
    assert fewer.sqnr_db >= limit
    reasons = {decision.reason for decision in fewer.decisions.values() if not decision.int8}
    assert reasons == {f"with it the outputs are less than {limit:g} dB above the noise"}
    none, _ = search(gains, PlacementSearch(gpu="RTX 4060", builds=6, samples=2, sqnr_db=200.0))
    assert none.int8_layers == 0
    assert {decision.reason for decision in none.decisions.values()} == {
        "with it the outputs are less than 200 dB above the noise"
    }
    assert "does not lower the roofline floor within 200 dB" in placement_text(none.as_dict(), "fp16")[0]


def test_no_more_engines_than_allowed_and_the_same_each_time() -> None:
    gains = {"narrow_0": -3.0, "narrow_2": 1.0, "wide1": 2.0, "wide2": 2.0, "head": -1.0}
    first, costs = search(gains, PlacementSearch(gpu="RTX 4060", builds=3, samples=2))
    assert len(costs.seen) == first.builds <= 4  # one more for what the accuracy limit leaves
    again, _ = search(gains, PlacementSearch(gpu="RTX 4060", builds=3, samples=2))
    assert first.as_dict() == again.as_dict()


def test_no_data_is_an_error() -> None:
    from benchmarks.program import as_program

    prepared = prepared_net()
    program = as_program(convert_fx(prepared), IMAGES)
    with pytest.raises(CalibrationError, match="no calibration data"):
        search_placement(prepared, {"s": program}, Costs({}), [], SLOW, gpu_named("L4"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "fast"}, "placement is 'fast'"),
        ({"placement": "auto", "precision": "fp16"}, "places nothing in int8"),
        ({"placement": "auto", "dry_run": True}, "a dry run builds nothing"),
    ],
)
def test_wrong_wishes_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lower_to_trt(nn.Sequential(nn.Conv2d(3, 4, 1)), torch.zeros(1, 3, 4, 4), **arguments)


@pytest.mark.parametrize("wish", [{"gpu": "GTX 1"}, {"builds": 2}, {"samples": 0}])
def test_wrong_limits_are_refused(wish: dict) -> None:
    with pytest.raises(InputError):
        PlacementSearch(**wish)


def test_decisions_change_a_calibrated_graph_and_nothing_else() -> None:
    prepared = prepared_net()
    decisions = {"wide1": Decision(False, "no gain"), "head": Decision(True, "gains", "per_channel")}
    placed = decide(prepared, decisions)
    before, after = convert_fx(prepared), convert_fx(placed)
    assert after.get_buffer("head.weight_scale").shape == (10,)
    assert after.get_submodule("wide1").weight.dtype == torch.float32
    assert before.get_buffer("wide1.weight").dtype == torch.int8
    assert {n.name: n.meta["quantization"].reason for n in after.graph.nodes if n.name in decisions} == {
        "wide1": "no gain", "head": "gains",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("decisions", "message"),
    [({"nowhere": Decision(False, "")}, "no node"), ({"relu": Decision(True, "")}, "stays float")],
)
def test_decisions_about_other_nodes_are_refused(decisions: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decide(prepared_net(), decisions)


def test_estimated_noise_is_that_of_the_layer_alone() -> None:
    prepared = prepared_net(bias_correction=False)  # which takes back the error's mean, so the estimate leaves it in
    errors = layer_errors(prepared, IMAGES)
    expected = float_reference(prepared)(IMAGES).detach()
    assert set(errors) == set(LAYERS)
    for name in LAYERS:
        alone = {other: Decision(other == name, "alone", errors[name].weight) for other in LAYERS}
        found = sqnr(expected, convert_fx(decide(prepared, alone))(IMAGES).detach())
        # Six random directions: the estimate is within a few dB (chi-squared with 6 degrees of freedom).
        assert -10 * math.log10(errors[name].noise) == pytest.approx(found, abs=8.0), name


class Attention(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options, self.qkv, self.out = options, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


TOKENS = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}])
def test_attention_is_written_out_with_its_values(options: dict) -> None:
    fused = fuse_fx(Attention(**options), TOKENS)
    graph, products = write_out_attention(fused)
    assert [len(pair) for pair in products] == [2]
    assert not [n for n in graph.graph.nodes if "scaled_dot" in str(n.target)]
    torch.testing.assert_close(graph(TOKENS), fused(TOKENS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}])
def test_masked_attention_stays(options: dict) -> None:
    fused = fuse_fx(Attention(**options), TOKENS)
    assert write_out_attention(fused)[1] == []


def test_products_of_an_attention_are_quantized_unless_kept_float() -> None:
    fused = fuse_fx(Attention(), TOKENS)
    for wish, int8 in ((None, True), ({"": None, "qkv": {"dtype": "int8"}}, False)):
        graph, config = widened(fused, wish)
        prepared = prepare_calibration_fx(graph, TOKENS, qconfig=config)
        placed = {n.name: n.meta["quantization"].quantized for n in prepared.graph.nodes if "matmul" in str(n.target)}
        assert len(placed) == 2
        assert set(placed.values()) == {int8}
        observers = {name: type(observer) for name, observer in observers_of(prepared).items() if "weights" in name}
        assert list(observers.values()) == [MinMaxObserver] * int8


class Counting(Net):
    """Ends in Python, which returns no tensor."""

    def forward(self, x: torch.Tensor) -> list[int]:
        return self.largest(super().forward(x))

    @wrap
    def largest(self, scores: torch.Tensor) -> list[int]:
        return [int(i) for i in scores.numpy().argmax(1)]


def test_accuracy_is_measured_before_python() -> None:
    prepared = prepare_calibration_fx(Counting().eval(), IMAGES)
    calibrate(prepared, [IMAGES])
    (name,) = measured_nodes(prepared.graph)
    assert name == "head"
    assert measured_values(float_reference(prepared), IMAGES, [name]).shape == (20,)
    assert all(error.noise > 0.0 for error in layer_errors(prepared, IMAGES).values())


def test_a_dynamic_batch_is_searched_at_its_usual_size() -> None:
    wish = PlacementSearch(gpu="RTX 4060", builds=3, samples=2)
    lowered = lower_to_trt(Net().eval(), IMAGES, calibration=[IMAGES], placement=wish, dynamic_batch=(1, 2, 4))
    report = lowered.report()
    assert report["placement"]["int8_layers"] == 2
    assert report["segments"][0]["engines"][0]["kernels"] == report["placement"]["floors"]["placed"]["kernels"]
    assert lowered.simulate(torch.cat([IMAGES, IMAGES[:1]])).shape == (3, 10)


def test_the_command_lines_wishes() -> None:
    assert Target().search() == "default"
    assert Target(placement="auto").search() == "auto"
    assert Target(placement="auto", gpu="L4").search() == PlacementSearch(gpu="L4")
    with pytest.raises(InputError, match="add --placement auto"):
        Target(gpu="L4").search()


def test_groups_that_are_too_noisy_by_themselves_are_never_tried() -> None:
    loud = [Unit({name: None}, ("product",), noise=0.015, gain=9.0) for name in ("a", "b")]  # 0.03 together
    quiet = Unit({"c": "per_tensor"}, ("linear",), noise=0.019)
    assert bearable([*loud, quiet], 20.0) == [quiet]  # 20 dB are a noise of 0.01; the estimate may be twice that
    assert bearable([*loud, quiet], 15.0) == [*loud, quiet]
