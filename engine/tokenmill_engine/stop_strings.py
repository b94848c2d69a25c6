"""Finding stop strings in a stream of text, with as little held back as possible.

All stop strings share one automaton (Aho and Corasick: "Efficient string matching", CACM 1975). A
character costs one step however many strings there are, and the automaton's depth is the length of
the longest suffix that may still become a stop string: exactly what must be held back.

The match that is complete first wins, the longest of those that end together. That is the only rule
that does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Scans one request's text. With `include`, the match itself is released too."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self._include = include
        self._held = ""
        self._state = 0

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """The text that is safe to release, and the stop string that is now complete.

        A match that ends in text pushed while not `armed` is ignored; one that began there and ends
        in armed text counts. After a match, push nothing more.
        """
        automaton = self._automaton
        if automaton is None:
            return text, None
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            self._state, match = automaton.step(self._state, seen[end - 1])
            if match is not None and armed:
                self._held = ""
                return seen[: end if self._include else end - len(match)], match
        safe = len(seen) - automaton.depth[self._state]
        self._held = seen[safe:]
        return seen[:safe], None

    def flush(self) -> str:
        """What was held back; the text has ended, so it will never become a match."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """States are the prefixes of the stop strings; 0 is the empty one."""

    __slots__ = ("_children", "_fallback", "_match", "depth")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the longest proper suffix that is a prefix too
        self._match: list[str | None] = [None]  # the longest stop string that ends here
        self.depth = [0]
        for stop in stops:
            self._match[self._insert(stop)] = stop
        self._link()

    def step(self, state: int, char: str) -> tuple[int, str | None]:
        """The next state, and the stop string that `char` completes."""
        while state and char not in self._children[state]:
            state = self._fallback[state]
        state = self._children[state].get(char, 0)
        # A complete string that no other one continues is no prefix any more: hold less.
        rest = state if self._children[state] else self._fallback[state]
        return rest, self._match[state]

    def _insert(self, stop: str) -> int:
        state = 0
        for char in stop:
            following = self._children[state].setdefault(char, len(self._children))
            if following == len(self._children):
                self._children.append({})
                self._fallback.append(0)
                self._match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = following
        return state

    def _link(self) -> None:
        """Fallbacks and matches, shorter prefixes first."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._children[state].items():
                fallback = self._fallback[state]
                while fallback and char not in self._children[fallback]:
                    fallback = self._fallback[fallback]
                fallback = self._children[fallback].get(char, 0)
                self._fallback[following] = fallback
                self._match[following] = self._match[following] or self._match[fallback]
                queue.append(following)
