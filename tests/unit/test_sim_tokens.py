"""The simulated engine's tokenizer and chat template."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.sim.sequence import WORDS
from workers.sim.tokens import RenderError, decode, encode, render_chat

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=5,
)


@given(texts)
def test_text_survives_the_round_trip(text):
    assert decode(encode(text)) == text


@given(texts, texts)
def test_encodings_in_a_row_decode_to_both_texts(first, second):
    assert decode(encode(first) + encode(second)) == first + second


@given(texts, texts)
def test_full_pieces_of_a_text_stay_when_it_grows(text, more):
    full = len(text.encode()) // 4
    assert encode(text + more)[:full] == encode(text)[:full]


def test_a_token_is_four_bytes_in_little_endian_order():
    assert encode("abcde").tolist() == [int.from_bytes(b"abcd", "little"), ord("e")]


def test_a_lone_surrogate_becomes_a_question_mark():
    assert decode(encode("a\ud800b")) == "a?b"


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="4294967295"):
        decode([1 << 32])
    with pytest.raises(ValueError, match="integers"):
        decode([-1])


@given(messages, messages)
def test_a_longer_chat_starts_with_the_tokens_of_the_shorter(chat, more):
    short = render_chat(chat, add_generation_prompt=False).tokens
    assert render_chat(chat + more).tokens[: len(short)] == short


@given(messages, st.lists(st.sampled_from(WORDS), min_size=1, max_size=9))
def test_an_answer_sent_back_has_the_tokens_that_were_generated(chat, words):
    prompt = render_chat(chat).tokens
    generated = [encode(word)[0] for word in words]
    again = render_chat([*chat, {"role": "assistant", "content": "".join(words)}]).tokens
    assert again[: len(prompt) + len(generated)].tolist() == prompt.tolist() + generated


def test_the_template_marks_roles_and_opens_the_answer():
    rendered = render_chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    assert decode(rendered.tokens) == "<|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n"
    assert rendered.shareable == len(rendered.tokens)


def test_a_final_message_can_be_left_open():
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert decode(render_chat(chat, continue_final_message=True).tokens).endswith("<|assistant|>\nWell")


def test_tools_come_first_whatever_the_order_of_their_fields():
    chat = [{"role": "user", "content": "hi"}]
    one = render_chat(chat, [{"type": "function", "function": {"name": "f"}}])
    other = render_chat(chat, [{"function": {"name": "f"}, "type": "function"}])
    assert one == other
    assert decode(one.tokens).startswith("<|tools|>\n")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cdef"}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat(
        [{"role": "user", "content": "abcdef"}]
    )


def test_an_image_ends_what_can_be_shared():
    def chat(url):
        image = {"type": "image_url", "image_url": {"url": url}}
        return [
            {"role": "system", "content": "look"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "this: "}, image, {"type": "text", "text": "ok?"}],
            },
        ]

    cat, dog = render_chat(chat("cat.png")), render_chat(chat("dog.png"))
    assert cat.tokens == dog.tokens
    assert cat.media != dog.media
    assert decode(cat.tokens[: cat.shareable]) == "<|system|>\nlook\n<|user|>\nthis: "


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([["role"]], r"messages\[0\]"),
        ([{"content": "hi"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"text": "hi"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
    ],
)
def test_what_is_no_chat_is_refused_by_the_name_of_the_field(chat, field):
    with pytest.raises(RenderError, match=field):
        render_chat(chat)
