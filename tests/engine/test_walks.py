"""How many files of headgate's run for a request: whoever follows it through the code has to read them."""

from __future__ import annotations

from tests.walks.walk import trace

MOST_FILES = {
    "capture to a file": 27,
    "steering vectors": 14,
    "chat with capture": 28,
    "gate": 24,
    "controller": 33,
}
"""Of each walk; one more than were counted, since what runs now and then may fall into one, and for controllers three.

A change that raises one says in its commit why the request has to pass one file more.
"""


def test_a_request_walks_through_few_files() -> None:
    walks = trace()

    found = {name: {file for files in walk.values() for file in files} for name, walk in walks.items()}
    assert found.keys() == MOST_FILES.keys()
    assert all(len(files) > 5 for files in found.values()), "nothing was traced"
    assert {name: sorted(files) for name, files in found.items() if len(files) > MOST_FILES[name]} == {}
