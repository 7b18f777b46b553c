"""Right answers on labelled folders, from Python and from the command line."""

from __future__ import annotations

import pytest
import torch

from fx_passes.errors import InputError
from lowering.command.cli import main
from lowering.command.evaluate import LabelledImages, evaluate
from lowering.request.images import InputSpec

Image = pytest.importorskip("PIL.Image")

COLOURS = {"blue": (10, 10, 240), "green": (10, 240, 10), "red": (240, 10, 10)}
NET = """
import torch

class Channels(torch.nn.Module):
    '''The mean of each colour channel: red, green, blue.'''
    pretrained_cfg = {"input_size": (3, 8, 8), "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 1, bias=False)
        self.conv.weight.data = torch.eye(3)[:, :, None, None]

    def forward(self, x):
        return self.conv(x).mean((2, 3))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three classes of two pictures each, and a model that tells them apart."""
    for name, colour in COLOURS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (10, 12 + index), colour).save(tmp_path / "data" / name / f"{index}.png")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "classes.txt").write_text("red\ngreen\nblue\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fxtrt(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


SPEC = InputSpec(size=(3, 8, 8), mean=(0.0,) * 3, std=(1.0,) * 3)


def test_labels_come_from_the_folders(folder):
    images = LabelledImages(folder / "data", SPEC, batch_size=4)
    assert images.classes == ["blue", "green", "red"]
    batches = list(images)
    assert [len(labels) for _, labels in batches] == [4, 2]
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 0, 1, 1, 2, 2]
    named = LabelledImages(folder / "data", SPEC, classes=["red", "green", "blue", "black"])
    assert named.labels == [2, 2, 1, 1, 0, 0]


def test_a_limit_takes_images_of_all_classes(folder):
    assert LabelledImages(folder / "data", SPEC, limit=3).labels == [0, 1, 2]


def test_images_that_no_class_holds(folder):
    with pytest.raises(InputError, match="folder 'blue' is none of the 2 classes"):
        LabelledImages(folder / "data", SPEC, classes=["red", "green"])
    Image.new("RGB", (8, 8)).save(folder / "data" / "stray.png")
    with pytest.raises(InputError, match=r"'stray\.png' lies in no class folder"):
        LabelledImages(folder / "data", SPEC)


def test_shares_of_right_answers():
    logits = torch.eye(8)[[0, 1, 2, 3]] + torch.linspace(0, 0.1, 8)  # after the first: 7, 6, 5, 4, 3
    other = torch.eye(8)[[0, 1, 2, 4]] + torch.linspace(0, 0.1, 8)
    labels = torch.tensor([0, 1, 6, 0])
    scores = evaluate({"a": lambda _: logits, "b": lambda _: other}, [(torch.zeros(4), labels)], classes=8)
    assert (scores["a"].images, scores["a"].top1, scores["a"].top5, scores["a"].same) == (4, 0.5, 0.75, 1.0)
    assert (scores["b"].top1, scores["b"].same) == (0.5, 0.75)


def test_few_classes_have_no_top_five():
    scores = evaluate({"a": lambda x: x}, [(torch.eye(3), torch.arange(3))], classes=3)
    assert scores["a"].top5 is None


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda x: x[:, :2], "2 outputs, and the images are of 3 classes"),
        (lambda x: [x], "gives list for 3 images"),
        (lambda x: x[0], r"gives \(3,\) for 3 images"),
    ],
)
def test_what_is_no_classifier(run, text):
    with pytest.raises(InputError, match=text):
        evaluate({"a": run}, [(torch.eye(3), torch.arange(3))], classes=3)


def test_nothing_to_evaluate_on():
    with pytest.raises(InputError, match="nothing to evaluate on"):
        evaluate({"a": lambda x: x}, [], classes=3)


def test_the_command_counts_float_and_lowered(folder, capsys):
    arguments = ("evaluate", "net.py:Channels", "--data", "data", "--calibration", "data", "--classes", "classes.txt")
    status, out, err = fxtrt(capsys, *arguments, "--backend", "onnxruntime", "--backend", "trt")
    assert status == 0, err
    rows = [line for line in out.splitlines() if "100.00%" in line]
    assert len(rows) == 3
    assert "onnxruntime int8" in out
    assert "trt int8" in out


def test_without_the_order_of_the_classes_the_answers_are_others(folder, capsys):
    """Sorted folders are blue, green, red; the model's outputs are red, green, blue: only green is right."""
    status, out, err = fxtrt(capsys, "evaluate", "net.py:Channels", "--data", "data", "--precision", "fp32")
    assert status == 0, err
    assert out.count("33.33%") == 2


def test_a_subset_of_the_classes_is_refused_rather_than_misnumbered(folder, capsys):
    for path in (folder / "data" / "red").iterdir():
        path.unlink()
    (folder / "data" / "red").rmdir()
    status, _, err = fxtrt(capsys, "evaluate", "net.py:Channels", "--data", "data", "--precision", "fp32")
    assert status == 1
    assert "--classes" in err
