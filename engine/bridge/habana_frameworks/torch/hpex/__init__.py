# SPDX-License-Identifier: Apache-2.0
"""The bridge's fused operators."""

from . import kernels, normalization  # noqa: F401
