# SPDX-License-Identifier: Apache-2.0
"""The real plugin's engine on the CPU: vLLM and vllm-gaudi as released, the Habana bridge ours."""
