# SPDX-License-Identifier: Apache-2.0
"""The bridge's view of torch.hpu, with HPU graphs and metrics."""

import torch

from . import metrics
from .graphs import wrap_in_hpu_graph  # noqa: F401

globals().update({k: v for k, v in vars(torch.hpu).items() if not k.startswith("__")})
torch.hpu.metrics = metrics
