"""Quantizes an ONNX file with NVIDIA's ModelOpt; run by `benchmarks.engine_quality` with a Python that has it.

    python modelopt_quantize.py FLOAT.onnx QUANTIZED.onnx CALIBRATION.npy

ModelOpt wants other versions of onnx and ONNX Runtime than this project, so it lives in an environment of its own, and
this file imports nothing of the project.
"""

import sys

import numpy

# Where a package of that name is installed without a TensorRT behind it (its stubs), ModelOpt fails on it.
sys.modules["tensorrt"] = None

from modelopt.onnx.quantization import quantize  # noqa: E402

source, target, data = sys.argv[1:]
quantize(
    source,
    quantize_mode="int8",
    calibration_data=numpy.load(data),
    calibration_eps=["cpu"],
    high_precision_dtype="fp16",
    output_path=target,
)
