"""QConfig: whose options win, what is refused, and the same from a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reported_cases import image
from torch import nn
from torch.fx import GraphModule

from fx_passes import convert_fx, prepare_calibration_fx
from fx_passes.errors import InputError
from fx_passes.quantize.calibrate import calibrate
from fx_passes.quantize.qconfig import QConfig

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("error")


def converted_for(model: nn.Module, **options: Any) -> GraphModule:
    prepared = prepare_calibration_fx(model, target="tensorrt", **options)
    calibrate(prepared, [image()])
    return convert_fx(prepared)


CONFIGURATIONS: dict[str, tuple[dict[Any, Any], set[str]]] = {
    # configuration, layers that end up int8 (of 0, 3, 5, 6 below)
    "default": ({}, {"0.0", "0.2", "1", "2"}),
    "global_off": ({"": None, nn.Linear: {"dtype": "int8"}}, {"2"}),
    "type": ({nn.Linear: None}, {"0.0", "0.2", "1"}),
    "type_by_name": ({"type:Linear": None}, {"0.0", "0.2", "1"}),
    "type_by_public_name": ({"type:torch.nn.Linear": None}, {"0.0", "0.2", "1"}),
    "name_wins_over_named_type": ({"type:Conv2d": None, "0.2": {"dtype": "int8"}}, {"0.2", "2"}),
    "name_of_a_parent": ({"0": None}, {"1", "2"}),
    "name_wins_over_type": ({nn.Conv2d: None, "0.2": {"dtype": "int8"}}, {"0.2", "2"}),
    "name_wins_over_pattern": ({"0.*": None, "0.2": {"dtype": None}}, {"0.2", "1", "2"}),
    "pattern": ({"0.*": None}, {"1", "2"}),
    "inner_name_wins": ({"0": None, "0.0": {}}, {"0.0", "1", "2"}),
}


def nested_net() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    return nn.Sequential(block, nn.Conv2d(4, 4, 1), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration(name):
    config, expected = CONFIGURATIONS[name]
    converted = converted_for(nested_net(), qconfig=config)
    int8 = {k.removesuffix(".weight") for k, v in converted.state_dict().items() if v.dtype == torch.int8}
    assert int8 == expected


def test_attribute_on_the_module_wins():
    model = nested_net()
    model[1].qconfig = None
    converted = converted_for(model, qconfig={"1": {"dtype": "int8"}})
    assert converted.get_parameter("1.weight").dtype == torch.float32


def test_function_has_the_configuration_of_the_module_that_calls_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))

        def forward(self, x):
            return F.conv2d(x, self.weight)

    model = nn.Sequential(Block(), nn.Conv2d(4, 4, 1)).eval()
    converted = converted_for(model, qconfig={"0": None})
    assert [k for k, v in converted.state_dict().items() if v.dtype == torch.int8] == ["1.weight"]


BAD_CONFIGURATIONS: dict[str, tuple[dict[Any, Any], str]] = {
    "unknown_option": ({"": {"observr": "minmax"}}, "did you mean 'observer'"),
    "unknown_value": ({"": {"weight": "per_row"}}, "per_channel"),
    "unknown_observer": ({"": {"observer": "magic"}}, "minmax"),
    "unknown_name": ({"0.00": None}, "did you mean '0.0'"),
    "unknown_type": ({nn.LSTM: None}, "has no LSTM"),
    "unknown_type_by_name": ({"type:LSTM": None}, "has no LSTM"),
    "unmatched_pattern": ({"stem.*": None}, "matches no module"),
    "smooth_too_strong": ({"": {"smooth": 1.5}}, "from 0 to 1"),
    "no_place": ({3: None}, "no place"),
    "no_options": ({"": 8}, "int"),
}


@pytest.mark.parametrize("name", BAD_CONFIGURATIONS)
def test_bad_configuration(name):
    config, text = BAD_CONFIGURATIONS[name]
    with pytest.raises(InputError, match=text):
        prepare_calibration_fx(nested_net(), qconfig=config)


FILED: dict[Any, Any] = {
    "": {"observer": "percentile:99.9", "smooth": 0.5, "rounding": "learned"},
    nn.Linear: {"weight": "per_tensor", "smooth": None},
    "type:Conv2d": {"equalize": True},
    "0.*": None,
    'a "quoted" \\ name': {"bias_correction": False, "weight_observer": "mse"},
}


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_file_gives_back_what_was_written(tmp_path, suffix):
    path = tmp_path / f"int8{suffix}"
    QConfig(FILED).to_file(path)
    assert QConfig.from_file(path).as_dict() == QConfig(FILED).as_dict()


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_file_configures_as_the_mapping_does(tmp_path, suffix):
    path = tmp_path / f"int8{suffix}"
    QConfig({nn.Linear: None, "0.*": None, "0.2": {"dtype": "int8"}}).to_file(path)
    converted = converted_for(nested_net(), qconfig=str(path))
    int8 = {k.removesuffix(".weight") for k, v in converted.state_dict().items() if v.dtype == torch.int8}
    assert int8 == {"0.2", "1"}


BAD_FILES = {
    "int8.toml": ('["head"]\nobservr = "minmax"', "did you mean 'observer'"),
    "cut.toml": ('["head"', "no valid TOML"),
    "cut.json": ('{"head": ', "no valid JSON"),
    "list.json": ("[1]", "one table for each place"),
    "option.toml": ("observer = 'minmax'", "the options of 'observer' are a str"),
    "int8.yaml": ("head: {}", "use a .toml or a .json file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(tmp_path, name):
    text, message = BAD_FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        QConfig.from_file(tmp_path / name)


def test_missing_file():
    with pytest.raises(InputError, match="cannot be read"):
        QConfig.from_file("no_such_file.toml")


def test_merging_unites_options():
    merged = QConfig({"": {"observer": "mse"}, "head": None}).merged(
        {"": {"equalize": True}, "head": {"dtype": "int8"}}
    )
    assert merged.as_dict() == {"": {"observer": "mse", "equalize": True}, "head": {"dtype": "int8"}}
