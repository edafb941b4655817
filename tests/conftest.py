# SPDX-License-Identifier: Apache-2.0
"""Settings of all the tests: hypothesis tries the same examples in every run, so that a run can be repeated."""

try:
    from hypothesis import settings
except ImportError:  # an environment for some of the tests only
    pass
else:
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")
