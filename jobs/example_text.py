#!/usr/bin/env python3
"""Writes calibration and held-out text for the quick start: the Python language reference.

    python3 jobs/example_text.py CALIBRATION.txt HELDOUT.txt

Every Python installation carries that text (pydoc_data.topics, what `help("for")` prints), so nothing is downloaded. It is technical English with
code in it: good enough to show that a model still works, while a model for real use wants text like what it will be used on.
Topics quote each other, so whole paragraphs are shared between them; a paragraph that has already been written is left out.
"""

import pathlib
import sys

from pydoc_data.topics import topics

HELDOUT_EVERY = 3  # every third topic is held out


def split_topics():
    """Two texts without a paragraph in common; documents end with a form feed line."""
    texts, seen = ([], []), set()
    # Long topics first: the short ones that quote them lose their paragraphs, and not the other way round.
    ordered = sorted(topics, key=lambda name: (-len(topics[name]), name))
    for position, name in enumerate(ordered):
        fresh = []
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        if fresh:
            texts[position % HELDOUT_EVERY == HELDOUT_EVERY - 1].append("\n\n".join(fresh).strip() + "\n")
    return ["\f\n".join(documents) for documents in texts]


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: example_text.py CALIBRATION.txt HELDOUT.txt")
    for path, text in zip(sys.argv[1:], split_topics()):
        pathlib.Path(path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
