# SPDX-License-Identifier: Apache-2.0
"""Shows the fix at work: vLLM's own Gemma 4 on the CPU, behind a stand-in of the plugin's interface."""
