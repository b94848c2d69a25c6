"""One request, one answer. Needs Redis (TOKENMILL_REDIS_URL) and a worker: `make demo`."""

from tokenmill import Client

with Client() as client:
    completion = client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=7)
    print(completion.text)

    answer = client.chat(
        [
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "Name the capital of France."},
        ],
        max_tokens=8,
        temperature=0,
    )
    print(answer.text, f"({answer.usage.completion_tokens} tokens, {answer.finish_reason})")

    for completion in client.map(["One, two,", "Red, green,"], max_tokens=8, temperature=0):
        print(completion.text)
