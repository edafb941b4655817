# SPDX-License-Identifier: Apache-2.0
"""Lazy or eager: as on the card, PT_HPU_LAZY_MODE says."""

import os


def is_lazy():
    return os.environ.get("PT_HPU_LAZY_MODE", "0") == "1"
