# SPDX-License-Identifier: Apache-2.0
"""`python -m graft`: one command per module; exit code 0 done, 1 not done or not applied, 2 drifted."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from graft import check, copies, drift, export, install, pin
from graft.errors import GraftError

COMMANDS = (copies, install, check, drift, pin, export)


class _Parser(argparse.ArgumentParser):
    """Exits 1 where argparse would exit 2, which here means drift."""

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message}. Run `{self.prog} --help`.\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="graft", description="Fast prefill for Gemma 4, merged into vllm-gaudi.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.func(args)
    except GraftError as error:
        print(f"graft: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("graft: Interrupted. Nothing more is written.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
