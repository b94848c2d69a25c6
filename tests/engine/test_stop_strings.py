from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut_by_definition(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The match that is complete first, and of those that end together the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            match = max(matches, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


def scan(pieces: list[str], stops: list[str], include: bool) -> tuple[list[str], str | None]:
    scanner, released = StopStrings(stops, include=include), []
    for piece in pieces:
        text, match = scanner.push(piece)
        released.append(text)
        if match is not None:
            return released, match
    return [*released, scanner.flush()], None


@given(pieces=st.lists(TEXT, max_size=6), stops=STOPS, include=st.booleans())
def test_any_cutting_of_the_text_gives_the_defined_result(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    released, match = scan(pieces, stops, include)
    assert ("".join(released), match) == cut_by_definition("".join(pieces), stops, include)


@given(text=TEXT, stops=STOPS)
def test_exactly_what_may_still_become_a_stop_string_is_held_back(
    text: str, stops: list[str]
) -> None:
    scanner, released = StopStrings(stops), ""
    for count, char in enumerate(text, start=1):
        piece, match = scanner.push(char)
        released += piece
        if match is not None:
            return
        held = max(
            size
            for stop in stops
            for size in range(len(stop))
            if text[:count].endswith(stop[:size])
        )
        assert released == text[: count - held]


@given(quiet=TEXT, loud=TEXT, stops=STOPS)
def test_a_match_that_ends_in_unarmed_text_is_ignored(
    quiet: str, loud: str, stops: list[str]
) -> None:
    scanner = StopStrings(stops)
    before, ignored = scanner.push(quiet, armed=False)
    after, match = scanner.push(loud)
    assert ignored is None
    text = quiet + loud
    ends = [
        (end, max((stop for stop in stops if text[:end].endswith(stop)), key=len))
        for end in range(len(quiet) + 1, len(text) + 1)
        if text[:end].endswith(tuple(stops))
    ]
    if not ends:
        assert (before + after + scanner.flush(), match) == (text, None)
        return
    end, expected = ends[0]
    assert (before + after, match) == (text[: end - len(expected)], expected)


def test_without_stop_strings_nothing_is_held() -> None:
    scanner = StopStrings(())
    assert scanner.push("abc") == ("abc", None)
    assert scanner.flush() == ""
