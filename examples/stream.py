"""Text as it comes. Leaving the block early, as by Ctrl-C, cancels the request."""

from tokenmill import Client, RequestFailed

with Client() as client, client.stream("Once upon a time", max_tokens=64) as stream:
    try:
        for text in stream:
            print(text, end="", flush=True)
    except RequestFailed as error:
        print(f"\nended early: {error.code}")
    else:
        usage = stream.completion().usage
        print(f"\n{usage.prompt_tokens} + {usage.completion_tokens} tokens")
