# SPDX-License-Identifier: Apache-2.0
"""Compile-only mode: warm-up really runs here, as nothing is compiled."""

from contextlib import contextmanager


@contextmanager
def env_setting(name, value):
    yield


def get_pt_compile_only_mode():
    return False
