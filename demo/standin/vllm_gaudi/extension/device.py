# SPDX-License-Identifier: Apache-2.0
"""What the device does and the CPU does not: the padding value -1 as an index means the last row."""

import torch
from torch.overrides import TorchFunctionMode

_BY_DIM = {
    torch.index_select,
    torch.Tensor.index_select,
    torch.index_copy,
    torch.Tensor.index_copy,
    torch.Tensor.index_copy_,
}


def _last_row_for_padding(index: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.where(index < 0, index + rows, index)


class DeviceIndexing(TorchFunctionMode):
    """Inside it, gathers, scatters and embeddings take -1 for the last row."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _BY_DIM:
            named = dict(zip(("self", "dim", "index"), args, strict=False)) | kwargs
            index = _last_row_for_padding(named["index"], named["self"].shape[named["dim"]])
            if "index" in kwargs:
                kwargs["index"] = index
            else:
                args = (*args[:2], index, *args[3:])
        elif func is torch.nn.functional.embedding:
            args = (_last_row_for_padding(args[0], args[1].shape[0]), *args[1:])
        return func(*args, **kwargs)
