"""Tests of the kernels: on a GPU, else in Triton's interpreter, which has no bfloat16 products."""

from __future__ import annotations

import pytest
import torch

from tests.similarity.features import MAKERS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
#: Kinds of features that are compared at a second scale, too; the interpreter is slow.
SECOND = list(MAKERS) if GPU else ["random", "outliers"]
#: Marks of modules that call the library with kernels. These compute infinities that they mask or
#: recompute; the interpreter's NumPy warns of each.
MARKS = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
