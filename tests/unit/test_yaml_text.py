"""YAML with comments: what is read back is what was written, wherever the comments stand."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from cluster.yaml_text import WIDTH, Note, plain, render

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.text(alphabet="ab :#-'\n\t\\$", max_size=20)
)
NOTES = st.text(alphabet=" ab#:\n-").map(Note)
KEYS = st.text(max_size=6) | NOTES
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner | NOTES, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_what_is_read_back_is_what_was_written_without_the_notes(data: dict[str, object]) -> None:
    assert (yaml.safe_load(render(data)) or {}) == plain(data)


def test_a_note_stands_before_what_follows_it() -> None:
    data = {
        Note("Why."): None,
        "a": {Note("Inner."): None, "b": [1, Note("Of two."), 2, {Note("Of c."): 0, "c": 3}]},
    }
    assert render(data) == (
        "# Why.\na:\n  # Inner.\n  b:\n    - 1\n    # Of two.\n    - 2\n    # Of c.\n    - c: 3\n"
    )


def test_sentences_are_filled_to_the_width_and_indented_lines_stay_as_they_are() -> None:
    note = Note("\n" + "word " * 40 + "\nand more.\n   a command   # as it is")
    lines = render({note: None, "a": 1}).splitlines()
    assert lines[0] == ""
    assert all(line.startswith(("# word", "# and")) for line in lines[1:3])
    assert max(map(len, lines)) <= WIDTH
    assert lines[-2:] == ["#    a command   # as it is", "a: 1"]


def test_commands_of_many_lines_are_shown_as_they_are_typed() -> None:
    assert render({"run": ["one \\\n  two"]}) == "run:\n  - |-\n    one \\\n      two\n"
