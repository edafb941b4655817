# SPDX-License-Identifier: Apache-2.0
"""Merges the fix into vllm-gaudi's files, installs the merged copies, and watches for drift."""
