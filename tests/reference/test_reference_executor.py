"""Reading, running, checking and storing networks with the reference executor."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_net import Net, values

from fx_passes.errors import ArtifactError, InputError, UnsupportedOpError
from lowering.trt.reference import (
    ExecutionError,
    InferenceMismatchError,
    LayerRecord,
    NetworkRecord,
    ReferenceNetwork,
    TensorRecord,
)
from lowering.trt.reference.read import LAYER_CLASSES
from lowering.trt.reference.table import KERNELS

trt = pytest.importorskip("tensorrt_rtx")


def quantized_convolution(half: bool = False):
    """x → Q → DQ → convolution with an int8 kernel behind DQ → ReLU, and what it was made of."""
    net = Net()
    float_type = trt.float16 if half else trt.float32
    kernel = torch.randint(-127, 128, (4, 3, 3, 3), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    scales = torch.tensor([0.01, 0.02, 0.03, 0.04])
    x = net.input("x", -1, 3, 8, 8, dtype=torch.float16 if half else torch.float32)
    scale = net.constant(0.05)
    q = net.add_quantize(x, scale, trt.int8)
    q.get_output(0).name = "q"
    dq = net.add_dequantize(q.get_output(0), scale, float_type)
    weight = net.add_dequantize(net.constant(kernel, np.int8), net.constant(scales), float_type)
    weight.axis = 0
    conv = net.add_convolution_nd(dq.get_output(0), 4, (3, 3), trt.Weights(float_type))
    conv.set_input(1, weight.get_output(0))
    conv.name = "conv"
    conv.get_output(0).name = "conv_out"
    relu = net.add_activation(conv.get_output(0), trt.ActivationType.RELU)
    relu.get_output(0).name = "y"
    return net.finish(relu.get_output(0)), kernel.float() * scales.reshape(-1, 1, 1, 1)


def test_quantized_convolution():
    network, weight = quantized_convolution()
    x = values(2, 3, 8, 8) * 3
    want = F.relu(F.conv2d(torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127), weight))
    torch.testing.assert_close(network.run(x)[0], want, rtol=1e-5, atol=1e-5)


def test_quantize_rounds_half_to_even_and_saturates():
    network, _ = quantized_convolution()
    x = torch.zeros(1, 3, 8, 8)
    x[0, 0, 0, :6] = torch.tensor([0.125, 0.175, -0.125, 100.0, -100.0, 6.35])
    (q,) = network.run(x, outputs=["q"])
    assert q.dtype == torch.int8
    assert q[0, 0, 0, :6].tolist() == [2, 4, -2, 127, -128, 127]  # 2.5 → 2, 3.5 → 4


def test_half_layers_round_their_outputs_once():
    network, weight = quantized_convolution(half=True)
    x = (values(1, 3, 8, 8) * 3).half()
    conv, y = network.run(x, outputs=["conv_out", "y"])
    exact = F.conv2d(
        torch.fake_quantize_per_tensor_affine(x.float(), 0.05, 0, -128, 127).half().float(), weight.half().float()
    )
    assert conv.dtype == y.dtype == torch.float16
    torch.testing.assert_close(conv.float(), exact, rtol=2**-10, atol=1e-4)
    assert torch.equal(y, conv.relu())


def test_weights_are_folded_once():
    network, _ = quantized_convolution()
    network.run(values(1, 3, 8, 8))
    (plan,) = network._plans.values()
    assert [step.layer.type for step in plan.steps] == ["QUANTIZE", "DEQUANTIZE", "CONVOLUTION", "ACTIVATION"]


def test_overrides_feed_one_layer():
    network, weight = quantized_convolution()
    given = torch.randint(-10, 10, (1, 3, 8, 8), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    (got,) = network.run(outputs=["conv_out"], overrides={"q": given})
    torch.testing.assert_close(got, F.conv2d(given.float() * 0.05, weight))
    with pytest.raises(InputError, match=r"no value was given for the network inputs \['x'\]"):
        network.run(outputs=["conv_out"])


def test_outputs_share_no_memory():
    net = Net()
    x = net.input("x", 2, 3)
    shuffle = net.add_shuffle(x)
    shuffle.reshape_dims = (3, 2)
    constant = net.add_identity(net.constant([1.0, 2.0]))
    network = net.finish(shuffle.get_output(0), constant.get_output(0))
    given = values(2, 3)
    reshaped, fixed = network.run(given)
    reshaped.zero_()
    fixed.zero_()
    assert given.abs().min() > 0
    assert network.run(given)[1].tolist() == [1.0, 2.0]


def test_reading_survives_the_network():
    """The record copies the weights: NVIDIA's objects point into memory that is gone with its owner."""
    net = Net()
    kernel = np.ones((1, 1, 1, 1), np.float32)
    net.kept.append(kernel)
    conv = net.add_convolution_nd(net.input("x", 1, 1, 2, 2), 1, (1, 1), kernel)
    network = net.finish(conv.get_output(0))
    kernel[:] = 7
    del net, conv
    assert network.run(torch.ones(1, 1, 2, 2))[0].tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]


def test_bfloat16_weights_are_read():
    net = Net()
    raw = torch.tensor([1.5, -2.0, 0.0078125], dtype=torch.bfloat16)
    net.kept.append(raw)
    layer = net.add_constant((3,), trt.Weights(trt.bfloat16, raw.data_ptr(), 3))
    out = net.add_identity(layer.get_output(0))
    assert torch.equal(net.finish(out.get_output(0)).run()[0], raw)


def test_shared_weights_are_kept_once(tmp_path):
    net = Net()
    kernel = np.random.default_rng(0).random((3, 3, 1, 1), np.float32)
    copy = kernel.copy()
    net.kept += [kernel, copy]
    x = net.input("x", 1, 3, 4, 4)
    for weights in (kernel, kernel, copy):
        x = net.add_convolution_nd(x, 3, (1, 1), weights).get_output(0)
    network = net.finish(x)
    assert len(network.record.weights) == 2  # by address
    network.save(tmp_path)
    loaded = ReferenceNetwork.load(tmp_path)
    assert len(loaded.record.weights) == 1  # by content
    given = values(1, 3, 4, 4)
    assert torch.equal(loaded.run(given)[0], network.run(given)[0])


def test_stored_network_runs_without_tensorrt(tmp_path):
    network, _ = quantized_convolution(half=True)
    network.save(tmp_path / "net")
    x = values(1, 3, 8, 8).half()
    torch.save((x, network.run(x)[0]), tmp_path / "pair.pt")
    program = """
import sys, torch
sys.modules["tensorrt"] = sys.modules["tensorrt_rtx"] = None
from lowering.trt.reference import ReferenceNetwork
x, want = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(ReferenceNetwork.load(sys.argv[1]).run(x)[0], want)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "net"), str(tmp_path / "pair.pt")], check=True)


def test_record_survives_storing(tmp_path):
    net = Net()
    clip = net.add_activation(net.input("x", 2, -1), trt.ActivationType.CLIP)
    clip.alpha, clip.beta = 0.0, float("inf")
    clip.metadata = "[fx_node]"
    network = net.finish(clip.get_output(0))
    network.save(tmp_path)
    loaded = ReferenceNetwork.load(tmp_path).record
    assert (loaded.name, loaded.inputs, loaded.outputs) == (
        network.record.name,
        network.record.inputs,
        network.record.outputs,
    )
    assert loaded.layers == network.record.layers
    assert loaded.tensors == network.record.tensors


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "network.json").write_text('{"format": 1'), "no readable network"),
        (lambda folder: (folder / "network.safetensors").write_bytes(b"\x00" * 20), "no readable network"),
        (lambda folder: (folder / "network.safetensors").unlink(), "no readable network"),
        (lambda folder: (folder / "network.json").write_text('{"format": 99}'), "not a network of format 1"),
        (lambda folder: edit(folder, lambda data: data["tensors"].pop()), "is damaged"),
        (lambda folder: edit(folder, lambda data: data["layers"][0].pop("inputs")), "is damaged"),
        (lambda folder: edit(folder, lambda data: data.update(layers=3)), "is damaged"),
    ],
    ids=["truncated", "garbage", "no_weights", "format", "lost_tensor", "lost_key", "wrong_type"],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    network, _ = quantized_convolution()
    network.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        ReferenceNetwork.load(tmp_path)


def edit(folder, change):
    data = json.loads((folder / "network.json").read_text())
    change(data)
    (folder / "network.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 3, 8, 9),), r"'x' has the shape \(-1, 3, 8, 8\) in the network, but \(1, 3, 8, 9\) was given"),
        ((torch.zeros(1, 3, 8, 8).double(),), "'x' is torch.float32 in the network, but a torch.float64 was given"),
        ((torch.zeros(1, 3, 8, 8), torch.zeros(1)), "takes 1 inputs, 2 were given"),
        ((), "no value was given"),
        (([1.0],), "is a list, not a tensor"),
    ],
    ids=["shape", "dtype", "count", "none", "type"],
)
def test_bad_inputs_are_refused(arguments, message):
    network, _ = quantized_convolution()
    with pytest.raises(InputError, match=message):
        network.run(*arguments)


def test_unknown_names_are_refused():
    network, _ = quantized_convolution()
    with pytest.raises(InputError, match="no tensor 'nowhere'"):
        network.run(outputs=["nowhere"])
    with pytest.raises(InputError, match="no tensor 'nowhere' to override"):
        network.run(overrides={"nowhere": torch.zeros(1)})


def hand_made(attributes, **shapes):
    """A record of one ReLU or elementwise layer, with whatever inference the caller wants it to contradict."""
    tensors = {name: TensorRecord(name, shape, dtype) for name, (shape, dtype) in shapes.items()}
    inputs = tuple(name for name in shapes if name != "y")
    layer = LayerRecord("op", "ELEMENTWISE", inputs, ("y",), attributes)
    return ReferenceNetwork(NetworkRecord("n", inputs, ("y",), (layer,), tensors, {}))


def test_shape_that_contradicts_inference_is_an_error():
    network = hand_made({"op": "SUM"}, a=((2, 1), "FLOAT"), b=((2, 3), "FLOAT"), y=((2, 4), "FLOAT"))
    with pytest.raises(InferenceMismatchError, match=r"'op' \(ELEMENTWISE\) gave tensor 'y' the shape \(2, 3\)"):
        network.run(torch.zeros(2, 1), torch.zeros(2, 3))


def test_type_that_contradicts_inference_is_an_error():
    network = hand_made({"op": "EQUAL"}, a=((2,), "FLOAT"), b=((2,), "FLOAT"), y=((2,), "FLOAT"))
    with pytest.raises(InferenceMismatchError, match=r"gives the types \('BOOL',\), TensorRT infers \('FLOAT',\)"):
        network.run(torch.zeros(2), torch.zeros(2))


def test_mixed_types_are_refused():
    network = hand_made({"op": "SUM"}, a=((2,), "FLOAT"), b=((2,), "HALF"), y=((2,), "FLOAT"))
    with pytest.raises(UnsupportedOpError, match=r"'op' \(ELEMENTWISE\): it mixes the types \['FLOAT', 'HALF'\]"):
        network.run(torch.zeros(2), torch.zeros(2).half())


def test_failing_layer_is_named():
    network = hand_made({"op": "SUM"}, a=((-1,), "FLOAT"), b=((-1,), "FLOAT"), y=((-1,), "FLOAT"))
    with pytest.raises(
        ExecutionError, match=r"layer 'op' \(ELEMENTWISE\) failed on inputs of shapes \[\(2,\), \(3,\)\]"
    ):
        network.run(torch.zeros(2), torch.zeros(3))


def test_dynamic_shapes():
    """Reshape to (batch, channels · height, width), the sizes read at run time; the padding too."""
    net = Net()
    x = net.input("x", -1, 3, -1, 5)
    shape = net.add_shape(x).get_output(0)
    sizes = [net.add_slice(shape, (i,), (1,), (1,)).get_output(0) for i in range(4)]
    merged = net.add_elementwise(sizes[1], sizes[2], trt.ElementWiseOperation.PROD).get_output(0)
    shuffle = net.add_shuffle(x)
    shuffle.set_input(1, net.add_concatenation([sizes[0], merged, sizes[3]]).get_output(0))
    network = net.finish(shuffle.get_output(0))
    for batch, height in ((1, 2), (4, 7)):
        given = values(batch, 3, height, 5)
        assert torch.equal(network.run(given)[0], given.reshape(batch, 3 * height, 5))


def test_dynamic_fill_and_slice():
    net = Net()
    x = net.input("x", -1)
    length = net.add_shape(x).get_output(0)
    ramp = net.add_fill((1,), trt.FillOperation.LINSPACE, trt.float32)
    ramp.set_input(0, length)
    ramp.set_input(1, net.constant(2.0))
    ramp.set_input(2, net.constant([0.5]))
    halved = net.add_elementwise(length, net.constant([2], np.int64), trt.ElementWiseOperation.FLOOR_DIV).get_output(0)
    head = net.add_slice(x, (0,), (1,), (1,))
    head.set_input(2, halved)
    network = net.finish(ramp.get_output(0), head.get_output(0))
    given = values(5)
    filled, first = network.run(given)
    assert filled.tolist() == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert torch.equal(first, given[:2])


def test_assertions_are_checked():
    net = Net()
    x = net.input("x", -1)
    enough = net.add_elementwise(
        net.add_shape(x).get_output(0), net.constant([2], np.int64), trt.ElementWiseOperation.GREATER
    )
    net.add_assertion(enough.get_output(0), "more than two elements")
    network = net.finish(net.add_identity(x).get_output(0))
    assert network.run(values(3))[0].shape == (3,)
    with pytest.raises(ExecutionError, match="more than two elements"):
        network.run(values(2))


def test_loop_counts_and_stops():
    """Doubles until the sum passes 20 or 10 rounds are done."""
    net = Net()
    x = net.input("x", 1)
    loop = net.add_loop()
    state = loop.add_recurrence(x)
    value = state.get_output(0)
    scalar = net.add_shuffle(value)
    scalar.reshape_dims = ()
    small = net.add_elementwise(scalar.get_output(0), net.constant(20.0), trt.ElementWiseOperation.LESS)
    loop.add_trip_limit(small.get_output(0), trt.TripLimit.WHILE)
    loop.add_trip_limit(net.constant(10, np.int32), trt.TripLimit.COUNT)
    doubled = net.add_elementwise(value, value, trt.ElementWiseOperation.SUM).get_output(0)
    state.set_input(1, doubled)
    network = net.finish(loop.add_loop_output(value, trt.LoopOutput.LAST_VALUE, 0).get_output(0))
    assert network.run(torch.tensor([3.0]))[0].tolist() == [24.0]
    assert network.run(torch.tensor([0.001]))[0].item() == pytest.approx(1.024)
    assert network.run(torch.tensor([50.0]))[0].tolist() == [50.0]


def test_conditional_runs_one_branch():
    net = Net()
    x = net.input("x", 2)
    flag = net.input("flag", dtype=torch.bool)
    conditional = net.add_if_conditional()
    conditional.set_condition(flag)
    inside = conditional.add_input(x).get_output(0)
    yes = net.add_unary(inside, trt.UnaryOperation.NEG).get_output(0)
    no = net.add_unary(inside, trt.UnaryOperation.ABS).get_output(0)
    network = net.finish(conditional.add_output(yes, no).get_output(0))
    given = torch.tensor([-1.0, 2.0])
    assert network.run(given, torch.tensor(True))[0].tolist() == [1.0, -2.0]
    assert network.run(given, torch.tensor(False))[0].tolist() == [1.0, 2.0]


def test_tables_are_total():
    """Every layer type of the bindings has a class to be read as, with its attributes, and a kernel or a refusal."""
    types = set(trt.LayerType.__members__)
    assert set(LAYER_CLASSES) == types
    assert set(KERNELS) == types
    for name, how in LAYER_CLASSES.items():
        cls = getattr(trt, how.name)
        missing = [attribute for attribute in (*how.attributes, *how.weights) if not hasattr(cls, attribute)]
        assert not missing, name


def test_every_property_of_a_layer_is_recorded():
    """What the reader leaves out is listed here, so that a property which a new version adds is noticed."""
    left_out = {"padding_nd", "block_shape", "plugin", "update_lengths"}
    for name, how in LAYER_CLASSES.items():
        if name in ("MOE", "PLUGIN", "PLUGIN_V2", "PLUGIN_V3", "DIST_COLLECTIVE"):
            continue
        cls = getattr(trt, how.name)
        own = {attribute for attribute in dir(cls) if not attribute.startswith("_")} - set(dir(trt.ILayer))
        own = {attribute for attribute in own if not attribute.startswith("set_")}
        assert own - left_out <= {*how.attributes, *how.weights}, name
