# SPDX-License-Identifier: Apache-2.0
"""Send requests to an OpenAI-compatible server, and keep tokens, their probabilities and the time to the first."""

import asyncio
import shlex
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import httpx
import openai

from parity.requests import TEXT, Request

TOP = 5
# vLLM's own additions to the API: ids instead of text, and answers of full length.
_VLLM = {"return_tokens_as_token_ids": True, "ignore_eos": True}


class Unreachable(Exception):
    """A server that cannot be compared; says why and what to do."""


@dataclass
class Answer:
    """tops: per token, the likeliest tokens there and their log probabilities. seconds: to the first token."""

    name: str
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


class Server:
    """An OpenAI-compatible server by its URL, with or without /v1.

    Raises:
        Unreachable: nothing answers there, or it serves no model.
    """

    def __init__(self, url: str, model: str | None = None, timeout: float = 600.0):
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        try:
            models = httpx.get(f"{self.root}/v1/models", timeout=30).raise_for_status().json()["data"]
            card = next((m for m in models if model in (None, m["id"])), None)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            why = str(error) or type(error).__name__
            raise Unreachable(f"{url} does not answer as an OpenAI-compatible server ({why}). Is it up?") from None
        if card is None:
            raise Unreachable(f"{url} does not serve {model or 'any model'}. Name one with --model.")
        self.model = card["id"]
        self.max_length = card.get("max_model_len") or 8192

    def tokens(self) -> list[int]:
        """The ids of requests.TEXT, the one that begins a text first.

        Raises:
            Unreachable: the server has no tokenizer to ask.
        """
        body = {"model": self.model, "prompt": TEXT, "add_special_tokens": True}
        try:
            answer = httpx.post(f"{self.root}/tokenize", json=body, timeout=60).raise_for_status().json()
            return [int(token) for token in answer["tokens"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(
                f"{self.root}/tokenize gives no token ids ({str(error) or type(error).__name__}). "
                "Use --prompts FILE alone, with --no-built-in."
            ) from None

    def serve(self, requests: list[Request], max_tokens: int, tell: Callable[[], None]) -> list[Answer]:
        """Answers in the order of the requests; `tell` hears of each that is complete.

        Raises:
            Unreachable: the server refuses a request, or goes away.
        """
        return asyncio.run(self._serve(requests, max_tokens, tell))

    async def _serve(self, requests, max_tokens, tell) -> list[Answer]:
        client = openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0, timeout=self.timeout)
        answers = []
        async with client:
            for _, group in groupby(requests, key=lambda request: request.group):
                sent = [self._ask(client, request, max_tokens, tell) for request in group]
                answers += await asyncio.gather(*sent)
        return answers

    async def _ask(self, client, request: Request, max_tokens: int, tell) -> Answer:
        answer = Answer(request.name)
        begun = time.perf_counter()
        try:
            async for token, logprob, top in self._stream(client, request, max_tokens):
                if not answer.tokens:
                    answer.seconds = time.perf_counter() - begun
                answer.tokens.append(token)
                answer.logprobs.append(logprob)
                answer.tops.append(top)
        except openai.OpenAIError as error:
            raise Unreachable(f"{self.root} failed on the request {request.name!r}: {error}") from None
        tell()
        return answer

    async def _stream(self, client, request: Request, max_tokens: int) -> AsyncIterator[tuple[str, float, dict]]:
        common = {"model": self.model, "temperature": 0, "max_tokens": max_tokens, "stream": True, "extra_body": _VLLM}
        if request.chat:
            chunks = await client.chat.completions.create(
                messages=request.prompt, logprobs=True, top_logprobs=TOP, **common
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    for item in choice.logprobs.content or () if choice.logprobs else ():
                        yield item.token, item.logprob, {top.token: top.logprob for top in item.top_logprobs}
        else:
            chunks = await client.completions.create(prompt=request.prompt, logprobs=TOP, **common)
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.logprobs:
                        found = choice.logprobs
                        for item in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
                            yield item


@contextmanager
def started(command: str, port: int, seconds: float) -> Iterator[str]:
    """Run `command` until the end of the block; the URL it serves once it is ready.

    Raises:
        Unreachable: it cannot be run, ends, or is not ready in time.
    """
    url = f"http://127.0.0.1:{port}"
    if _is_up(url):
        raise Unreachable(f"Something already answers at {url}. Stop it, or name another port with --port.")
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise Unreachable(f"{command!r} cannot be run: {error.strerror}.") from None
    try:
        deadline = time.monotonic() + seconds
        while not _is_up(url):
            if process.poll() is not None:
                raise Unreachable(f"{command!r} ended with status {process.returncode} before it was ready.")
            if time.monotonic() > deadline:
                raise Unreachable(f"{command!r} was not ready at {url} after {seconds:.0f} s. See --port, --wait.")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
