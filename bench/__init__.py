# SPDX-License-Identifier: Apache-2.0
"""Prompt throughput with the flag off and on, beside what counted FLOPs allow; on a Gaudi, or here on the CPU."""
