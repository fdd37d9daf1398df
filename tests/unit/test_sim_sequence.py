"""The text that the simulated engine makes."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from workers.sim.block_cache import Content
from workers.sim.sequence import WORDS, Sampling, Sequence
from workers.sim.tokens import encode


def say(prompt, max_tokens=20, chunk=1, **sampling):
    """The whole text, taken every `chunk` tokens, with the finished sequence."""
    sequence = Sequence(Content(array("I", prompt)), Sampling(max_tokens, **sampling), 0.0)
    text, count = "", 0
    while not sequence.finished:
        sequence.sample()
        count += 1
        if count % chunk == 0 or sequence.finished:
            text += sequence.take().text
    return text, sequence


prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=10)


@given(prompts)
def test_equal_prompts_give_equal_text(prompt):
    assert say(prompt)[0] == say(prompt)[0]


def test_prompt_seed_choice_and_adapter_change_the_text():
    adapted = Sequence(Content(array("I", [1]), adapter="a@1"), Sampling(20), 0.0)
    for _ in range(20):
        adapted.sample()
    texts = {
        say([1])[0],
        say([2])[0],
        say([1], seed=1)[0],
        say([1], choice=1)[0],
        adapted.take().text,
    }
    assert len(texts) == 5


@given(prompts, st.integers(1, 19))
def test_a_prompt_that_holds_the_first_words_is_continued_with_the_rest(prompt, said):
    text, whole = say(prompt, 20)
    rest, _ = say(whole.content.tokens[: len(prompt) + said], 20 - said)
    assert text == "".join(WORDS[index] for index in _words(text[: said * 4])) + rest


def _words(text):
    return [WORDS.index(text[start : start + 4]) for start in range(0, len(text), 4)]


def test_text_and_tokens_are_the_same_words():
    text, sequence = say([1], 9)
    assert encode(text) == sequence.content.tokens[1:]
    assert len(text.split()) == 9


def test_max_tokens_is_met_and_named_as_the_reason():
    _, sequence = say([1], 7)
    assert (sequence.generated, sequence.finish_reason, sequence.stop_reason) == (7, "length", None)


def test_an_answer_without_a_limit_of_its_own_ends_by_itself():
    _, sequence = say([1], 100_000, may_end=True)
    assert sequence.finish_reason == "stop"
    assert sequence.generated < 100_000


@given(prompts, st.integers(0, 60), st.integers(1, 9), st.integers(1, 7))
def test_text_ends_before_a_stop_string_wherever_it_falls(prompt, start, length, chunk):
    plain, _ = say(prompt)
    stop = plain[start : start + length]
    text, sequence = say(prompt, stop=(stop, "never said"), chunk=chunk)
    assert text == plain[: plain.index(stop)]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)


def test_a_stop_string_can_be_kept():
    plain, _ = say([1])
    assert say([1], stop=(plain[6:10],), include_stop=True)[0] == plain[: plain.index(plain[6:10]) + 4]


def test_a_stop_that_never_comes_holds_nothing_back_at_the_end():
    assert say([1], stop=("a stop string that nobody says",))[0] == say([1])[0]


def test_a_stop_token_ends_the_text_before_it():
    plain, whole = say([1])
    token = whole.content.tokens[5]
    text, sequence = say([1], stop_token_ids=frozenset([token]))
    assert text == plain[: len(text)]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", token)
