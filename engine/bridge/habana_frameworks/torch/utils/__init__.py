# SPDX-License-Identifier: Apache-2.0
"""Which mode the bridge runs in, and on which card."""

from . import experimental, internal  # noqa: F401
