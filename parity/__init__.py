# SPDX-License-Identifier: Apache-2.0
"""Do two servers give the same greedy answers, and how long to their first tokens? For a person with a Gaudi."""
