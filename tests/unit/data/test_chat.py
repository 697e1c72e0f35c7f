"""Conversations: their tokens, the targets that are learned, and errors with the row."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spider.config import ConfigError, load_config
from spider.data import chat
from spider.data.documents import learned_texts
from spider.data.encode import encode_part
from spider.data.packing import PackedRows, pack
from spider.data.shards import Shards, build_metadata, verify
from spider.data.sources.local import import_local
from spider.tokens import BYTES
from spider.tokens.stored import BpeTokens
from spider.tokens.turns import (
    ASSISTANT,
    OUTPUT_END,
    OUTPUT_START,
    PYTHON_END,
    PYTHON_START,
    SYSTEM,
    TURN,
    USER,
    assistant_mask,
    ends_inside_answer,
)
from tests.unit.small_datasets import dataset

HELLO = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye"},
]
CHAT = dataset(validation=0.0, format="chat")


def talk(*contents):
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)])


def test_the_tokens_of_a_conversation_are_texts_between_roles():
    ids = chat.ids_of(json.dumps(HELLO), BYTES)
    text = lambda content: list(content.encode())  # noqa: E731
    assert ids.tolist() == [
        *[BYTES.bos, SYSTEM, *text("Be brief."), TURN, USER, *text("Hi"), TURN],
        *[ASSISTANT, *text("Hello!"), TURN, USER, *text("Bye"), TURN],
        *[ASSISTANT, *text("Bye"), TURN, BYTES.eos],
    ]
    answers = bytes(i for i, counts in zip(ids, assistant_mask(ids), strict=True) if counts and i < 256)
    assert answers == b"Hello!Bye"
    assert assistant_mask(ids).sum() == len("Hello!Bye") + 2, "the end of a turn is learned too"
    assert BYTES.raw(ids) == b"Be brief.HiHello!ByeBye"


PARTS = [("text", "It is "), ("python", "4/2"), ("python_output", "2"), ("text", ": two."), ("python", "x")]


def with_parts(parts, role="assistant"):
    content = [{"type": kind, "text": text} for kind, text in parts]
    rows = {"user": "Hi", "assistant": "Ho"} | {role: content}
    return json.dumps([{"role": role, "content": content} for role, content in rows.items()])


def test_a_call_is_learned_and_its_output_is_only_read():
    row = with_parts(PARTS)
    ids = chat.ids_of(row, BYTES)
    answer = [
        *[*b"It is ", PYTHON_START, *b"4/2", PYTHON_END, OUTPUT_START, *b"2", OUTPUT_END],
        *[*b": two.", PYTHON_START, *b"x", PYTHON_END, TURN],
    ]
    assert ids.tolist() == [BYTES.bos, USER, *b"Hi", TURN, ASSISTANT, *answer, BYTES.eos]
    assert ids[assistant_mask(ids)].tolist() == [
        *[*b"It is ", PYTHON_START, *b"4/2", PYTHON_END],
        *[*b": two.", PYTHON_START, *b"x", PYTHON_END, TURN],
    ]
    assert chat.parts_of(answer[:-1], BYTES) == chat.parse(row)[1][1] == PARTS
    assert chat.plain(row) == b"Hi\nIt is 4/22: two.x"
    assert (
        chat.ids_of(with_parts([("text", "Ho")]), BYTES).tolist()
        == chat.ids_of(talk("Hi", "Ho"), BYTES).tolist()
    )


def test_no_content_can_contain_a_role():
    tokens = BpeTokens([(97, 97)])
    for vocabulary in (BYTES, tokens):
        ids = chat.ids_of(talk("<ASSISTANT>\u010c", "RESERVED_2 <|turn|> aa"), vocabulary)
        assert [i for i in ids.tolist() if vocabulary.bytes_of[i] == 0] == [
            *(BYTES.bos, USER, TURN, ASSISTANT, TURN, BYTES.eos)
        ]


@given(st.lists(st.sampled_from([BYTES.bos, SYSTEM, USER, ASSISTANT, TURN, OUTPUT_START, OUTPUT_END,
                                 BYTES.eos, 97, 98]), max_size=40), st.integers(0, 40))  # fmt: skip
def test_the_mask_does_not_depend_on_where_a_stream_is_cut(ids, at):
    ids = np.array(ids, np.int64)
    one, two = ids[:at], ids[at:]
    parts = [assistant_mask(one), assistant_mask(two, ends_inside_answer(one))]
    assert np.concatenate(parts).tolist() == assistant_mask(ids).tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("nonsense", "is not valid JSON"),
        ("[]", "must be a list of messages, and is empty"),
        ('[{"role": [], "content": "x"}]', "message 0: role must be one of system, user, assistant"),
        (with_parts(PARTS, "user"), "message 0: content must be text, and not empty; only an assistant's"),
        (with_parts([("tool", "x")]), "message 1, part 0: type must be one of text, python, python_output"),
        (with_parts(PARTS[2:]), "message 1, part 0: a python_output must follow a python part"),
        ('[{"role": "assistant", "content": "x"}]', "must begin with a user's message"),
        ('[{"role": "user", "content": "x"}]', "must end with an assistant's message"),
        (json.dumps(HELLO[1:2] * 2 + HELLO[2:3]), "two messages of the user in a row"),
    ],
)
def test_a_malformed_conversation_is_an_error_with_its_row(tmp_path, row, message):
    pq.write_table(pa.table({"text": [talk("a", "b"), row]}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=rf"p.parquet: row 1 is not a conversation: {message}"):
        encode_part(tmp_path / "p.parquet", tmp_path / "s", "000", CHAT)
    assert not list((tmp_path / "s").rglob("*.bin"))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_of_questions_and_answers_make_conversations(tmp_path, suffix):
    rows = [{"question": "How many?", "answer": "Two. #### 2"}, {"question": 'Say "é"', "answer": "é"}]
    settings = dataset(validation=0.0, format="chat", text_column="question", answer_column="answer")
    if suffix == "jsonl":
        (tmp_path / "gsm.jsonl").write_text("\n".join(map(json.dumps, rows)))
        import_local(tmp_path / "gsm.jsonl", tmp_path / "p.parquet", settings)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    shown = list(learned_texts(tmp_path / "p.parquet", settings))
    assert shown == [b"How many?\nTwo. #### 2", 'Say "é"\né'.encode()]
    with pytest.raises(ConfigError, match=r"answer_column: makes conversations; set format: chat"):
        source = {"kind": "pydocs"}
        load_config({"datasets": {"d": {"source": source, "answer_column": "answer"}}, "runs": {}})


def test_only_answers_are_learned_wherever_a_long_one_is_cut(tmp_path):
    rng = np.random.default_rng(0)
    text = lambda n: "".join(chr(97 + c) for c in rng.integers(0, 26, n))  # noqa: E731
    rows = [talk(*(text(rng.integers(1, 90)) for _ in range(2 * rng.integers(1, 4)))) for _ in range(80)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "p.parquet")
    folder = tmp_path / "talk"
    encode_part(tmp_path / "p.parquet", folder, "000", CHAT)
    metadata = build_metadata(folder, "talk", CHAT, source={}, parts=["000"])
    assert metadata.written_as == "chat" and verify(folder)["documents"] == 80
    packing, shards = pack(folder, 32), Shards(folder, "train")
    packed = PackedRows.open(folder, shards, 32)
    numbers = np.arange(packing.rows)
    ids, segments = packed.rows(numbers, BYTES.pad)
    counted = packed.answers(numbers, ids) & (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    text = shards.read(0, shards.tokens)
    assert sorted(ids[:, 1:][counted].tolist()) == sorted(text[assistant_mask(text)].tolist())
