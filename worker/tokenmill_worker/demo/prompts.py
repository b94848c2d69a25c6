"""What the demo asks: chats whose prompts and answers differ in length."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Final

_PARAGRAPH: Final = (
    "The sea otter keeps itself warm with the densest fur of any animal, since it has no blubber. "
    "It floats on its back, opens shells with a stone that it carries under an arm, and sleeps "
    "wrapped in kelp so that it does not drift away. Where otters are hunted, sea urchins eat the "
    "kelp forests bare; where otters return, the forests do too."
)

QUESTIONS: Final = (
    "Name the capital of France.",
    "Explain in simple words why the sky is blue.",
    f"Summarize this text in one sentence.\n\n{_PARAGRAPH}",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List five things to pack for a weekend in the mountains, with a reason for each.",
    f"Write three questions that this text answers.\n\n{_PARAGRAPH}",
    "Give me a recipe for pancakes.",
    "What is a message queue? Answer for somebody who has never written a program.",
)


def demo_questions(count: int) -> list[str]:
    """`count` questions; they repeat when there are more requests than questions."""
    return list(islice(cycle(QUESTIONS), count))
