"""Enqueue here, read anywhere: another process may attach, leave, and continue where it was."""

from tokenmill import Client

with Client() as producer:
    # With an id of your own, submitting again after a crash is harmless.
    handle = producer.submit(
        "Once upon a time", max_tokens=32, priority="high", deadline_s=60, tenant="examples"
    )
    print("submitted", handle.id, producer.status(handle.id).state)

with Client() as reader:
    with reader.attach(handle.id) as stream:
        print(next(iter(stream)), end="")
    cursor = stream.last_seq  # leaving an attached stream ends nothing

    for text in reader.attach(handle.id, after=cursor):
        print(text, end="")
    print()
    print(reader.result(handle.id, timeout_s=60).usage)
