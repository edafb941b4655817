# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding that keeps cos and sin of one batch between its layers.

`prepare_cos_sin` looks them up once per forward, for as many rows as it is given positions; `forward` uses what lies
there, whatever positions it is called with. A call with another number of rows therefore fails, and one with the same
number of rows at other positions is wrong, unless somebody prepares again.
"""

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((high.neg(), low), dim=-1) * sin


@RotaryEmbedding.register_oot
class HPURotaryEmbedding(RotaryEmbedding):
    def prepare_cos_sin(self, positions, offsets=None, recompute_cos_sin=False):
        """Keep `cos` and `sin`, `[positions, 1, rotary dim]`, for the calls to come.

        `recompute_cos_sin` is remembered: with it every later call prepares for its own positions.
        """
        self.recompute_cos_sin = recompute_cos_sin
        if offsets is not None:
            positions = positions + offsets.view(positions.shape[0], -1)
        angles = self.cos_sin_cache.index_select(0, positions.reshape(-1)).unsqueeze(1)
        half = angles.shape[-1] // 2
        self.register_buffer("cos", angles[..., :half].repeat(1, 1, 2), persistent=False)
        self.register_buffer("sin", angles[..., half:].repeat(1, 1, 2), persistent=False)

    def forward_oot(self, positions, query, key=None, offsets=None):
        if getattr(self, "sin", None) is None or self.recompute_cos_sin:
            self.prepare_cos_sin(positions, offsets, recompute_cos_sin=True)
        rows = positions.numel()
        turned = []
        for tensor in (query, key):
            if tensor is not None:
                heads = tensor.reshape(rows, -1, self.head_size)
                front = _rotate(heads[..., : self.rotary_dim], self.cos, self.sin)
                back = heads[..., self.rotary_dim :]
                tensor = torch.cat((front, back), dim=-1).reshape(tensor.shape)
            turned.append(tensor)
        return tuple(turned)
