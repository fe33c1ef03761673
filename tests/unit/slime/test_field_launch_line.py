"""A launch line that comes as one text is split as a shell does it, and never into its letters."""

from __future__ import annotations

from cwtrain_slime._args import as_words


def test_a_launch_line_is_words_whether_it_comes_as_a_text_or_as_a_list() -> None:
    words = ["train.py", "--lr", "1"]
    assert as_words("train.py --lr 1") == words
    assert as_words(["train.py --lr 1"]) == words
    assert as_words(words) == words
    assert as_words("train.py") == ["train.py"]
