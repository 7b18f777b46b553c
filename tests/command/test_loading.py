"""Models named by a string, their weights, and folders of images."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from torch import nn

from fx_passes.errors import BackendUnavailableError, InputError, LoweringError
from lowering.command.loading import load_model, load_weights, parse_shape
from lowering.request.images import IMAGENET_MEAN, IMAGENET_STD, ImageBatches, InputSpec, declared_input

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "my_net.py"
    path.write_text(
        textwrap.dedent(
            """
            import torch
            from my_layers import WIDTH

            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.fc = torch.nn.Linear(3, WIDTH)
                def forward(self, x):
                    return self.fc(x)

            def make():
                return Net()

            def wrong():
                return 3

            def broken():
                raise ValueError("no such width")

            def needs(width):
                return Net()

            instance = Net()
            """
        )
    )
    (tmp_path / "my_layers.py").write_text("WIDTH = 5\n")
    return path


@pytest.mark.parametrize("factory", ["make", "Net", "instance"])
def test_a_model_from_a_python_file(model_file, factory):
    model, declared = load_model(f"{model_file}:{factory}")
    assert model(torch.zeros(2, 3)).shape == (2, 5)
    assert not model.training
    assert declared is None


def test_a_python_file_leaves_the_search_path_as_it_was(model_file):
    before = list(sys.path)
    load_model(f"{model_file}:make")
    assert sys.path == before


def test_a_model_from_a_module_in_the_working_directory(model_file, monkeypatch):
    monkeypatch.chdir(model_file.parent)
    model, _ = load_model("my_net:make")
    assert type(model).__name__ == "Net"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("resnet50", "names no model"),
        ("torchvision:", "names no model"),
        (":resnet50", "names no model"),
        ("nowhere.py:make", "does not exist"),
        ("{file}:missing", "has no 'missing'"),
        ("{file}:wrong", "gives int, not an nn.Module"),
        ("{file}:broken", r"my_net\.py:broken' fails: ValueError: no such width \(my_net\.py:\d+: raise ValueError"),
        ("{file}:needs", "my_net.py:needs' fails: TypeError: .*width"),
        ("no_such_package.models:make", "no Python module"),
    ],
)
def test_a_name_that_means_nothing(model_file, spec, says):
    with pytest.raises(InputError, match=says) as caught:
        load_model(spec.format(file=model_file))
    assert caught.value.hint


def test_an_import_that_fails_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_net.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_model("broken_net:make")


@pytest.mark.parametrize(("package", "name"), [("torchvision", "resnet18"), ("timm", "resnet18")])
def test_a_zoo_that_is_not_installed(monkeypatch, package, name):
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself does to forbid an import
    with pytest.raises(BackendUnavailableError, match=f"{package} is not installed"):
        load_model(f"{package}:{name}")


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("torchvision:resnet18", InputSpec(crop=224 / 256)),
        ("torchvision:inception_v3", InputSpec(size=(3, 299, 299), crop=299 / 342)),
        ("torchvision:efficientnet_b1", InputSpec(size=(3, 240, 240), crop=240 / 256, interpolation="bicubic")),
        (
            "timm:efficientnet_lite0",
            InputSpec(interpolation="bicubic", crop=0.875),
        ),
    ],
    ids=["torchvision", "inception", "bicubic", "timm"],
)
def test_zoo_models_declare_their_input(spec, expected):
    pytest.importorskip(spec.split(":")[0])
    model, declared = load_model(spec)
    assert declared == expected
    assert not model.training


@pytest.mark.zoo
def test_detectors_do_not_fetch_a_backbone_and_declare_nothing():
    pytest.importorskip("torchvision")
    _, declared = load_model("torchvision:ssdlite320_mobilenet_v3_large")
    assert declared is None


@pytest.mark.zoo
def test_a_misspelt_zoo_name_gets_a_suggestion():
    pytest.importorskip("torchvision")
    with pytest.raises(InputError, match="resnet50"):
        load_model("torchvision:resnet5O")


@pytest.mark.zoo
def test_published_weights_come_from_the_cache_of_the_library(tmp_path, monkeypatch):
    torchvision = pytest.importorskip("torchvision")
    other = torchvision.models.squeezenet1_1()
    name = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rsplit("/", 1)[1]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(other.state_dict(), tmp_path / "hub" / "checkpoints" / name)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    model, _ = load_model("torchvision:squeezenet1_1", pretrained=True)
    assert torch.equal(model.features[0].weight, other.features[0].weight)


@pytest.mark.zoo
def test_published_weights_that_cannot_be_fetched(monkeypatch):
    torchvision = pytest.importorskip("torchvision")

    def refuse(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.models, "get_model", refuse)
    with pytest.raises(InputError, match="no route to host") as caught:
        load_model("torchvision:squeezenet1_1", pretrained=True)
    assert "--weights" in caught.value.hint


def test_only_a_zoo_publishes_weights(model_file):
    with pytest.raises(InputError, match="no published weights"):
        load_model(f"{model_file}:make", pretrained=True)


def save_safetensors(state, path):
    from safetensors.torch import save_file

    save_file(state, path)


FORMATS = {
    "safetensors": ("w.safetensors", save_safetensors),
    "state dict": ("w.pt", torch.save),
    "checkpoint": ("w.pth", lambda state, path: torch.save({"epoch": 3, "state_dict": state}, path)),
    "data parallel": ("w.pt", lambda state, path: torch.save({f"module.{k}": v for k, v in state.items()}, path)),
}


@pytest.mark.parametrize(("name", "write"), FORMATS.values(), ids=FORMATS)
def test_weights_are_loaded(tmp_path, name, write):
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    write(source.state_dict(), tmp_path / name)
    load_weights(target, tmp_path / name)
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


class Malicious:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (print, ("unpickled",))


BAD_WEIGHTS = {
    "missing": (None, "does not exist"),
    "a whole module": (lambda path: torch.save(nn.Linear(3, 2), path), "not a checkpoint of plain tensors"),
    "code in the pickle": (lambda path: torch.save({"w": Malicious()}, path), "not a checkpoint of plain tensors"),
    "no state dict": (lambda path: torch.save({"epoch": 3}, path), "holds no state dict"),
    "another shape": (lambda path: torch.save(nn.Linear(4, 2).state_dict(), path), "does not fit the model"),
    "other names": (lambda path: torch.save({"w": torch.zeros(2, 3)}, path), "does not fit the model"),
    "no file format": (lambda path: path.write_bytes(b"hello"), "not a checkpoint of plain tensors"),
    "empty": (lambda path: path.write_bytes(b""), "not a checkpoint of plain tensors"),
}


@pytest.mark.parametrize(("write", "says"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_weights_that_cannot_be_used(tmp_path, capsys, write, says):
    path = tmp_path / "w.pt"
    if write is not None:
        write(path)
    with pytest.raises(InputError, match=says):
        load_weights(nn.Linear(3, 2), path)
    assert "unpickled" not in capsys.readouterr().out


def test_a_safetensors_file_that_is_none(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"hello")
    with pytest.raises(InputError, match="not a safetensors file"):
        load_weights(nn.Linear(3, 2), path)


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("1x3x8x8", (1, 3, 8, 8), torch.float32),
        ("2,5", (2, 5), torch.float32),
        ("4:int64", (4,), torch.int64),
        ("2x2:bool", (2, 2), torch.bool),
        ("1x3:float16", (1, 3), torch.float16),
    ],
)
def test_shapes(text, shape, dtype):
    tensor = parse_shape(text)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert torch.equal(tensor, parse_shape(text))


@pytest.mark.parametrize("text", ["", "x", "3xa", "0x3", "-1x3", "3:nothing", "3:nn"])
def test_text_that_is_no_shape(text):
    with pytest.raises(InputError, match="is no shape"):
        parse_shape(text)


@pytest.fixture
def image_folder(tmp_path):
    folder = tmp_path / "images"
    (folder / "sub").mkdir(parents=True)
    for index in range(5):
        color = (index * 50, 100, 200)
        Image.new("RGB", (20 + index, 30), color).save(folder / ("sub" if index % 2 else ".") / f"{index}.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_a_folder_becomes_batches(image_folder):
    spec = InputSpec(size=(3, 8, 12))
    batches = ImageBatches(image_folder, spec, batch_size=2)
    shapes = [tuple(batch.shape) for batch in batches]
    assert shapes == [(2, 3, 8, 12), (2, 3, 8, 12), (1, 3, 8, 12)]
    assert len(batches) == 3
    assert torch.equal(torch.cat(list(batches)), torch.cat(list(batches)))  # iterated again, the same


def test_pixels_are_normalised(image_folder):
    spec = InputSpec(size=(3, 4, 4))
    first = next(iter(ImageBatches(image_folder, spec, batch_size=1)))
    expected = (torch.tensor([0.0, 100.0, 200.0]) / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    torch.testing.assert_close(first, expected.view(1, 3, 1, 1).expand(1, 3, 4, 4))


def test_a_limit_spreads_over_the_folder(image_folder):
    batches = ImageBatches(image_folder, InputSpec(), limit=2)
    assert [path.name for path in batches.paths] == ["0.png", "4.png"]  # of 0, 2, 4, sub/1, sub/3


def test_the_centre_is_cropped():
    image = Image.new("L", (100, 60), 0)
    image.paste(255, (40, 20, 60, 40))  # the middle 20 x 20
    spec = InputSpec(size=(1, 10, 10), mean=(0.0,), std=(1.0,), crop=1 / 3)
    assert torch.equal(spec.tensor(image), torch.ones(1, 1, 10, 10))
    assert spec.tensor(image, whole=True).mean() < 0.5


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "I;16"])
def test_any_image_mode_becomes_rgb(mode):
    assert InputSpec(size=(3, 4, 4)).tensor(Image.new(mode, (8, 8))).shape == (1, 3, 4, 4)


def test_folders_and_images_that_cannot_be_used(image_folder, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        ImageBatches(tmp_path / "nowhere", InputSpec())
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no image in"):
        ImageBatches(tmp_path / "empty", InputSpec())
    (image_folder / "a.jpg").write_bytes(b"not a picture")
    with pytest.raises(InputError, match=r"'a\.jpg' cannot be read"):
        list(ImageBatches(image_folder, InputSpec()))
    with pytest.raises(InputError, match="the model takes 9"):
        InputSpec(size=(9, 8, 8), mean=(0.0,) * 9, std=(1.0,) * 9).tensor(Image.new("RGB", (8, 8)))


def test_a_model_of_ones_own_declares_its_input_like_timms():
    model = nn.Linear(2, 2)
    assert declared_input(model) is None
    model.pretrained_cfg = {"input_size": (1, 28, 28), "mean": (0.5,), "std": (0.25,)}
    assert declared_input(model) == InputSpec(size=(1, 28, 28), mean=(0.5,), std=(0.25,))


def test_errors_are_of_one_family():
    assert issubclass(InputError, LoweringError)
    assert issubclass(BackendUnavailableError, LoweringError)


def test_a_vision_transformer_declares_the_size_that_it_was_built_for():
    """torchvision's ViT-H/14 takes 224 pixels unless it gets its weights, which were trained on 518."""
    from lowering.command.loading import _at_own_size
    from lowering.request.images import InputSpec

    preset = InputSpec(size=(3, 518, 518))
    built = torch.nn.Identity()
    assert _at_own_size(built, preset) == preset
    built.image_size = 224
    assert _at_own_size(built, preset).size == (3, 224, 224)
    assert _at_own_size(built, None) is None
