from __future__ import annotations

import threading
from pathlib import Path

import pytest

from support_tokenizers import CHATML, MAKERS, TEXTS, byte_level_bpe
from tokenmill_engine.errors import InvalidRequest, ModelLoadError
from tokenmill_engine.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", ["byte_level_bpe", "python_bytes"])
def test_encoding_and_decoding_round_trip(kind: str) -> None:
    tokenizer = MAKERS[kind]()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_special_tokens_are_added_as_the_tokenizer_says() -> None:
    tokenizer = byte_level_bpe(add_bos=True)
    bos = tokenizer._hf.bos_token_id
    assert tokenizer.encode("dog")[0] == bos
    assert bos in tokenizer.special_token_ids
    assert tokenizer.eos_token_id in tokenizer.special_token_ids
    assert tokenizer.decode(tokenizer.encode("dog")) == "<s>dog"
    assert tokenizer.decode(tokenizer.encode("dog"), skip_special_tokens=True) == "dog"


@pytest.mark.parametrize("text", ["", "half \ud83d", 5, None, b"x"])
def test_a_prompt_that_is_no_text_is_refused(text: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        byte_level_bpe().encode(text)
    assert caught.value.field == "prompt"


def test_a_prompt_without_any_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        MAKERS["word_piece"]().encode(" \n ")


def test_bad_words_are_spelled_at_the_start_and_after_a_space() -> None:
    tokenizer = byte_level_bpe()
    spelled = tokenizer.bad_word_ids(("dog", "  again"))
    texts = sorted(tokenizer.decode(ids) for ids in spelled)
    assert texts == [" again", " dog", "again", "dog"]


def test_a_folder_is_loaded_and_a_missing_one_named(tmp_path: Path) -> None:
    saved = byte_level_bpe()
    saved._hf.save_pretrained(tmp_path / "model")
    loaded = Tokenizer.load(str(tmp_path / "model"))
    assert loaded.encode(TEXTS[0]) == saved.encode(TEXTS[0])
    assert loaded.render_chat([{"role": "user", "content": "a"}])
    assert len(loaded) == len(saved)
    assert loaded._hf.chat_template == CHATML
    with pytest.raises(ModelLoadError, match="absent"):
        Tokenizer.load(str(tmp_path / "absent"))


def test_threads_encode_render_and_stream_without_disturbing_each_other() -> None:
    """Rendering switches a setting of the backend that encoding reads and streams must survive."""
    tokenizer = byte_level_bpe()
    prompt = "plain <|im_end|> text"
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.encode(TEXTS[1])
    expected = (tokenizer.encode(prompt), tokenizer.render_chat(chat), tokenizer.decode(ids))
    failures: list[object] = []
    start = threading.Barrier(4)

    def check(kind: int) -> None:
        start.wait()
        for _ in range(150):
            if kind == 0:
                found: object = tokenizer.encode(prompt)
            elif kind == 1:
                found = tokenizer.render_chat(chat)
            else:
                stream = tokenizer.text_stream(skip_special_tokens=False)
                found = "".join(map(stream.push, ids)) + stream.finish()
            if found != expected[min(kind, 2)]:
                failures.append(kind)

    def run(kind: int) -> None:
        try:
            check(kind)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
