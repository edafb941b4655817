# SPDX-License-Identifier: Apache-2.0
"""Hold the second run of a case against the first, and both against what the case promises."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from engine.cases import Case
from engine.kinds import ALL, FAST, TOKENS


@dataclass
class Run:
    """What engine.arm wrote: its result and, per forward, the sampled logits."""

    result: dict
    logits: list[np.ndarray]

    @property
    def error(self) -> str | None:
        return self.result["error"]

    @property
    def forwards(self) -> list[dict]:
        return self.result["forwards"]


@dataclass
class Verdict:
    """problems: none when the case holds its promise. difference: the largest of a sampled logit."""

    case: str
    promise: str
    problems: list[str]
    note: str = ""
    paths: dict[str, dict[str, int]] = field(default_factory=dict)  # kind -> path -> forwards
    tokens: int = 0
    sampled: int = 0
    difference: float | None = None
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.problems


def judge(case: Case, first: Run, second: Run) -> Verdict:
    verdict = Verdict(case.name, case.promise, [])
    verdict.seconds = first.result["seconds"] + second.result["seconds"]
    for arm, run in ((case.first, first), (case.second, second)):
        if run.result.get("fixed", arm.fixed) != arm.fixed:
            verdict.problems = [f"a run served {'stock' if arm.fixed else 'merged'} modules"]
            return verdict
    if case.refusal:
        verdict.problems = _refused(case, first, second)
        verdict.note = f"fails as it must: {_short(second.error)}" if verdict.holds else ""
        return verdict
    if first.error or case.stock_fault:
        verdict.problems = _no_worse(case, first, second)
        verdict.note = f"stock fails: {_short(first.error)}"
        if first.error or verdict.problems:
            return verdict
    if second.error:
        verdict.problems.append(f"the second run fails: {_short(second.error)}")
        return verdict

    verdict.paths = _paths(second.forwards)
    verdict.problems += _wrong_paths(case, first, second)
    verdict.problems += _wrong_lengths(case, second)
    verdict.tokens = sum(map(len, second.result["answers"]))
    if first.result["answers"] != second.result["answers"]:
        verdict.problems.append(_first_token(first.result["answers"], second.result["answers"]))
    if _schedule(first) != _schedule(second):
        verdict.problems.append("the two runs batched the requests differently")
        return verdict
    verdict.sampled = sum(len(rows) for rows in second.logits)
    verdict.difference = _difference(first.logits, second.logits)
    if not verdict.difference <= case.tolerance:
        verdict.problems.append(f"sampled logits differ by {verdict.difference:.2g}")
    if case.same_caches and first.result["caches"] != second.result["caches"]:
        verdict.problems.append("the KV caches differ")
    verdict.problems += _host_reads(first, second)
    return verdict


def path_of(forward: dict) -> str:
    """FAST, ALL, or the rows seen where it is neither."""
    rows = set(forward["shared_rows"])
    if rows == {forward["batch"] * forward["length"]}:
        return ALL
    if rows == {forward["batch"]}:
        return FAST
    return f"{sorted(rows)} rows of {forward['batch']} x {forward['length']}"


def _paths(forwards: list[dict]) -> dict[str, dict[str, int]]:
    paths: dict[str, dict[str, int]] = {}
    for forward in forwards:
        taken, path = paths.setdefault(forward["kind"], {}), path_of(forward)
        taken[path] = taken.get(path, 0) + 1
    return paths


def _wrong_paths(case: Case, first: Run, second: Run) -> list[str]:
    problems = []
    for kind, taken in _paths(first.forwards).items():
        if set(taken) != {ALL}:
            problems.append(f"without the flag {kind} forwards took {', '.join(taken)}")
    served = {forward["kind"] for forward in second.forwards if not forward["warmup"]}
    if served != set(case.paths):
        wanted, seen = ", ".join(case.paths), ", ".join(sorted(served))
        problems.append(f"the case is about {wanted} forwards, but there were {seen or 'none'}")
    for kind, taken in _paths(second.forwards).items():
        wanted = case.paths.get(kind, ALL)  # warm-up has kinds that are not served
        if not set(taken) <= ({wanted, ALL} if case.may_fall_back else {wanted}):
            problems.append(f"{kind} forwards took {', '.join(taken)}, not {wanted}")
    return problems


def _wrong_lengths(case: Case, run: Run) -> list[str]:
    """A few equal tokens say little: every answer must be as long as promised, and there must be one."""
    answers = run.result["answers"]
    if not answers:
        return ["nothing was answered"]
    if case.short:
        return []
    return [f"answer {n} has {len(a)} tokens, not {TOKENS}" for n, a in enumerate(answers) if len(a) != TOKENS][:1]


def _schedule(run: Run) -> list[tuple]:
    names = ("kind", "warmup", "batch", "length", "filled", "sampled")
    return [tuple(forward[name] for name in names) for forward in run.forwards]


def _difference(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """Infinite where a logit is no number."""
    largest = 0.0
    for a, b in zip(first, second, strict=True):
        if a.size:
            largest = max(largest, float(np.nan_to_num(np.abs(a - b), nan=np.inf).max()))
    return largest


def _first_token(first: list[list[int]], second: list[list[int]]) -> str:
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        for place, (x, y) in enumerate(zip(a, b, strict=False)):
            if x != y:
                return f"answer {number} differs at token {place}: {x} without, {y} with the flag"
        if len(a) != len(b):
            return f"answer {number} has {len(a)} tokens without, {len(b)} with the flag"
    raise AssertionError("called with equal answers")


def _host_reads(first: Run, second: Run) -> list[str]:
    """A forward may stall the device no more often than the stock one does."""
    for a, b in zip(first.forwards, second.forwards, strict=True):
        more = Counter(b["host_reads"]) - Counter(a["host_reads"])
        if more:
            return [f"a {b['kind']} forward reads on the host: {', '.join(more)}"]
    return []


def _refused(case: Case, first: Run, second: Run) -> list[str]:
    if first.error and not case.stock_fault:
        return [f"the first run fails: {_short(first.error)}"]
    if not second.error:
        return [f"nothing was refused; expected {case.refusal}"]
    if case.refusal not in second.error:
        return [f"failed with {_short(second.error)}; expected {case.refusal}"]
    return []


def _no_worse(case: Case, first: Run, second: Run) -> list[str]:
    """Where stock fails in the way that is known, the fix may fail in the same way or not at all."""
    if not first.error:
        return [f"stock no longer fails ({case.stock_fault}): give the case its paths"]
    if not case.stock_fault or case.stock_fault not in first.error:
        return [f"the first run fails: {_short(first.error)}"]
    if second.error and case.stock_fault not in second.error:
        return [f"fails otherwise than stock: {_short(second.error)}"]
    return []


def _short(error: str | None) -> str:
    line = " ".join((error or "").split())
    return line if len(line) <= 160 else f"{line[:157]}..."
