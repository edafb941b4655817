# SPDX-License-Identifier: Apache-2.0
"""The bridge's own settings."""

from . import bridge_config  # noqa: F401
