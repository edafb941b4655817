# SPDX-License-Identifier: Apache-2.0
"""Run code written for the "hpu" device on the CPU.

`install` gives torch a `torch.hpu` namespace and enters a TorchFunctionMode in every thread that

* rewrites each "hpu" device argument to "cpu" (a move to "hpu" still copies);
* drops `pin_memory`, which a torch without an accelerator refuses;
* reads index -1 in gathers and scatters as the last row, and a negative class of `one_hot` as a
  row of zeros: the plugin pads slots, blocks, positions and token ids with -1;
* tells `HOST_READS` of every operation that makes the host wait for the device.

Tensors report the device "cpu". Nothing here has been compared with a real Gaudi.
"""

import os
import sys
import threading
import types

import torch
import torch.nn.functional as F
from torch._dynamo import register_backend
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

CPU = torch.device("cpu")

HOST_READS: list = []
"""Callables told the name of each operation that would stall the device until the host has read."""


def is_hpu(device):
    if isinstance(device, torch.device):
        return device.type == "hpu"
    return isinstance(device, str) and (device == "hpu" or device.startswith("hpu:"))


def to_cpu(value):
    return CPU if is_hpu(value) else value


def from_the_end(index, length):
    """Index -1 as the last of `length` rows."""
    return torch.where(index < 0, index + length, index)


_one_hot = F.one_hot


def _one_hot_of_padding(classes, num_classes=-1):
    rows = _one_hot(classes.clamp(min=0).long(), num_classes)
    return rows.masked_fill(classes.lt(0).unsqueeze(-1), 0)


# (tensor, dim, index, ...)
_INDEXED = {
    torch.index_select,
    torch.index_copy,
    torch.Tensor.index_select,
    torch.Tensor.index_copy,
    torch.Tensor.index_copy_,
    torch.Tensor.index_add_,
    torch.Tensor.index_reduce_,
}

_READS_ON_THE_HOST = {
    torch.Tensor.item: "item",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.__int__: "int",
    torch.Tensor.__float__: "float",
    torch.Tensor.__index__: "index",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.nonzero: "nonzero",
    torch.nonzero: "nonzero",
    torch.masked_select: "masked_select",
    torch.Tensor.masked_select: "masked_select",
    torch.unique: "unique",
    torch.Tensor.unique: "unique",
}


def _is_mask_index(args):
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)


class HpuOnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        if not torch.compiler.is_compiling() and HOST_READS:  # Dynamo traces this and would guard on the list
            name = _READS_ON_THE_HOST.get(func)
            if func is torch.Tensor.__getitem__ and _is_mask_index(args):
                name = "a boolean index"
            if name:
                for tell in HOST_READS:
                    tell(name)
        moved = any(is_hpu(a) for a in args)
        if moved:
            args = tuple(to_cpu(a) for a in args)
        if is_hpu(kwargs.get("device")):
            kwargs["device"], moved = CPU, True
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and moved:
            kwargs["copy"] = True
        elif func in _INDEXED:
            dim = kwargs["dim"] if "dim" in kwargs else args[1]
            length = args[0].shape[dim]
            if "index" in kwargs:
                kwargs["index"] = from_the_end(kwargs["index"], length)
            else:
                args = (*args[:2], from_the_end(args[2], length), *args[3:])
        elif func is F.embedding:
            args = (from_the_end(args[0], args[1].shape[0]), *args[1:])
        elif func is torch.embedding:
            args = (args[0], from_the_end(args[1], args[0].shape[0]), *args[2:])
        elif func is _one_hot:
            return _one_hot_of_padding(*args, **kwargs)
        return func(*args, **kwargs)


def _nothing(*args, **kwargs):
    return None


class _Stream:
    """A stream or event of a device on which everything has already happened."""

    synchronize = wait_stream = wait_event = record = record_event = wait = _nothing

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def query(self):
        return True


class _Generator(torch.Generator):
    """A random generator of the host: no function call that the mode would see makes one."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, to_cpu(device))


def _mem_get_info(device=None):
    total = int(float(os.environ.get("HPU_ON_CPU_GIB", "1")) * 2**30)
    return total, total


def _namespace():
    hpu = types.ModuleType("torch.hpu")
    hpu.is_available = lambda: True
    hpu.device_count = lambda: int(os.environ.get("HPU_ON_CPU_COUNT", "2"))
    hpu.current_device = lambda: 0
    hpu.get_device_name = lambda *args: "CPU stand-in"
    hpu.get_device_properties = lambda *args: types.SimpleNamespace(name="CPU stand-in")
    hpu.mem_get_info = _mem_get_info
    hpu.memory_stats = lambda *args: {}
    hpu.memory_allocated = hpu.max_memory_allocated = lambda *args: 0
    hpu.Stream = hpu.Event = hpu.stream = _Stream
    hpu.current_stream = hpu.default_stream = _Stream
    hpu.synchronize = hpu.set_device = hpu.empty_cache = hpu.reset_peak_memory_stats = _nothing
    hpu.random = types.SimpleNamespace(manual_seed_all=torch.manual_seed)
    return hpu


def _run_as_is(module, example_inputs, **options):
    """The torch.compile backend: Dynamo traces, guards and recompiles; the graph then runs as is."""
    return module.forward


def install():
    """Make torch believe in the hpu device. A second call does nothing."""
    if hasattr(torch, "hpu"):
        return
    torch.hpu = sys.modules["torch.hpu"] = _namespace()

    # `with torch.device("hpu")` enters its own mode, which sits above ours.
    enter_device = DeviceContext.__init__
    DeviceContext.__init__ = lambda self, device: enter_device(self, to_cpu(device))

    torch.Generator = _Generator

    accelerator = torch.accelerator
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device_index"):
        setattr(accelerator, name, _nothing)
    accelerator.device_count = torch.hpu.device_count
    accelerator.current_device_index = lambda: 0
    accelerator.memory_stats = lambda *args: {}
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(accelerator, name, lambda *args: 0)

    register_backend(name="hpu_backend")(_run_as_is)

    bootstrap = threading.Thread._bootstrap_inner

    def bootstrap_in_mode(thread):
        with HpuOnCpu():
            bootstrap(thread)

    threading.Thread._bootstrap_inner = bootstrap_in_mode
    HpuOnCpu().__enter__()
