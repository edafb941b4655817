# SPDX-License-Identifier: Apache-2.0
"""RMS norm, computed in float32."""

import torch


class FusedRMSNorm:
    @staticmethod
    def apply(x, weight, eps):
        """x [..., D], weight [D]; the result has x's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)
