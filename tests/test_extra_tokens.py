"""Special tokens of one's own: in reserve first, else behind all others; what a text spells stays text."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from omnijax.data.spelling import Before, spelling
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import UserError


@pytest.fixture
def path(tmp_path) -> str:
    vocabulary = {letter: number for number, letter in enumerate("abcdefgh<|>im_")}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name in ("<end>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<more>"):
        tokenizer.add_special_tokens([AddedToken(name, special=True)])
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return str(file)


def test_reserved_ids_come_first(path):
    plain = TokenizerFile(path, "<end>")
    own = TokenizerFile(path, "<end>", extra=("<|im|>", "<|a|>", "<|b|>"))
    tokens, before = spelling(own).tokens, spelling(plain).tokens
    assert tokens["<|im|>"] == before["<|reserved_special_token_0|>"]
    assert tokens["<|a|>"] == before["<|reserved_special_token_1|>"]
    assert tokens["<|b|>"] == plain.vocab_size
    assert own.vocab_size == plain.vocab_size + 1
    assert own.fingerprint != plain.fingerprint
    assert own.encode("<|im|> abc").tolist() == [tokens["<|im|>"], *plain.encode("abc").tolist()]
    assert tokens["<|im|>"] not in spelling(own).encode("<|im|>", Before.TEXT)
    assert own.decode([tokens["<|im|>"], 0, tokens["<|b|>"]]) == plain.decode([0])
    again = tokenizers.Tokenizer.from_str(json.dumps(own.file))
    assert again.token_to_id("<|b|>") == plain.vocab_size
    assert again.token_to_id("<|reserved_special_token_0|>") is None


def test_bytes_have_named_tokens():
    own = Bytes(extra=("<|im|>", "<|b|>"))
    assert own.vocab_size == 259
    assert spelling(own).tokens == {"<|im|>": 257, "<|b|>": 258}
    assert own.encode("<|im|>").tolist() == list(b"<|im|>")
    assert own.decode([257, 104, 105, 258, 256]) == "hi"
    assert own.fingerprint != Bytes().fingerprint == "bytes"


def test_names_that_cannot_be_are_refused(path):
    for extra in (("<a>", "<a>"), ("",), (" ",)):
        with pytest.raises(UserError, match="must be names, each once"):
            Bytes(extra=extra)
        with pytest.raises(UserError, match="must be names, each once"):
            TokenizerFile(path, "<end>", extra=extra)
    with pytest.raises(UserError, match="'<more>' is a token already"):
        _ = TokenizerFile(path, "<end>", extra=("<more>",)).vocab_size
