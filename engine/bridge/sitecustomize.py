# SPDX-License-Identifier: Apache-2.0
"""What every interpreter of an arm needs at its start; vLLM starts some of its own.

Torchvision's two compiled operators are declared: PyPI's torchvision carries ones built for another torch than the CPU
one, its import only insists on their names, and the image processors use neither. And where the shadow is on the path,
it is turned on as the .pth file of an installation does.
"""

import contextlib

with contextlib.suppress(ImportError):  # an interpreter without torch needs nothing
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    with contextlib.suppress(RuntimeError):  # the real ones are there
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with contextlib.suppress(ImportError):  # a stock arm has none
    import vllm_gaudi_overrides_start  # noqa: F401
