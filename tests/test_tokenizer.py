import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.default_model import DEFAULT_TARGET, resolve
from shared.errors import InvalidRequest, UnsupportedModel
from shared.tokenizer import Tokenizer, load_tokenizer
from tests.support.tiny_tokenizers import BOS, PLAIN_ADDED, byte_fallback_backend, byte_level_backend, pretrained

TEXTS = ["hello world", "a 🦜🦜x", "漢字かな", "e\u0301a\u0308", "", "  two  spaces\n\n", "<tool>x"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(pretrained(byte_level_backend()))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_beginning_of_sequence_is_added_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("ab")[0] == 0
    assert tokenizer.encode("ab").count(0) == 1
    assert tokenizer.encode(f"{BOS}ab") == tokenizer.encode("ab")


def test_a_spelled_out_beginning_is_left_alone_where_the_model_adds_none() -> None:
    backend = byte_level_backend()
    backend.post_processor = None
    assert Tokenizer(pretrained(backend)).encode(f"{BOS}{BOS}ab")[:2] == [0, 0]


def test_truncation_and_padding_of_a_saved_tokenizer_are_ignored() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    assert Tokenizer(pretrained(backend)).encode("hello world") == Tokenizer(pretrained(byte_level_backend())).encode("hello world")


def test_chat_is_rendered_with_one_beginning_of_sequence(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert token_ids.count(0) == 1
    assert tokenizer.decode(token_ids) == "[user]hello[assistant]"


def test_chat_without_a_template_is_refused() -> None:
    tokenizer = Tokenizer(pretrained(byte_level_backend(), chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template") as raised:
        tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert raised.value.field == "chat"


def test_what_a_template_refuses_is_told(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="nobody cannot speak") as raised:
        tokenizer.render_chat([{"role": "nobody", "content": "hello"}])
    assert raised.value.field == "chat.messages"


def test_a_template_that_breaks_is_a_bad_request() -> None:
    tokenizer = Tokenizer(pretrained(byte_level_backend(), chat_template="{{ messages[0].content + 1 }}"))
    with pytest.raises(InvalidRequest, match="cannot render"):
        tokenizer.render_chat([{"role": "user", "content": "hello"}])


def test_vocabulary_counts_added_tokens(tokenizer: Tokenizer) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<late>"])
    assert Tokenizer(pretrained(backend)).vocab_size == tokenizer.vocab_size + 1


def test_spare_rows_that_a_conversion_named_are_no_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    saved = json.loads(byte_level_backend().to_str())
    vocabulary = saved["model"]["vocab"]
    for spare in range(tokenizer.vocab_size, tokenizer.vocab_size + 5):
        vocabulary[f"[PAD{spare}]"] = spare
    padded = Tokenizer(pretrained(type(byte_level_backend()).from_str(json.dumps(saved))))
    assert padded.vocab_size == tokenizer.vocab_size
    assert padded.fingerprint == tokenizer.fingerprint


def test_fingerprint_is_over_ids_bytes_and_special_flags() -> None:
    backend = byte_level_backend(words=(" a",))
    tokens = sorted((index, token) for token, index in backend.get_vocab().items())
    expected = hashlib.sha256()
    for index, token in tokens:
        as_bytes = {0: b"<s>", 1: b"</s>", 2: b"<tool>"}.get(index)
        if as_bytes is None:  # what a single byte-level token decodes to, byte by byte
            as_bytes = b"".join(_byte_of(backend, character) for character in token)
        expected.update(index.to_bytes(4, "little") + len(as_bytes).to_bytes(4, "little") + as_bytes + bytes([index < 2]))
    assert Tokenizer(pretrained(backend)).fingerprint == expected.hexdigest()


def _byte_of(backend: object, character: str) -> bytes:
    # The 256 characters of the alphabet in code point order: printable Latin-1 bytes are themselves, the others follow from 256 on.
    if ord(character) < 256:
        return bytes([ord(character)])
    others = [byte for byte in range(256) if not (33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255)]
    return bytes([others[ord(character) - 256]])


def test_fingerprint_ignores_the_template_and_survives_saving(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert Tokenizer(pretrained(byte_level_backend(), chat_template="{{ messages }}")).fingerprint == tokenizer.fingerprint
    pretrained(byte_level_backend()).save_pretrained(str(tmp_path))
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.render_chat([{"role": "user", "content": "ab"}]) == tokenizer.render_chat([{"role": "user", "content": "ab"}])


def test_fingerprint_ignores_merges_and_post_processing(tokenizer: Tokenizer) -> None:
    saved = json.loads(byte_level_backend().to_str())
    saved["post_processor"] = None
    saved["version"] = "1.0"
    saved["model"]["merges"] = [" ".join(merge) if isinstance(merge, list) else merge for merge in saved["model"]["merges"]]  # older spelling
    assert Tokenizer(pretrained(type(byte_level_backend()).from_str(json.dumps(saved)))).fingerprint == tokenizer.fingerprint


def test_fingerprint_sees_other_ids_and_other_flags(tokenizer: Tokenizer) -> None:
    assert Tokenizer(pretrained(byte_level_backend(words=("hello", " the")))).fingerprint != tokenizer.fingerprint
    assert Tokenizer(pretrained(byte_fallback_backend())).fingerprint != tokenizer.fingerprint
    swapped = Tokenizer(pretrained(byte_level_backend(words=("ab", "cd"))))
    assert swapped.fingerprint != Tokenizer(pretrained(byte_level_backend(words=("cd", "ab")))).fingerprint
    flagged = byte_level_backend()
    flagged.add_special_tokens([PLAIN_ADDED])
    assert Tokenizer(pretrained(flagged)).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(("name", "told"), [("./no/such/place", "no such directory"), ("empty", "no tokenizer could be loaded")])
def test_what_cannot_be_loaded_is_refused_in_a_sentence(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match=told):
        load_tokenizer(tmp_path / name if name == "empty" else name)


def test_a_broken_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    pretrained(byte_level_backend()).save_pretrained(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    def work(index: int) -> bool:
        text = f"hello {index} 🦜"
        chat = tokenizer.render_chat([{"role": "user", "content": text}])
        return tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.decode(chat) == f"[user]{text}[assistant]"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(400)))


@pytest.mark.real_model
def test_a_real_model_is_read() -> None:
    tokenizer = load_tokenizer(resolve(DEFAULT_TARGET))
    assert tokenizer.decode(tokenizer.encode("fn main() { 🦜 }")) == "fn main() { 🦜 }"
    assert "hello" in tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hello"}]))
    assert max(tokenizer.encode("any text")) < tokenizer.vocab_size
