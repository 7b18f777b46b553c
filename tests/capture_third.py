"""A helper in a file of its own that calls a function which the test wraps elsewhere."""

from __future__ import annotations

import capture_models
from capture_models import keep_positive


def by_name(scores):
    return keep_positive(scores)


def by_module(scores):
    return capture_models.keep_positive(scores)
