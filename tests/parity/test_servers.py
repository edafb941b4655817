# SPDX-License-Identifier: Apache-2.0
"""What `python -m parity` says of two servers, over real HTTP."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="parity speaks to servers through the openai client")

from parity.__main__ import main
from parity.client import Answer
from parity.compare import compare
from parity.requests import built_in, from_file
from tests.parity.server import serving

SERVER = Path(__file__).with_name("server.py")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def found(capsys):
    return json.loads(capsys.readouterr().out)


def test_equal_servers_are_equal(capsys):
    with serving() as (first, asked), serving() as (second, _):
        assert main([first, second, "--json"]) == 0
    findings = found(capsys)
    assert {finding["kind"] for finding in findings} == {"equal"}
    assert {"1 tokens", "513 tokens", "batch: 60 tokens", "prefix: again", "chat 1", "completion 1"} <= {
        finding["name"] for finding in findings
    }
    assert all(finding["first_seconds"] > 0 and finding["tokens"] == 32 for finding in findings)
    assert all(body.get("temperature", 0) == 0 for body in asked)


def test_servers_that_differ_exit_1_and_name_the_first_token(capsys):
    with serving() as (first, _), serving("token") as (second, _):
        assert main([first, second]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "First real difference: 1 tokens, token 2: " in out


def test_a_divergence_between_two_near_candidates_is_a_tie(capsys):
    with serving("near") as (first, _), serving("tie") as (second, _):
        assert main([first, second, "--json"]) == 0
        ties = found(capsys)
        assert {(finding["kind"], finding["at"], round(finding["gap"], 3)) for finding in ties} == {("tie", 2, 0.01)}
        assert main([first, second, "--json", "--tie", "0.005"]) == 1


def test_equal_tokens_of_another_probability_are_a_difference(capsys):
    with serving() as (first, _), serving("drift") as (second, _):
        assert main([first, second, "--json"]) == 1
    assert "on equal tokens" in found(capsys)[0]["why"]


def test_a_dead_server_is_a_clear_error(capsys):
    dead = f"http://127.0.0.1:{free_port()}"
    with serving() as (first, _):
        assert main([first, dead]) == 2
    error = capsys.readouterr().err
    assert f"parity: {dead} does not answer as an OpenAI-compatible server" in error
    assert "Traceback" not in error


def test_a_server_that_fails_on_a_request_is_a_clear_error(capsys):
    with serving() as (first, _), serving("error") as (second, _):
        assert main([first, second]) == 2
    assert "out of cards" in capsys.readouterr().err


def test_two_commands_are_started_one_after_the_other(capsys):
    port = free_port()
    command = f"{sys.executable} {SERVER} {port}"
    assert main([command, f"{command} token", "--port", str(port), "--json", "--wait", "60"]) == 1
    assert {finding["at"] for finding in found(capsys)} == {2}


def test_a_command_that_ends_is_a_clear_error(capsys):
    command = f"{sys.executable} -c 'raise SystemExit(3)'"
    assert main([command, command, "--port", str(free_port())]) == 2
    assert "ended with status 3 before it was ready" in capsys.readouterr().err


def test_a_port_that_is_taken_is_a_clear_error(capsys):
    with serving() as (url, _):
        assert main(["anything", "else", "--port", url.rsplit(":", 1)[1]]) == 2
    assert "already answers" in capsys.readouterr().err


def test_answers_are_kept_for_another_day(tmp_path, capsys):
    kept = tmp_path / "first.json"
    with serving() as (first, _):
        assert main([first, "--save", str(kept)]) == 0
    with serving() as (second, _):
        assert main([str(kept), second, "--json"]) == 0
    with serving("token") as (second, _):
        assert main([str(kept), second, "--json"]) == 1
    capsys.readouterr()


def test_prompts_of_the_user_are_asked_too(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('plain words\n\n{"prompt": "in JSON"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    with serving() as (first, _), serving() as (second, _):
        assert main([first, second, "--json", "--no-built-in", "--prompts", str(prompts)]) == 0
    assert [finding["name"] for finding in found(capsys)] == ["prompts.txt:1", "prompts.txt:3", "prompts.txt:4"]


def test_a_line_that_is_no_prompt_is_named(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('fine\n{"text": "no"}\n')
    with pytest.raises(ValueError, match="line 2"):
        from_file(prompts)


def test_built_in_prompts_have_exact_lengths_and_share_prefixes():
    requests = {request.name: request.prompt for request in built_in([2, *range(10, 60)], longest=700)}
    assert len(requests["513 tokens"]) == 513 and "1024 tokens" not in requests
    assert requests["prefix: again"] == requests["prefix: first time"]
    assert requests["prefix: shorter"] == requests["prefix: first time"][:400]
    assert all(prompt[0] == 2 for prompt in requests.values() if isinstance(prompt[0], int))


def test_an_answer_that_stops_early_differs():
    whole = Answer("a", ["1", "2"], [-0.1, -0.1], [{"1": -0.1}, {"2": -0.1}])
    short = Answer("a", ["1"], [-0.1], [{"1": -0.1}])
    assert compare(whole, short, tie=0.25, drift=1.0).why == "2 tokens and 1"


def test_a_token_the_other_server_does_not_even_list_is_no_tie():
    first = Answer("a", ["1"], [-0.1], [{"1": -0.1, "3": -5.0}])
    second = Answer("a", ["2"], [-0.1], [{"2": -0.1, "1": -0.2}])
    finding = compare(first, second, tie=0.25, drift=1.0)
    assert (finding.kind, round(finding.gap, 2)) == ("differs", 4.9)


def test_one_server_without_save_is_a_usage_error():
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:1"])


def test_help_answers():
    assert subprocess.run([sys.executable, "-m", "parity", "--help"], capture_output=True).returncode == 0
