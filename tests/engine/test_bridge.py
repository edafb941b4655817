# SPDX-License-Identifier: Apache-2.0
"""What the stand-in for the Habana bridge computes. Each test runs in an interpreter of its own."""

import os
import subprocess
import sys

import pytest

from engine.plugin import BRIDGE

pytest.importorskip("torch", reason="the bridge stands in for a device of torch's")

PREAMBLE = """
import torch
import torch.nn.functional as F
import habana_frameworks.torch as htorch
from habana_frameworks.torch.hpex.kernels import FusedSDPA, RotaryPosEmbeddingMode, apply_rotary_pos_emb
torch.manual_seed(0)
"""


def runs(code, **environ):
    environ = {**os.environ, "PYTHONPATH": str(BRIDGE), "OMP_NUM_THREADS": "1", **environ}
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tensors_for_the_device_are_made_on_the_cpu_and_a_move_copies():
    runs("""
x = torch.ones(2, device="hpu")
assert x.device.type == "cpu" and torch.hpu.is_available()
assert x.to("hpu").data_ptr() != x.data_ptr()
with torch.device("hpu"):
    assert torch.zeros(1).device.type == "cpu"
""")


def test_other_threads_see_the_device_too():
    runs("""
import threading
made = []
thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="hpu")))
thread.start(); thread.join()
assert made
""")


def test_a_generator_of_the_device_draws_what_its_seed_says():
    runs("""
draws = [torch.rand(3, generator=torch.Generator(device="hpu").manual_seed(seed)) for seed in (1, 1, 2)]
assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
""")


def test_index_minus_one_is_the_last_row_and_a_negative_class_no_class():
    runs("""
rows = torch.arange(6.0).view(3, 2)
last = torch.tensor([-1])
assert torch.equal(rows.index_select(0, last), rows[2:])
assert torch.equal(rows.clone().index_copy_(0, last, torch.zeros(1, 2))[2], torch.zeros(2))
assert torch.equal(F.embedding(last, rows), rows[2:])
assert torch.equal(F.one_hot(torch.tensor([1, -1]), 3), torch.tensor([[0, 1, 0], [0, 0, 0]]))
""")


def test_attention_is_torchs_for_a_causal_mask_and_grouped_queries():
    runs("""
q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
ours = FusedSDPA.apply(q, k, v, None, 0.0, True, 1.0)
theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
torch.testing.assert_close(ours, theirs)
""")


def test_attention_sees_a_window_of_the_last_keys_and_none_beyond_the_valid_ones():
    runs("""
q, k, v = torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
at = torch.arange(9)
seen = (at[None] <= at[:, None]) & (at[:, None] - at[None] < 4) & (at[None] < 7)
ours = FusedSDPA.apply(q, k, v, None, 0.0, True, 1.0, "fast", None, torch.tensor([7]), "right",
                       window_size=(4, 0))
theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0)
torch.testing.assert_close(ours, theirs)
""")


def test_attention_by_torchs_fused_kernel_is_the_same():
    runs("""
import os

q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
mask = torch.zeros(2, 1, 9, 9).masked_fill(torch.rand(2, 1, 9, 9) < 0.3, float("-inf"))
mask[0, 0, 4] = float("-inf")
given = (q, k, v, mask, 0.0, True, 0.5, "fast", None, torch.tensor([7, 9]), "right")
ours = FusedSDPA.apply(*given, window_size=(5, 0))
os.environ["HPU_ON_CPU_ATTENTION"] = "fused"
fused = FusedSDPA.apply(*given, window_size=(5, 0))
torch.testing.assert_close(fused, ours)
assert torch.equal(fused[0, :, 4], torch.zeros(4, 8))
""")


def test_attention_that_sees_no_key_gives_zeros():
    runs("""
q = k = v = torch.randn(1, 1, 2, 8)
out = FusedSDPA.apply(q, k, v, torch.full((2, 2), float("-inf")), 0.0, False, 1.0)
assert torch.equal(out, torch.zeros_like(out))
""")


def test_attention_refuses_what_is_not_known_of_the_kernel():
    runs("""
q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 3, 8)
for wrong in (dict(is_causal=True), dict(dropout_p=0.1), dict(sinks=q),
              dict(valid_seq_lengths=torch.tensor([1]), padding_side="left")):
    try:
        FusedSDPA.apply(q, k, k, **wrong)
    except NotImplementedError:
        continue
    raise AssertionError(wrong)
""")


def test_both_rotary_layouts_turn_each_pair_by_its_angle():
    runs("""
x, angle = torch.randn(5, 8), torch.rand(5, 4)
turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous()) * torch.polar(torch.ones(5, 4), angle)
cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
halves = apply_rotary_pos_emb(x, cos, sin, None, 0, RotaryPosEmbeddingMode.BLOCKWISE)
torch.testing.assert_close(halves, torch.cat((turned.real, turned.imag), -1))
cos, sin = (f(angle).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
pairs = apply_rotary_pos_emb(torch.stack(x.chunk(2, -1), -1).flatten(1), cos, sin, None, 0,
                             RotaryPosEmbeddingMode.PAIRWISE)
torch.testing.assert_close(pairs, torch.view_as_real(turned).flatten(1))
""")


def test_lazy_or_eager_is_what_the_environment_says():
    runs("assert htorch.utils.internal.is_lazy()", PT_HPU_LAZY_MODE="1")
    runs("assert not htorch.utils.internal.is_lazy()", PT_HPU_LAZY_MODE="0")


def test_what_would_stall_the_device_is_told():
    runs("""
import hpu_on_cpu
told = []
hpu_on_cpu.HOST_READS.append(told.append)
x = torch.arange(3)
x.sum().item(); x[x > 1]; bool(x[0] == 0); x.cpu(); x + 1; x[1:]
assert told == ["item", "a boolean index", "bool", "cpu"], told
""")


def test_an_interpreter_without_torch_starts_silently():
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(BRIDGE)!r}); import sitecustomize"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
