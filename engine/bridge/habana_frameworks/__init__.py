# SPDX-License-Identifier: Apache-2.0
"""What vllm-gaudi imports of the Habana bridge, for the CPU: names as there, plain torch inside."""
