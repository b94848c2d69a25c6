"""The public names of the package. Adding one is a decision; removing one breaks somebody."""

from __future__ import annotations

import tokenmill

PUBLIC = [
    "AsyncClient", "AsyncTokenStream", "AuthenticationFailed", "Client", "Completion",
    "ConfigurationError", "DeadlineExceeded", "EndEvent", "Event", "Explanation", "Handle",
    "InvalidRequest", "Message", "ProtocolError", "QueueFull", "QueueUnavailable",
    "RequestCancelled", "RequestConflict", "RequestDead", "RequestFailed", "RequestTooLarge",
    "ResultTimeout", "RewindEvent", "SamplingParams", "StartEvent", "Status", "StreamDiverged",
    "TimelineEntry", "TokenEvent", "TokenLogprob", "TokenStream", "TokenmillError",
    "UnknownRequest", "UnsupportedParameter", "Usage", "__version__",
]  # fmt: skip

#: Everything that product.md names, with the call that both clients must understand.
METHODS = [
    "attach", "cancel", "chat", "explain", "generate", "keys", "map", "result", "status", "stream",
    "submit",
]  # fmt: skip


def test_the_exported_names_are_these_and_sorted() -> None:
    assert tokenmill.__all__ == PUBLIC == sorted(PUBLIC)
    for name in PUBLIC:
        assert hasattr(tokenmill, name)


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> list[str]:
        return sorted(name for name in vars(cls) if not name.startswith("_"))

    assert public(tokenmill.Client) == sorted([*METHODS, "close"])
    assert public(tokenmill.AsyncClient) == sorted([*METHODS, "aclose"])


def test_every_error_can_be_caught_as_one() -> None:
    errors = [
        member for member in map(vars(tokenmill).get, PUBLIC)
        if isinstance(member, type) and issubclass(member, Exception)
    ]  # fmt: skip
    assert len(errors) == 17
    assert all(issubclass(error, tokenmill.TokenmillError) for error in errors)
