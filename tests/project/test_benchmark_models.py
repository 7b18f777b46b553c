"""The models and photographs that benchmarks and tests are built on."""

from __future__ import annotations

import pytest
import torch

from lowering.request.images import InputSpec

models = pytest.importorskip("benchmarks.models")
pytestmark = pytest.mark.zoo

FACTORIES = {
    "resnet50": (models.resnet50, (1, 1000)),
    "mobilenet_v2": (models.mobilenet_v2, (1, 1000)),
    "efficientnet_lite0": (models.efficientnet_lite0, (1, 1000)),
    "painting_actor": (models.painting_actor, (1, 65)),
    "deep_recommender": (models.deep_recommender, (1, 17768)),
}


@pytest.mark.parametrize(("factory", "shape"), FACTORIES.values(), ids=FACTORIES)
def test_models_give_a_signal_to_quantize(factory, shape):
    """Not the 1e-9 that a random network with unsettled BatchNorm statistics ends in."""
    before = torch.random.get_rng_state()
    model = factory()
    assert torch.equal(torch.random.get_rng_state(), before)
    inputs = torch.rand(1, 17768) if shape[1] == 17768 else models.input_of(model).example()
    with torch.no_grad():
        outputs = model(inputs)
    assert outputs.shape == shape
    assert not any(module.training for module in model.modules())
    assert 0.05 < float(outputs.std()) < 10


def test_models_are_the_same_every_time():
    first, second = models.mobilenet_v2().state_dict(), models.mobilenet_v2().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_settling_changes_statistics_only():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
    weight = net[0].weight.clone()
    batches = [torch.randn(2, 3, 8, 8) * 5 + 1 for _ in range(3)]
    models.settle_batch_norm(net, batches)
    values = torch.cat([net[0](batch) for batch in batches]).detach()
    assert not net.training
    assert net[1].momentum == 0.1
    assert torch.equal(net[0].weight, weight)
    torch.testing.assert_close(net[1].running_mean, values.mean((0, 2, 3)), rtol=1e-4, atol=1e-4)
    # The mean of the batches' own variances, each about its own mean: within a few percent of the variance of all.
    torch.testing.assert_close(net[1].running_var, values.var((0, 2, 3)), rtol=0.1, atol=0.1)


def test_photographs_show_what_they_should():
    photographs = pytest.importorskip("benchmarks.photographs")
    pytest.importorskip("skimage")
    model = models.efficientnet_lite0()
    names = models.categories()
    assert len(names) == 1000
    for crop in photographs.held_out_crops(models.input_of(model), per_photograph=1):
        expected = photographs.PHOTOGRAPHS[next(f for f in photographs.PHOTOGRAPHS if f.startswith(crop.name[:-2]))]
        if expected is not None:
            with torch.no_grad():
                top5 = [names[i] for i in model(crop.pixels)[0].topk(5).indices.tolist()]
            assert any(expected in name for name in top5), (crop.name, top5)


def test_crops_for_calibration_are_not_those_for_testing():
    photographs = pytest.importorskip("benchmarks.photographs")
    pytest.importorskip("skimage")
    spec = InputSpec(size=(3, 32, 32))
    held_out = photographs.held_out_crops(spec, per_photograph=7)
    calibration = photographs.calibration_crops(spec, per_photograph=7)
    assert len(held_out) == len(calibration) == 7 * len(photographs.PHOTOGRAPHS)
    assert len({crop.name for crop in held_out + calibration}) == len(held_out) + len(calibration)
    for crop in held_out:
        distance = min(float((crop.pixels - other.pixels).abs().mean()) for other in calibration)
        assert distance > 0.01, crop.name
    again = photographs.calibration_crops(spec, per_photograph=7)
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(calibration, again, strict=True))


def test_batches_hold_every_crop_once():
    photographs = pytest.importorskip("benchmarks.photographs")
    pytest.importorskip("skimage")
    batches = photographs.calibration_batches(InputSpec(size=(3, 8, 8)), per_photograph=2, batch_size=4)
    sizes = [len(batch) for batch in batches]
    assert sum(sizes) == 2 * len(photographs.PHOTOGRAPHS)
    assert len(sizes) == len(batches)
    assert set(sizes[:-1]) == {4}


def test_spreading_the_channels_keeps_the_function_and_unequals_the_ranges():
    from benchmarks import digits

    torch.manual_seed(0)
    model = digits.DigitSeparable(width=8)
    models.settle_batch_norm(model, [torch.randn(8, 1, 16, 16)])
    images = torch.randn(4, 1, 16, 16)
    before = model(images)
    digits.spread_channels(model)
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-5)
    scales = model.stem[1].weight.abs()
    assert scales.max() / scales.min() > 10


def test_predictions_of_a_last_batch_that_is_smaller():
    from benchmarks.digits import predictions

    images = torch.eye(5)[[3, 1, 4]]
    seen = []
    found = predictions(lambda batch: seen.append(len(batch)) or batch, images, batch=2)
    assert found.tolist() == [3, 1, 4]
    assert seen == [2, 2]
