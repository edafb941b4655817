# SPDX-License-Identifier: Apache-2.0
"""Declare torchvision's two compiled operators at interpreter start, before vLLM imports torchvision.

PyPI's torchvision carries operators built for another torch than the CPU one; its import only
insists on their names, and the image processors use neither. vLLM starts interpreters of its own,
so this cannot wait for a module of ours to be imported.
"""

import contextlib

with contextlib.suppress(ImportError):  # an interpreter without torch needs nothing
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    with contextlib.suppress(RuntimeError):  # the real ones are there
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
