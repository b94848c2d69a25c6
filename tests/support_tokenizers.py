"""Small tokenizers of every decoder family, trained on the spot."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tokenmill_engine.tokenizer import Tokenizer

TEXTS = (
    "Hello, world! Don't stop  now; it's 3.14 o'clock.\n\n\tdef f(x):\n    return x ** 2\n",
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, e\u0301 and é, 🛑🛑",
    "日本語の文章と中文字符,한국어 문장.",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    " leading and trailing spaces   ",
    "a literal \ufffd in between and one at the end \ufffd",
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _wrap(backend: Backend, chat_template: str | None = CHATML) -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=["<|im_start|>", "<|im_end|>"],
            chat_template=chat_template,
        )
    )


def byte_level_bpe(*, chat_template: str | None = CHATML, add_bos: bool = False) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return _wrap(backend, chat_template)


def unigram_metaspace() -> Tokenizer:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _wrap(backend)


def llama_byte_fallback() -> Tokenizer:
    """Llama 2's layout: `▁` for spaces, characters outside the vocabulary as byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    for char in ["▁", *"abcdefghijklmnopqrstuvwxyzHTDé.,!'日本"]:
        vocab.setdefault(char, len(vocab))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("i", "n"), ("▁", "▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", *SPECIAL])
    return _wrap(backend)


def word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=350, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return _wrap(backend)


def python_bytes() -> Tokenizer:
    """A tokenizer without a fast backend."""
    return Tokenizer(ByT5Tokenizer())


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (
        byte_level_bpe,
        unigram_metaspace,
        llama_byte_fallback,
        word_piece,
        python_bytes,
    )
}
