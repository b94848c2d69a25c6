"""Runs in a client's container: streams requests at once, and prints what comes as JSON lines.

`client.py NUM_REQUESTS MAX_TOKENS`. A `mid` line says that a request has some of its tokens, and
which worker it has them from; an `end` line holds the transcript.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from tokenmill import Client, SamplingParams, TokenmillError
from tokenmill.protocol import StartEvent, TokenEvent

MID_TOKENS = 6
DEADLINE_S = 600.0
SUBJECTS = ("the sea", "a lighthouse", "bread", "the moon", "a fox", "rain", "a clock", "iron")


def sampling(number: int, max_tokens: int) -> SamplingParams:
    """Half of them greedy, half of them drawn: a successor must continue either exactly."""
    if number % 2:
        return SamplingParams(
            max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=number, ignore_eos=True
        )
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def stream(client: Client, number: int, max_tokens: int) -> dict[str, object]:
    prompt = f"A story about {SUBJECTS[number % len(SUBJECTS)]}, part {number + 1}:"
    text, workers = "", []
    request = client.stream(
        prompt, deadline_s=DEADLINE_S, sampling_params=sampling(number, max_tokens)
    )
    with request:
        for event in request.events():
            if isinstance(event, StartEvent):
                workers.append(event.worker)
            if isinstance(event, TokenEvent):
                seen = event.index + len(event.token_ids)
                if event.index < MID_TOKENS <= seen < max_tokens:
                    say({"event": "mid", "request": number, "worker": workers[-1]})
            text += getattr(event, "text", "")
        completion = request.completion()
    return {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "streamed": text == completion.text,
        "workers": workers,
        "attempts": completion.attempts,
    }


def say(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    num_requests, max_tokens = int(sys.argv[1]), int(sys.argv[2])
    with Client() as client, ThreadPoolExecutor(num_requests) as pool:

        def one(number: int) -> None:
            try:
                result = stream(client, number, max_tokens)
            except TokenmillError as error:
                result = {"error": str(error)}
            say({"event": "end", "request": number, **result})

        for _ in pool.map(one, range(num_requests)):
            pass


if __name__ == "__main__":
    main()
