# SPDX-License-Identifier: Apache-2.0
"""Importing the bridge's torch package turns the hpu device on."""

import hpu_on_cpu
import torch  # noqa: F401  (the plugin imports torch from here)

hpu_on_cpu.install()

from . import core, hpex, hpu, internal, utils  # noqa: E402, F401
