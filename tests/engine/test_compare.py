# SPDX-License-Identifier: Apache-2.0
"""What the engine table calls equal, and what it does not let pass."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from engine.cases import BY_NAME, CASES
from engine.compare import Run, judge, path_of
from engine.kinds import TOKENS

CASE = BY_NAME["answer"]
LAYERS = 5


def forward(kind, batch, length, shared_rows):
    return {
        "kind": kind,
        "warmup": False,
        "batch": batch,
        "length": length,
        "filled": batch,
        "sampled": batch,
        "own_rows": [batch * length] * LAYERS,
        "shared_rows": [shared_rows] * LAYERS,
        "host_reads": [],
    }


def a_run(prompt_rows):
    result = {
        "answers": [[7] * (TOKENS - 1) + [8]],
        "forwards": [forward("prompt", 1, 128, prompt_rows), forward("decode", 1, 1, 1)],
        "caches": ["a", "b"],
        "error": None,
        "seconds": 1.0,
    }
    return Run(result, [np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)])


@pytest.fixture
def first():
    return a_run(128)


@pytest.fixture
def second():
    return a_run(1)


def problem(first, second, case=CASE):
    problems = judge(case, first, second).problems
    assert len(problems) == 1, problems
    return problems[0]


def test_equal_runs_hold_and_say_which_path_they_took(first, second):
    verdict = judge(CASE, first, second)
    assert verdict.holds
    assert verdict.paths == {"prompt": {"fast": 1}, "decode": {"all": 1}}
    assert (verdict.tokens, verdict.sampled, verdict.difference) == (TOKENS, 2, 0.0)


def test_names_the_first_token_that_differs(first, second):
    second.result["answers"][0][-1] = 9
    assert problem(first, second) == f"answer 0 differs at token {TOKENS - 1}: 8 without, 9 with the flag"


def test_a_shorter_answer_than_promised_is_a_problem_unless_the_case_says_why(first, second):
    first.result["answers"] = second.result["answers"] = [[7] * TOKENS, [7] * 40]
    assert problem(first, second) == f"answer 1 has 40 tokens, not {TOKENS}"
    assert judge(replace(CASE, short="a reason"), first, second).holds


def test_an_answer_is_needed_whatever_its_length(first, second):
    first.result["answers"] = second.result["answers"] = []
    assert problem(first, second) == "nothing was answered"
    assert problem(first, second, replace(CASE, short="a reason")) == "nothing was answered"


def test_every_case_that_answers_with_tokens_promises_64_of_them():
    assert TOKENS == 64
    assert [case.name for case in CASES if case.short] == ["pooling"]


def test_a_logit_beyond_the_tolerance_is_a_difference(first, second):
    second.logits[1] = second.logits[1] + 2e-4
    assert problem(first, second).startswith("sampled logits differ by 0.0002")


def test_a_logit_that_is_no_number_is_a_difference(first, second):
    first.logits[0][0, 0] = second.logits[0][0, 0] = np.nan
    assert problem(first, second) == "sampled logits differ by inf"


def test_a_cache_that_differs_in_one_bit_is_a_difference(first, second):
    second.result["caches"] = ["a", "c"]
    assert problem(first, second) == "the KV caches differ"
    assert judge(replace(CASE, same_caches=False), first, second).holds


def test_all_layers_where_the_fast_path_must_be_taken_is_a_problem(first):
    assert problem(first, copy.deepcopy(first)) == "prompt forwards took all, not fast"


def test_some_other_number_of_rows_is_neither_path(first, second):
    second.forwards[0]["shared_rows"] = [1, 1, 128, 128, 128]
    assert path_of(second.forwards[0]) == "[1, 128] rows of 1 x 128"
    assert "not fast" in problem(first, second)


def test_a_case_that_did_not_serve_what_it_is_about_is_a_problem(first, second):
    for run in (first, second):
        del run.forwards[1], run.logits[1]
    assert problem(first, second) == "the case is about prompt, decode forwards, but there were prompt"


def test_stalling_the_device_more_often_than_stock_is_a_problem(first, second):
    first.forwards[0]["host_reads"] = ["item"]
    second.forwards[0]["host_reads"] = ["item", "item"]
    assert problem(first, second) == "a prompt forward reads on the host: item"


def test_a_run_that_fails_is_a_problem(first, second):
    second.result["error"] = "AssertionError"
    assert problem(first, second) == "the second run fails: AssertionError"
    assert problem(second, first) == "the first run fails: AssertionError"


def test_a_known_fault_of_stock_may_be_shared_but_not_be_made_worse(first, second):
    case = replace(CASE, stock_fault="shapes")
    first.result["error"] = second.result["error"] = "RuntimeError: shapes"
    assert judge(case, first, second).holds
    second.result["error"] = None
    assert judge(case, first, second).holds
    second.result["error"] = "KeyError: 3"
    assert problem(first, second, case) == "fails otherwise than stock: KeyError: 3"


def test_a_fault_that_stock_no_longer_has_is_reported(first, second):
    case = replace(CASE, stock_fault="shapes")
    assert problem(first, second, case).startswith("stock no longer fails (shapes)")


def test_a_refusal_must_come_and_be_the_right_one(first, second):
    case = replace(CASE, refusal="FP8")
    assert problem(first, second, case) == "nothing was refused; expected FP8"
    second.result["error"] = "KeyError: 3"
    assert problem(first, second, case) == "failed with KeyError: 3; expected FP8"
    second.result["error"] = "ValueError: no FP8 cache"
    assert judge(case, first, second).holds
