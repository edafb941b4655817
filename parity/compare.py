# SPDX-License-Identifier: Apache-2.0
"""Compare two answers token by token, and tell a tie from a fault by the gap between the two candidates."""

from dataclasses import dataclass

from parity.client import Answer

EQUAL, TIE, DIFFERS = "equal", "tie", "differs"


@dataclass(frozen=True)
class Finding:
    """How two answers to one request compare.

    at: index of the first token that differs, None if none does. gap: there, by how much each server prefers its own
    token to the other's, in log probability; the larger of the two. drift: the largest difference of a log probability
    on the tokens before.
    """

    name: str
    kind: str
    tokens: int
    first_seconds: float
    second_seconds: float
    at: int | None = None
    first_token: str | None = None
    second_token: str | None = None
    gap: float | None = None
    drift: float = 0.0
    why: str = ""


def compare(first: Answer, second: Answer, tie: float, drift: float) -> Finding:
    """The first divergence is a tie if neither server prefers its token by more than `tie`.

    Answers that agree differ all the same if a log probability of theirs does by more than `drift`: a fault need not
    reach the likeliest token. After the first divergence the texts are different ones, so nothing more is compared.
    """
    common = min(len(first.tokens), len(second.tokens))
    at = next((i for i in range(common) if first.tokens[i] != second.tokens[i]), None)
    agreed = common if at is None else at
    drifted = max((abs(first.logprobs[i] - second.logprobs[i]) for i in range(agreed)), default=0.0)
    base = dict(
        name=first.name,
        tokens=agreed,
        first_seconds=first.seconds,
        second_seconds=second.seconds,
        drift=drifted,
    )
    if drifted > drift:
        return Finding(kind=DIFFERS, **base, why=f"log probabilities differ by {drifted:.2f} on equal tokens")
    if at is None:
        if len(first.tokens) != len(second.tokens):
            why = f"{len(first.tokens)} tokens and {len(second.tokens)}"
            return Finding(kind=DIFFERS, at=common, **base, why=why)
        return Finding(kind=EQUAL, **base)
    a, b = first.tokens[at], second.tokens[at]
    gap = max(_preference(first, at, a, b), _preference(second, at, b, a))
    kind = TIE if gap <= tie else DIFFERS
    why = f"token {at}: {_plain(a)} and {_plain(b)}, preferred by {gap:.3f}"
    return Finding(kind=kind, at=at, first_token=_plain(a), second_token=_plain(b), gap=gap, **base, why=why)


def _preference(answer: Answer, at: int, own: str, other: str) -> float:
    """log P(own) - log P(other) as this server has it; a lower bound where `other` is not among its likeliest."""
    top = answer.tops[at] or {}
    floor = min(top.values(), default=float("-inf"))
    return answer.logprobs[at] - top.get(other, floor)


def _plain(token: str) -> str:
    return token.removeprefix("token_id:")
