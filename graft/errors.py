# SPDX-License-Identifier: Apache-2.0
"""What a user can run into: each error names its cause and what to do next, and knows its exit code."""


class GraftError(Exception):
    """Bad input, or something that could not be done."""

    exit_code = 1

    def __init__(self, cause: str, mend: str) -> None:
        """Both are sentences without the final full stop; line breaks in them become spaces."""
        self.cause = " ".join(cause.split())
        self.mend = " ".join(mend.split())
        super().__init__(f"{self.cause}. {self.mend}.")


class Drift(GraftError):
    """The release's files are not what the fix was written against."""

    exit_code = 2
