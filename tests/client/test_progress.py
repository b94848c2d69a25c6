"""`map(progress=…)`: a callback, a bar where rich is installed, a counter where it is not."""

from __future__ import annotations

import pytest

from tokenmill._progress import reporting


def test_a_callback_gets_the_count_and_the_total_if_known() -> None:
    counts: list[tuple[int, int | None]] = []
    for prompts in (["a", "b"], iter(["a", "b"])):
        with reporting(lambda *count: counts.append(count), prompts) as answered:
            answered()
            answered()
    assert counts == [(1, 2), (2, 2), (1, None), (2, None)]


def test_nothing_is_shown_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(False, ["a"]) as answered:
        answered()
    assert capsys.readouterr() == ("", "")


def test_a_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(True, ["a"]) as answered:
        answered()
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err


@pytest.mark.parametrize(("prompts", "shown"), [(["a", "b"], "1/2"), (iter(["a"]), "1/?")])
def test_without_rich_a_counter_does(
    prompts: object,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tokenmill._progress.find_spec", lambda _: None)
    with reporting(True, prompts) as answered:
        answered()
    assert capsys.readouterr() == ("", f"\r{shown}\n")
